"""The media of a job that callers have been told of, one rendition at a time: what a job that is taken up again must
not send twice, and must make the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from h3stream.v1 import types_pb2, video_pb2

Media = types_pb2.InitSegment | types_pb2.Fragment


class Delivered:
    """Media of one rendition, numbered from 0, the init segment."""

    def __init__(self, event: Callable[[int], video_pb2.Event]) -> None:
        """event: reads an event of the job's log."""
        self.num_fragments = 0
        """Fragments."""
        self.num_frames = 0
        """Frames in them."""
        self.num_bytes = 0
        """Bytes of all media."""
        self.first_fragment_s: float | None = None
        """When the first fragment was told, in seconds after the job was accepted."""
        self._event = event
        self._seqs = array("Q")

    @property
    def num_media(self) -> int:
        """Init segment and fragments."""
        return len(self._seqs)

    def note(self, seq: int, media: Media, elapsed_s: float) -> None:
        """Takes the next media that is in the log.

        seq: number of its event.  elapsed_s: when that was told.
        """
        self._seqs.append(seq)
        self.num_bytes += len(media.data)
        if isinstance(media, types_pb2.Fragment):
            self.num_fragments += 1
            self.num_frames += media.num_frames
            if self.first_fragment_s is None:
                self.first_fragment_s = elapsed_s

    def matches(self, number: int, media: Media) -> bool:
        """Whether what was told as that number is the same, to the byte. Raises PhaseError if it cannot be read."""
        event = self._event(self._seqs[number])
        told: Media = getattr(event, event.WhichOneof("payload") or "")
        return type(told) is type(media) and told == media
