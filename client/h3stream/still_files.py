"""The files that the stills of a job are written to, one for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from h3stream.events import Event, Preview

_SUFFIXES = {"image/jpeg": "jpg", "image/webp": "webp", "image/png": "png"}


class StillFiles:
    """Writes stills into a directory until one cannot be written, which is told once: no clip fails for its stills."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        """directory: made with the first still."""
        self._directory = directory
        self._tell = tell
        self._is_open = True

    def write(self, event: Event) -> None:
        """Writes the still of an event, if it is one."""
        if not isinstance(event, Preview) or not self._is_open:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / still_name(event)).write_bytes(event.data)
        except OSError as error:
            self._is_open = False
            self._tell(f"no more stills are written to {self._directory}: {error.strerror}")


def still_name(still: Preview) -> str:
    """Name of a still's file: `chunk-02-step-004.jpg`, so in the order of time, or `clip-step-004.jpg` if dense."""
    place = "clip" if still.chunk_index < 0 else f"chunk-{still.chunk_index:02}"
    return f"{place}-step-{still.step:03}.{_SUFFIXES.get(still.media_type, 'bin')}"
