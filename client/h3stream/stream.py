"""What both clients decide about a stream of events, apart from how they wait: order, end, and standing still."""

from __future__ import annotations

from h3stream.codec import event_from_proto
from h3stream.errors import BrokenStreamError, DeadlineError
from h3stream.events import Completed, Event, Progress
from h3stream.v1 import video_pb2


class EventOrder:
    """Holds a stream to its contract: events 0, 1, 2, ... of one job, the last of them Completed."""

    def __init__(self) -> None:
        self.job_id = ""
        """The job; empty until the first event has come."""
        self._next_seq = 0
        self._is_complete = False

    def accept(self, response: video_pb2.GenerateResponse) -> Event:
        """The next event. Raises BrokenStreamError if it is not the one that had to come."""
        event = event_from_proto(response.event)
        if self._next_seq == 0:
            self.job_id = event.job_id
        if event.seq != self._next_seq:
            kind = "missing" if event.seq > self._next_seq else "repeated or out of order"
            raise self._broken(f"event {event.seq} came where {self._next_seq} was due: events are {kind}")
        if event.job_id != self.job_id:
            raise self._broken(f"event {event.seq} belongs to another job, {event.job_id}")
        if self._is_complete:
            raise self._broken(f"event {event.seq} came after the last one")
        self._next_seq += 1
        self._is_complete = isinstance(event, Completed)
        return event

    def end(self) -> None:
        """To be called when the stream has ended well. Raises BrokenStreamError if its last event has not come."""
        if not self._is_complete:
            raise self._broken(f"the stream ended after {self._next_seq} events without the last one")

    def _broken(self, message: str) -> BrokenStreamError:
        return BrokenStreamError(message, job_id=self.job_id)


class StallBudget:
    """How long a caller is still willing to wait for a job that stands still.

    Only time spent waiting counts, so a slow caller never mistakes itself for a slow server.
    """

    def __init__(self, limit_s: float | None) -> None:
        """limit_s: above 0; None waits for ever."""
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"stall_timeout_s is {limit_s}; it must be above 0")
        self._limit_s = limit_s
        self.left_s = limit_s
        """Seconds left; None for ever."""

    def spend(self, waited_s: float, event: Event) -> None:
        """Takes off the time waited for an event, or starts anew if the event shows that the job has moved."""
        if self.left_s is None:
            return
        is_heartbeat = isinstance(event, Progress) and event.is_heartbeat
        self.left_s = max(0.0, self.left_s - waited_s) if is_heartbeat else self._limit_s

    def exceeded(self, job_id: str) -> DeadlineError:
        """The error to raise when nothing is left."""
        return DeadlineError(f"the job has not moved for {self._limit_s:g} s", job_id=job_id)
