"""`python -m orchestrator.access add | list | revoke | rotate --file FILE`: the keys of an access file.

A new key is printed once, alone on standard output, and kept nowhere: the file holds the hash of its secret. A running
server takes a change by itself.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from h3stream.errors import ConfigError
from orchestrator.access.access_file import (
    AccessFile,
    Key,
    access_file_lock,
    check_key_id,
    check_tenant,
    read_access_file,
    write_access_file,
)
from orchestrator.access.keys import make_key, new_key_id, read_key
from orchestrator.caller import SCOPES

OVERLAP_S = 86_400.0
"""How long a key that is rotated stays valid, unless told."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; ends with one clear line if it cannot be done."""
    flags = _parser().parse_args(arguments)
    now = datetime.now(UTC).replace(microsecond=0)
    commands = {"add": _add, "list": _list, "revoke": _revoke, "rotate": _rotate}
    try:
        commands[flags.command](flags, now)
    except ConfigError as error:
        sys.exit(f"h3stream keys: {error}")


def _add(flags: argparse.Namespace, now: datetime) -> None:
    expires = None if flags.valid_days is None else now + timedelta(days=flags.valid_days)
    tenant = check_tenant(flags.tenant)
    scopes = tuple(scope for scope in SCOPES if scope in flags.scope)
    with access_file_lock(flags.file):
        access = read_access_file(flags.file) if flags.file.exists() else AccessFile()
        key_id = check_key_id(flags.id or new_key_id())
        if any(key.key_id == key_id for key in access.keys):
            raise ConfigError(f"there is a key {key_id!r} already; rotate it, or choose another id")
        new = Key(key_id, tenant, scopes, "", now, expires, flags.note)
        _write_with_secret(flags.file, access, new)


def _list(flags: argparse.Namespace, now: datetime) -> None:
    access = read_access_file(flags.file)
    rows = [("ID", "TENANT", "SCOPES", "CREATED", "EXPIRES", "NOTE")]
    for key in access.keys:
        is_expired = key.expires is not None and key.expires <= now
        expires = "never" if key.expires is None else _minute(key.expires) + (" (expired)" if is_expired else "")
        rows.append((key.key_id, key.tenant, ",".join(key.scopes), _minute(key.created), expires, _visible(key.note)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _revoke(flags: argparse.Namespace, now: datetime) -> None:
    with access_file_lock(flags.file):
        access = read_access_file(flags.file)
        gone = _find(access, flags.id)
        write_access_file(flags.file, replace(access, keys=tuple(key for key in access.keys if key is not gone)))


def _rotate(flags: argparse.Namespace, now: datetime) -> None:
    with access_file_lock(flags.file):
        access = read_access_file(flags.file)
        old = _find(access, flags.id)
        end = now + timedelta(seconds=flags.overlap)
        ending = replace(old, expires=end if old.expires is None else min(end, old.expires))
        # The new one lives as long as the old one was to live.
        try:
            expires = None if old.expires is None else now + (old.expires - old.created)
        except OverflowError:
            raise ConfigError(f"a key that lives as long as {old.key_id!r} would outlive the year 9999") from None
        new = Key(new_key_id(), old.tenant, old.scopes, "", now, expires, old.note)
        keys = tuple(ending if key is old else key for key in access.keys)
        _write_with_secret(flags.file, replace(access, keys=keys), new)


def _write_with_secret(path: Path, access: AccessFile, new: Key) -> None:
    """Adds a key to the file, with a secret that is printed."""
    text = make_key(new.key_id)
    parts = read_key(text)
    assert parts is not None
    write_access_file(path, replace(access, keys=(*access.keys, replace(new, sha256=parts.sha256))))
    print(text)


def _find(access: AccessFile, key_id: str) -> Key:
    for key in access.keys:
        if key.key_id == key_id:
            return key
    nearest = difflib.get_close_matches(key_id, [key.key_id for key in access.keys], n=1, cutoff=0)
    raise ConfigError(
        f"there is no key {key_id!r}; " + (f"the nearest is {nearest[0]!r}" if nearest else "there is none")
    )


def _visible(text: str) -> str:
    """Text with escapes for what would tell a terminal to do something."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}Z"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="h3stream keys", description="The API keys of an access file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="make a key, which is printed once")
    add.add_argument("--tenant", required=True, help="tenant that its jobs belong to")
    add.add_argument(
        "--scope", required=True, action="append", choices=SCOPES, help="what it allows; may be given several times"
    )
    add.add_argument("--id", default="", help="its name, which logs show; default: a new one")
    add.add_argument("--note", default="", help="what it is for")
    add.add_argument("--valid-days", type=_above_0, metavar="DAYS", help="when it expires; default: never")
    listing = commands.add_parser("list", help="show the keys, without secrets or hashes")
    revoke = commands.add_parser("revoke", help="remove a key: its calls end within seconds")
    rotate = commands.add_parser("rotate", help="make a key in place of another, which expires; it is printed once")
    rotate.add_argument(
        "--overlap",
        type=_at_least_0,
        default=OVERLAP_S,
        metavar="SECONDS",
        help="how long the old one stays valid [%(default)s]",
    )
    for command in (revoke, rotate):
        command.add_argument("id", help="name of the key")
    for command in (add, listing, revoke, rotate):
        command.add_argument(
            "--file", type=Path, required=True, help="the access file; add makes one that is not there"
        )
    return parser


def _above_0(text: str) -> float:
    value = _at_least_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError("it must be above 0")
    return value


def _at_least_0(text: str) -> float:
    try:
        value = float(text)
        datetime.now(UTC) + timedelta(days=value)
    except (ValueError, OverflowError):
        value = -1
    if not value >= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no such number; it must be at least 0, and end before the year 9999"
        )
    return value


if __name__ == "__main__":
    main()
