"""`python -m orchestrator.access`: secrets are shown once and kept nowhere."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from h3stream.errors import UnauthenticatedError
from orchestrator.access.__main__ import main
from orchestrator.access.access_file import read_access_file
from orchestrator.access.store import AccessStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "access.json"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def is_valid(file: Path, key: str) -> bool:
    try:
        AccessStore(file).identify((f"Bearer {key}",))
    except UnauthenticatedError:
        return False
    return True


def test_a_key_is_printed_alone_and_its_secret_is_in_no_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "add", "--file", file, "--tenant", "acme", "--scope", "generate", "--id", "ci", "--note", "x")
    key = out.removesuffix("\n")
    assert is_valid(file, key)
    secret = key.removeprefix("h3s_ci_")
    assert len(secret) == 43
    assert [path for path in file.parent.rglob("*") if secret in path.read_text()] == []
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_list_shows_neither_secrets_nor_hashes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key_id in ("a", "b"):
        run(
            capsys,
            "add",
            "--file",
            file,
            "--tenant",
            "acme",
            "--scope",
            "read_own",
            "--scope",
            "generate",
            "--id",
            key_id,
        )
    out = run(capsys, "list", "--file", file)
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["a", "acme", "generate,read_own"],
        ["b", "acme", "generate,read_own"],
    ]
    for key in json.loads(file.read_text())["keys"]:
        assert key["sha256"] not in out
    assert "h3s_" not in out


def test_notes_tell_the_terminal_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "\x1b[2Jfüchse\nroot\u202e"
    run(capsys, "add", "--file", file, "--tenant", "t", "--scope", "admin", "--id", "a", "--note", note)
    assert run(capsys, "list", "--file", file).splitlines()[1].endswith("never    \\x1b[2Jfüchse\\nroot\\u202e")
    assert read_access_file(file).keys[0].note == note


def test_a_key_that_would_outlive_the_calendar_is_not_rotated(file: Path) -> None:
    key = {"id": "a", "tenant": "t", "scopes": ["admin"], "sha256": "ab" * 32, "created": "0001-01-01T00:00:00Z"}
    file.write_text(json.dumps({"keys": [{**key, "expires": "9999-12-31T00:00:00Z"}]}))
    file.chmod(0o600)
    with pytest.raises(SystemExit, match="would outlive the year 9999"):
        main(["rotate", "--file", str(file), "a"])


def test_a_revoked_key_is_gone_and_the_others_stay(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        run(capsys, "add", "--file", file, "--tenant", "t", "--scope", "admin", "--id", key_id).strip()
        for key_id in ("a", "b")
    )
    assert run(capsys, "revoke", "--file", file, "a") == ""
    assert (is_valid(file, first), is_valid(file, second)) == (False, True)


def test_a_rotated_key_has_a_successor_like_it_and_ends_after_the_overlap(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ("--tenant", "t", "--scope", "admin", "--id", "a", "--valid-days", 9, "--note", "n")
    old = run(capsys, "add", "--file", file, *fields).strip()
    new = run(capsys, "rotate", "--file", file, "a", "--overlap", 3600).strip()
    assert is_valid(file, old)
    assert is_valid(file, new)
    before, after = read_access_file(file).keys
    assert (after.tenant, after.scopes, after.note) == ("t", ("admin",), "n")
    assert before.expires is not None
    assert after.expires is not None
    assert 3590 < (before.expires - datetime.now(UTC)).total_seconds() <= 3600
    assert (after.expires - after.created).days == 9
    run(capsys, "rotate", "--file", file, after.key_id, "--overlap", 0)
    assert not is_valid(file, new)
    assert "(expired)" in run(capsys, "list", "--file", file)


def test_the_rest_of_the_file_stays_as_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificates = [{"name": "a", "tenant": "t", "scopes": ["admin"]}]
    tenants = {"t": {"weight": 2.5, "max_stored_bytes": 7}}
    file.write_text(json.dumps({"tenants": tenants, "certificates": certificates}))
    file.chmod(0o600)
    run(capsys, "add", "--file", file, "--tenant", "t", "--scope", "admin")
    content = json.loads(file.read_text())
    assert (content["tenants"], content["certificates"]) == (tenants, certificates)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("add", "--tenant", "t", "--scope", "admin", "--id", "a"), "there is a key 'a' already; rotate it"),
        (("add", "--tenant", "a b", "--scope", "admin"), "tenant 'a b': a tenant's name is"),
        (("add", "--tenant", "t", "--scope", "admin", "--id", "A"), "id 'A': a key's id is"),
        (("revoke", "aa"), "there is no key 'aa'; the nearest is 'a'"),
        (("rotate", "aa"), "there is no key 'aa'; the nearest is 'a'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    run(capsys, "add", "--file", file, "--tenant", "t", "--scope", "admin", "--id", "a")
    before = file.read_bytes()
    with pytest.raises(SystemExit, match=f"^h3stream keys: {line}"):
        main([*arguments, "--file", str(file)])
    assert capsys.readouterr().out == ""
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", [("list",), ("revoke", "a"), ("rotate", "a")])
def test_only_add_makes_a_file(file: Path, command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="No such file"):
        main([*command, "--file", str(file)])
    assert not file.exists()
