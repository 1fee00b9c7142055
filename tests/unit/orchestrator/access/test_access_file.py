"""The access file: strict about everything in it, and about who may write it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from h3stream.errors import ConfigError
from h3stream.job import TenantLimits
from orchestrator.access.access_file import (
    AccessFile,
    Certificate,
    Key,
    Tenant,
    read_access_file,
    write_access_file,
)

HASH = "ab" * 32
KEY = {"id": "ci", "tenant": "acme", "scopes": ["generate"], "sha256": HASH, "created": "2026-01-02T03:04:05Z"}
CREATED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

TOML = f"""
[tenants.acme]
weight = 2
max_queued_jobs = 7

[[keys]]
id = "ci"
tenant = "acme"
scopes = ["admin", "generate"]
sha256 = "{HASH}"
created = 2026-01-02T05:04:05+02:00
expires = "2026-02-01T00:00:00Z"

[[certificates]]
name = "spiffe://acme/render"
tenant = "acme"
scopes = ["read_own"]
"""


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    return path


def test_json_and_toml_say_the_same_and_come_back_as_written(tmp_path: Path) -> None:
    access = read_access_file(written(tmp_path / "a.toml", TOML))
    assert access == AccessFile(
        tenants={"acme": Tenant(2.0, TenantLimits(max_queued_jobs=7))},
        keys=(
            Key("ci", "acme", ("generate", "admin"), HASH, CREATED, datetime(2026, 2, 1, tzinfo=UTC)),
        ),
        certificates=(Certificate("spiffe://acme/render", "acme", ("read_own",)),),
    )  # fmt: skip
    write_access_file(tmp_path / "a.json", access)
    assert read_access_file(tmp_path / "a.json") == access


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting property name"),
        ([], "it is no table of fields"),
        ({"key": []}, "there is no field 'key'; the nearest is 'keys'"),
        ({"keys": {}}, "keys is no list"),
        ({"tenants": []}, "tenants is no table of names"),
        ({"keys": [3]}, r"keys\[0\] is no table of fields"),
        ({"keys": [KEY, {**KEY, "id": "b", "expire": "x"}]}, r"keys\[1\]: there is no field 'expire'; .* 'expires'"),
        ({"keys": [{**KEY, "scopes": ["generat"]}]}, r"keys\[0\]: there is no scope 'generat'; there are \['generate'"),
        ({"keys": [{**KEY, "scopes": []}]}, "at least one of"),
        ({"keys": [{**KEY, "scopes": "admin"}]}, "at least one of"),
        ({"keys": [{**KEY, "sha256": HASH.upper()}]}, "64 hexadecimal digits in lower case"),
        ({"keys": [{**KEY, "created": "2026-01-02"}]}, "created is '2026-01-02'; it must be a time with its zone"),
        ({"keys": [{**KEY, "expires": 5}]}, "expires is '5'"),
        ({"keys": [{**KEY, "expires": "9999-12-31T23:59:59-05:00"}]}, "beyond the years 1 to 9999 in UTC"),
        ({"keys": [{**KEY, "created": "0001-01-01T00:00:00+05:00"}]}, "beyond the years 1 to 9999 in UTC"),
        ("[" * 100_000, "nested deeper"),
        ({"keys": [{**KEY, "tenant": "a b"}]}, "tenant 'a b'"),
        ({"keys": [{**KEY, "id": "Ci"}]}, "id 'Ci'"),
        ({"keys": [{**KEY, "note": 1}]}, "note is 1; it must be a text"),
        ({"keys": [{"id": "ci"}]}, r"keys\[0\]: tenant is missing"),
        ({"keys": [KEY, KEY]}, "the id 'ci' is there twice"),
        ('{"keys": [], "keys": []}', "the field 'keys' is there twice"),
        ({"tenants": {"a": {"max_running_jobs": 2**31}}}, "from 0 .no limit. to 2147483647"),
        ({"tenants": {"a": {"max_stored_bytes": 2**63}}}, "from 0 .no limit. to 9223372036854775807"),
        ({"tenants": {"a": {"weight": 0}}}, "tenant 'a': weight is 0; it must be a number above 0"),
        ({"tenants": {"a": {"weight": True}}}, "weight is True"),
        ({"tenants": {"a": {"weight": 10**400}}}, "it must be a number above 0"),
        ({"tenants": {"a": {"max_queued_jobs": -1}}}, "max_queued_jobs is -1; it must be a whole number"),
        ({"tenants": {"a": {"max_queued_jobs": 1.5}}}, "max_queued_jobs is 1.5"),
        ({"tenants": {"a": {"max_jobs": 1}}}, "there is no field 'max_jobs'; the nearest is 'max_queued_jobs'"),
        ({"tenants": {"a/b": {}}}, "tenant 'a/b'"),
        ({"certificates": [{"name": "", "tenant": "a", "scopes": ["admin"]}]}, r"certificates\[0\]: name is empty"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: Any, words: str) -> None:
    path = written(tmp_path / "a.json", content)
    with pytest.raises(ConfigError, match=f"^access file {path}: .*{words}"):
        read_access_file(path)


def test_toml_that_is_nested_too_deep_is_refused_like_json(tmp_path: Path) -> None:
    path = written(tmp_path / "a.toml", "a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=f"^access file {path}: it is nested deeper"):
        read_access_file(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "a.json", {})
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"can be written by others .*mode {mode:04o}.*chmod go-w"):
        read_access_file(path)


def test_writing_keeps_the_permissions_and_what_links_lead_to(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", {})
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_access_file(link, AccessFile(keys=(Key("ci", "acme", ("admin",), HASH, CREATED),)))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [key.key_id for key in read_access_file(path).keys] == ["ci"]
    assert sorted(tmp_path.iterdir()) == [path, link], "nothing is left beside it"


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_access_file(tmp_path / "a.json", AccessFile())
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


def test_a_toml_file_is_left_to_its_writer(tmp_path: Path) -> None:
    path = written(tmp_path / "a.toml", TOML)
    with pytest.raises(ConfigError, match="TOML is changed by hand"):
        write_access_file(path, AccessFile())
    assert path.read_text() == TOML


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"access file {tmp_path}/gone.json: No such file"):
        read_access_file(tmp_path / "gone.json")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_access_file(tmp_path / "gone" / "a.json", AccessFile())
