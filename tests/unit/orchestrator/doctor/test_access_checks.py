from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.doctor.access import check_access, check_certificate, check_keys, check_private_key
from orchestrator.doctor.certificates import validity_periods
from orchestrator.edge_settings import EdgeSettings

CERTIFICATES = Path(__file__).parents[3] / "fixtures" / "certificates"
YEAR, LONG, KEY = CERTIFICATES / "year.pem", CERTIFICATES / "long.pem", CERTIFICATES / "year.key"
NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key of `year.pem`, its owner's alone."""
    path = tmp_path / "year.key"
    shutil.copyfile(KEY, path)
    path.chmod(0o600)
    return path


def keys_file(directory: Path, *expiries: str | None, mode: int = 0o600) -> Path:
    entries = [
        {"id": f"key{i}", "tenant": "t", "scopes": ["generate"], "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}
        | ({} if expires is None else {"expires": expires})
        for i, expires in enumerate(expiries)
    ]
    path = directory / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(mode)
    return path


def test_dates_are_read_in_both_of_their_forms() -> None:
    year = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))
    long = (datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2051, 1, 1, tzinfo=UTC))
    assert validity_periods(YEAR.read_text() + "\n" + LONG.read_text()) == [year, long]
    assert validity_periods("nothing of the kind") == []


@pytest.mark.parametrize("der", ["MAA=", "MIIB", "AAAA", "MAMwAQA="])
def test_what_is_no_certificate_is_told(der: str) -> None:
    with pytest.raises(ValueError, match=r"no X\.509 certificate"):
        validity_periods(f"-----BEGIN CERTIFICATE-----\n{der}\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize(
    ("now", "level"),
    [
        (datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC), "fail"),
        (datetime(2026, 1, 1, tzinfo=UTC), "ok"),
        (datetime(2026, 12, 2, tzinfo=UTC), "ok"),
        (datetime(2026, 12, 3, tzinfo=UTC), "warn"),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "warn"),
        (datetime(2027, 1, 1, tzinfo=UTC), "fail"),
    ],
)
def test_a_certificate_is_judged_by_its_dates(now: datetime, level: str) -> None:
    finding = check_certificate("tls_cert", YEAR, now)
    assert finding.level == level
    assert "valid from 2026-01-01 until 2027-01-01" in finding.message
    assert bool(finding.remedy) == (level != "ok")


def test_a_chain_is_as_valid_as_the_shortest_of_it(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(LONG.read_text() + YEAR.read_text())
    assert check_certificate("tls_cert", chain, datetime(2030, 1, 1, tzinfo=UTC)).level == "fail"


@pytest.mark.parametrize("content", ["", "é", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_without_a_certificate_fails(tmp_path: Path, content: str) -> None:
    path = tmp_path / "none.pem"
    path.write_text(content)
    assert check_certificate("tls_cert", path, NOW).level == "fail"


def test_a_private_key_must_be_the_certificates_and_its_owners(key: Path) -> None:
    assert check_private_key(YEAR, key).level == "ok"
    assert "does not go with" in check_private_key(LONG, key).message
    key.chmod(0o644)
    readable = check_private_key(YEAR, key)
    assert (readable.level, readable.remedy) == ("fail", f"`chmod 600 {key}`")


@pytest.mark.parametrize(
    ("expiries", "mode", "level", "told"),
    [
        ([None], 0o600, "ok", "1 keys"),
        ([None, "2026-06-15T00:00:00Z"], 0o600, "warn", "to expire within 30 days: key1"),
        ([None, "2026-05-01T00:00:00Z"], 0o600, "warn", "expired: key1"),
        (["2026-05-01T00:00:00Z"], 0o600, "fail", "nobody can call"),
        ([], 0o600, "fail", "nobody can call"),
        ([None], 0o644, "warn", "every user may read it"),
        ([None], 0o666, "fail", "can be written by others"),
    ],
)
def test_keys_are_judged_by_their_dates_and_who_may_touch_them(
    tmp_path: Path, expiries: list[str | None], mode: int, level: str, told: str
) -> None:
    finding = check_keys(keys_file(tmp_path, *expiries, mode=mode), NOW)
    assert finding.level == level
    assert told in finding.message


def test_an_access_file_that_cannot_be_read_fails(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{")
    assert check_keys(path, NOW).level == "fail"


def test_what_is_open_to_others_is_told(tmp_path: Path, key: Path) -> None:
    def levels(settings: EdgeSettings, listen: str) -> dict[str, str]:
        return {finding.check: finding.level for finding in check_access(settings, listen, NOW)}

    keys = keys_file(tmp_path, None)
    assert levels(EdgeSettings(), "127.0.0.1:50051") == {"access": "ok"}
    assert levels(EdgeSettings(), "0.0.0.0:50051") == {"access": "warn"}
    assert levels(EdgeSettings(keys=keys), "0.0.0.0:50051") == {"access": "warn", "keys": "ok"}
    guarded = EdgeSettings(keys=keys, tls_cert=YEAR, tls_key=key)
    assert levels(guarded, "0.0.0.0:50051") == {"access": "ok", "keys": "ok", "tls_cert": "ok", "tls_key": "ok"}
