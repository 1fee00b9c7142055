"""Files whose damage is noticed: the SHA-256 of what follows, then that."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from services.common.files import write_whole

log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


def write_sealed(path: Path, body: bytes) -> None:
    """Writes a file, whole or not at all, and synchronises it. Raises OSError."""
    write_whole(path, hashlib.sha256(body).digest() + body)


def read_sealed(path: Path) -> bytes | None:
    """What was written; None if it is not there, or not as it was written, which is logged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error.strerror)
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        log.warning("%s is not as it was written; what it held is made again", path)
        return None
    return body
