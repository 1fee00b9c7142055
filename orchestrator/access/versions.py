"""Whether a file has changed, its permissions included."""

from __future__ import annotations

import os
from pathlib import Path

FileVersion = tuple[int, int, int, int]


def file_version(path: Path) -> FileVersion | None:
    """What differs once a file, or what a link leads to, has changed; None if it cannot be found."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
