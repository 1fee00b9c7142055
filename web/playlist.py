"""The media of jobs as HTTP Live Streaming playlists (RFC 8216), for players that have no Media Source Extensions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

from h3stream.events import TICKS_PER_SECOND, Accepted, Fragment, InitSegment, StreamComplete
from h3stream.job import Job
from web.upstream import Upstream

MAX_INDEXED_JOBS = 64
"""An index holds a few numbers a fragment; those of jobs nobody asks for any more must not pile up."""

ENDED_STATES = ("succeeded", "failed", "cancelled")


@dataclass
class MediaIndex:
    """Where the pieces of a job's media stream lie among its events, as far as they have been looked at."""

    num_events: int = 0
    """Events looked at."""
    init_seq: int | None = None
    """The init segment's event."""
    fragments: list[tuple[int, int]] = field(default_factory=list)
    """Event number and duration in ticks of each fragment."""
    longest_ticks: int = 0
    """Longest fragment that the plan has."""
    is_complete: bool = False
    """Whether the stream is whole: every fragment has come."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the index grows."""

    def playlist(self) -> str:
        """An event playlist: it only ever grows, and ends once the stream is whole."""
        lines = [
            "#EXTM3U",
            "#EXT-X-VERSION:7",
            # Must not change while the playlist grows, hence the plan's.
            f"#EXT-X-TARGETDURATION:{max(1, -(-self.longest_ticks // TICKS_PER_SECOND))}",
            "#EXT-X-PLAYLIST-TYPE:EVENT",
            "#EXT-X-INDEPENDENT-SEGMENTS",
        ]
        if self.init_seq is not None:
            lines.append(f'#EXT-X-MAP:URI="../media/{self.init_seq}.mp4"')
        for seq, duration_ticks in self.fragments:
            lines += [f"#EXTINF:{duration_ticks / TICKS_PER_SECOND:.6f},", f"../media/{seq}.mp4"]
        if self.is_complete:
            lines.append("#EXT-X-ENDLIST")
        return "\n".join(lines) + "\n"


class MediaIndexes:
    """Indexes of the jobs that were last asked for, each grown by reading only the events that are new."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[str, MediaIndex] = OrderedDict()

    async def get(self, job: Job, upstream: Upstream) -> MediaIndex:
        """The index of a job, as far as the job is. Raises a GenerationError if its events cannot be read.

        upstream: that of a caller who may see the job.
        """
        index = self._indexes.setdefault(job.job_id, MediaIndex())
        self._indexes.move_to_end(job.job_id)
        if len(self._indexes) > MAX_INDEXED_JOBS:
            self._indexes.popitem(last=False)
        async with index.lock:
            if index.num_events < job.num_events:
                await self._grow(index, job, upstream)
        return index

    async def _grow(self, index: MediaIndex, job: Job, upstream: Upstream) -> None:
        async with upstream.follow(job.job_id, index.num_events) as events:
            async for event in events:
                index.num_events = event.seq + 1
                if isinstance(event, Accepted):
                    ends = [0, *(chunk.num_frames_emitted for chunk in event.plan.chunks)]
                    longest = max(stop - start for start, stop in pairwise(ends))
                    index.longest_ticks = longest * TICKS_PER_SECOND // 24
                elif isinstance(event, InitSegment):
                    index.init_seq = event.seq
                elif isinstance(event, Fragment):
                    index.fragments.append((event.seq, event.duration_ticks))
                elif isinstance(event, StreamComplete):
                    index.is_complete = True
                if index.num_events >= job.num_events:
                    return
