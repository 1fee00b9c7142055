"""Copies that run beside the computation: on a stream of their own on a GPU, in line where the device is the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyLane:
    """A side stream, which waits for the computation where told to, and for which the computation waits in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """The point that the computation has been queued up to."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    @contextmanager
    def copies(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """What is copied within begins no earlier than the computation has come to that point."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def done(self) -> torch.cuda.Event | None:
        """The point that copies have been queued up to."""
        return self._stream.record_event() if self._stream else None

    def wait(self, copied: torch.cuda.Event | None) -> None:
        """What is computed from here on begins no earlier than copies have come to that point."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def synchronize(self) -> None:
        """Returns once every copy is done."""
        if self._stream is not None:
            self._stream.synchronize()
