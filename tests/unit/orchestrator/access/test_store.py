"""Who a caller is by what it shows, and that the file may change under it."""

from __future__ import annotations

import dataclasses
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3stream.errors import ConfigError, UnauthenticatedError
from h3stream.job import TenantLimits
from orchestrator.access import store as store_module
from orchestrator.access.access_file import AccessFile, Certificate, Key, Tenant, write_access_file
from orchestrator.access.keys import make_key, read_key
from orchestrator.access.store import CHECK_S, AccessStore
from orchestrator.caller import SCOPES, Caller

NOW = datetime(2026, 3, 1, tzinfo=UTC)


class Clocks:
    """A monotonic clock and the wall's, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall = NOW

    def store(self, path: Path | None, *, needs_certificate: bool = False) -> AccessStore:
        return AccessStore(
            path,
            needs_certificate=needs_certificate,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.wall.timestamp(),
        )


def key_and_text(key_id: str, expires: datetime | None = None) -> tuple[Key, str]:
    text = make_key(key_id)
    parts = read_key(text)
    assert parts is not None
    return Key(key_id, "acme", ("generate",), parts.sha256, NOW, expires), text


def bearer(text: str) -> tuple[str]:
    return (f"Bearer {text}",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.json"


def test_without_a_file_everybody_is_the_default_tenant_and_may_do_all() -> None:
    store = Clocks().store(None)
    assert not store.authenticates
    assert store.identify(()) == Caller() == store.identify(("Bearer whatever",))
    assert (store.limits("any"), store.weight("any")) == (TenantLimits(), 1.0)


def test_a_key_stands_for_its_tenant_and_scopes_with_what_they_imply(path: Path) -> None:
    key, text = key_and_text("ci")
    write_access_file(path, AccessFile(keys=(key,)))
    store = Clocks().store(path)
    caller = Caller("acme", frozenset({"generate", "read_own"}), "ci")
    assert store.authenticates
    assert store.identify(bearer(text)) == caller
    assert store.identify((f"bearer  {text} ",)) == caller, "the scheme has no case"


def test_a_secret_is_the_whole_secret_of_its_own_key(path: Path) -> None:
    (first, text), (second, other) = key_and_text("a"), key_and_text("b")
    write_access_file(path, AccessFile(keys=(first, second)))
    store = Clocks().store(path)
    swapped = "h3s_a_" + other.removeprefix("h3s_b_")
    for wrong in (swapped, text[:-1], text + "x", text.replace("h3s_a_", "h3s_c_"), first.sha256, "", "h3s_a_"):
        with pytest.raises(UnauthenticatedError) as refused:
            store.identify(bearer(wrong))
        assert text[6:] not in refused.value.message
        assert other[6:] not in refused.value.message
    for authorization in ((text,), (f"Basic {text}",), (*bearer(text), *bearer(text)), ("",)):
        with pytest.raises(UnauthenticatedError, match="must be `Bearer KEY` once"):
            store.identify(authorization)
    with pytest.raises(UnauthenticatedError, match="needs a key: send the metadata"):
        store.identify(())


def test_a_key_is_valid_until_the_second_in_which_it_expires(path: Path) -> None:
    key, text = key_and_text("ci", NOW + timedelta(seconds=10))
    write_access_file(path, AccessFile(keys=(key,)))
    clocks = Clocks()
    store = clocks.store(path)
    clocks.wall = NOW + timedelta(seconds=9.9)
    store.identify(bearer(text))
    clocks.wall = NOW + timedelta(seconds=10)
    with pytest.raises(UnauthenticatedError, match="the key ci has expired: 2026-03-01 00:00:10 UTC"):
        store.identify(bearer(text))


def test_a_changed_file_counts_and_is_looked_at_once_a_second_at_most(path: Path) -> None:
    (old, old_text), (new, new_text) = key_and_text("old"), key_and_text("new")
    write_access_file(path, AccessFile(keys=(old,), tenants={"acme": Tenant(weight=2)}))
    clocks = Clocks()
    store = clocks.store(path)
    write_access_file(path, AccessFile(keys=(new,), tenants={"acme": Tenant(3, TenantLimits(max_queued_jobs=1))}))
    clocks.now_s += CHECK_S * 0.9
    store.identify(bearer(old_text))
    clocks.now_s += CHECK_S * 0.1
    with pytest.raises(UnauthenticatedError, match="it has been revoked"):
        store.identify(bearer(old_text))
    assert store.identify(bearer(new_text)).key_id == "new"
    assert (store.weight("acme"), store.limits("acme").max_queued_jobs) == (3, 1)
    assert (store.weight("other"), store.limits("other")) == (1, TenantLimits())


def test_tenants_are_those_that_the_file_names_anywhere(path: Path) -> None:
    assert AccessStore(None).num_tenants() == 1
    write_access_file(path, AccessFile())
    assert AccessStore(path).num_tenants() == 1
    keys = tuple(dataclasses.replace(key_and_text(key_id)[0], tenant="a") for key_id in ("one", "two"))
    write_access_file(path, AccessFile(keys=keys, tenants={"a": Tenant()}))
    clocks = Clocks()
    store = clocks.store(path)
    assert store.num_tenants() == 1
    certificate = Certificate("render", "b", ("generate",))
    write_access_file(path, AccessFile(keys=keys, certificates=(certificate,), tenants={"c": Tenant()}))
    clocks.now_s += CHECK_S
    assert store.num_tenants() == 3


def fail(path: Path) -> AccessFile:
    raise OverflowError("nobody has thought of this")


@pytest.mark.parametrize("damage", ["half", "gone", "open to all", "nested", "unforeseen"])
def test_a_file_that_breaks_changes_nothing_and_is_logged_once(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, text = key_and_text("ci")
    write_access_file(path, AccessFile(keys=(key,)))
    clocks = Clocks()
    store = clocks.store(path)
    whole = path.read_text()
    if damage == "half":
        path.write_text(whole[:50])
    elif damage == "gone":
        path.unlink()
    elif damage == "nested":
        path.write_text("[" * 100_000)
    elif damage == "unforeseen":
        path.write_text(whole + " ")
        monkeypatch.setattr(store_module, "read_access_file", fail)
    else:
        path.chmod(0o666)
    for _ in range(3):
        clocks.now_s += CHECK_S
        assert store.identify(bearer(text)).key_id == "ci"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "stays in force" in caplog.text
    monkeypatch.undo()
    write_access_file(path, AccessFile())
    path.chmod(0o600)
    clocks.now_s += CHECK_S
    with pytest.raises(UnauthenticatedError):
        store.identify(bearer(text))


def test_a_file_that_is_broken_at_the_start_is_refused(path: Path) -> None:
    path.write_text("{")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"access file {path}: "):
        AccessStore(path)


def test_a_certificate_stands_for_a_key_by_any_of_its_names(path: Path) -> None:
    key, text = key_and_text("ci")
    entry = Certificate("render.acme", "renderers", ("read_all",))
    write_access_file(path, AccessFile(keys=(key,), certificates=(entry,)))
    store = Clocks().store(path, needs_certificate=True)
    caller = store.identify((), ("someone", "render.acme"))
    assert caller == Caller("renderers", frozenset({"read_own", "read_all"}), "cert:render.acme")
    assert store.identify(bearer(text), ("render.acme",)).tenant == "acme", "a key counts first"
    with pytest.raises(UnauthenticatedError):
        store.identify(bearer("h3s_ci_wrong"), ("render.acme",))
    with pytest.raises(UnauthenticatedError, match="the certificate of 'render' is no caller"):
        store.identify((), ("render", "acme"))


def test_without_a_file_a_certificate_that_tls_has_let_in_is_enough() -> None:
    store = Clocks().store(None, needs_certificate=True)
    assert store.authenticates
    assert store.identify((), ("näme",)) == Caller(scopes=frozenset(SCOPES), key_id="cert:n?me")


SHOWN = st.one_of(st.text(), st.text().map("Bearer {}".format), st.from_regex("Bearer h3s_ci_.*"))


@given(st.lists(SHOWN), st.lists(st.text()))
def test_whatever_is_shown_that_is_no_key_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, authorization: list[str], names: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    if not path.exists():
        write_access_file(path, AccessFile(keys=(key_and_text("ci")[0],)))
    with pytest.raises(UnauthenticatedError):
        Clocks().store(path).identify(authorization, names)
