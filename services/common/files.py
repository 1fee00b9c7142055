"""Files that get their names once they are whole, and the removal of those that are not wanted. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def part_path(path: Path) -> Path:
    """The hidden file beside `path` that is written before it has that name."""
    return path.with_name(f".{path.name}.part")


def publish(path: Path) -> tuple[int, str]:
    """Gives the file at `part_path(path)` its name, with everything behind it: no power failure takes either back.

    Returns its bytes and their SHA-256 in hexadecimal. Raises OSError.
    """
    part = part_path(path)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        num_bytes = os.fstat(file.fileno()).st_size
        os.fsync(file.fileno())
    os.replace(part, path)
    fsync_directory(path.parent)
    return num_bytes, digest.hexdigest()


def fsync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> tuple[int, str]:
    """Writes a file, whole or not at all; returns what `publish` does. Raises OSError."""
    try:
        part_path(path).write_bytes(data)
        return publish(path)
    except BaseException:
        remove(part_path(path))
        raise


def remove(path: Path) -> None:
    """Removes a file if it is there. One that cannot be removed stays, which is logged: nothing is raised."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)
