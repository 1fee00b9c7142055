"""What both clients decide about a stream of events, apart from how they wait: its start, order and end, a job that
stands still, a connection that is lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from h3stream.codec import event_from_proto
from h3stream.errors import BrokenStreamError, DeadlineError, FieldViolation, GenerationError
from h3stream.events import (
    Accepted,
    Completed,
    Event,
    Fragment,
    InitSegment,
    Progress,
    RefinedFragment,
    RefinedInitSegment,
)
from h3stream.fields import invalid_request, sendable
from h3stream.status import from_rpc_error, is_connection_loss, is_nobody_there, is_starting
from h3stream.upload import RefineCall
from h3stream.v1 import video_pb2

log = logging.getLogger(__name__)

EventResponse = video_pb2.GenerateResponse | video_pb2.AttachResponse | video_pb2.RefineAudioResponse
"""What events arrive in."""

RECONNECT_S = 60.0
"""How long a lost connection is tried again where a caller does not say."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0


def attach_request(
    job_id: str, from_seq: int | None = None, from_chunk: int | None = None, live: bool = False
) -> video_pb2.AttachRequest:
    """The message that asks for a job's events. Raises InvalidRequestError for what no message can hold."""
    starts = {"from_seq": from_seq, "from_chunk": from_chunk, "live": live or None}
    sendable("job_id", job_id)
    given: dict[str, Any] = {name: value for name, value in starts.items() if value is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise invalid_request([FieldViolation(name, f"{names} are given; give one of them") for name in given])
    try:
        return video_pb2.AttachRequest(job_id=job_id, **given)
    except ValueError:
        violations = [
            FieldViolation(n, f"{n} is {v}; it must be 0 or more, and fit a message") for n, v in given.items()
        ]
        raise invalid_request(violations) from None


class EventOrder:
    """Holds a stream to its contract: events 0, 1, 2, ... of one job, the last of them Completed.

    A stream that joins at a chunk, or where the job is, begins with `accepted` and the init segment and then leaves out
    what lies before its start.
    """

    def __init__(self, start: video_pb2.AttachRequest | None = None) -> None:
        """start: what was asked for, where an existing job is followed."""
        self._start = start or video_pb2.AttachRequest()
        self.job_id = self._start.job_id
        """The job; empty until the first event of a new one has come."""
        self.has_begun = False
        """Whether an event has come."""
        self._next_seq = self._start.from_seq
        self._is_joining = self._start.WhichOneof("start") in ("from_chunk", "live")
        self._is_complete = False
        self._next_fragment: dict[type[Event], int] = {}

    def accept(self, response: EventResponse) -> Event | None:
        """The next event, or None for one that was told before and that a new connection had to tell again.

        Raises BrokenStreamError if it is not the one that had to come.
        """
        event = event_from_proto(response.event)
        if not self.job_id:
            self.job_id = event.job_id
        due = self._next_seq
        if self._is_joining and due > 0:
            is_preface = isinstance(event, Accepted | InitSegment | RefinedInitSegment)
            if is_preface and event.seq < due:
                return None
            self._is_joining = is_preface
            due = max(due, event.seq)  # where the stream goes on is for the server to say
        if event.seq != due:
            kind = "missing" if event.seq > due else "repeated or out of order"
            raise self._broken(f"event {event.seq} came where {due} was due: events are {kind}")
        if event.job_id != self.job_id:
            raise self._broken(f"event {event.seq} belongs to another job, {event.job_id}")
        if self._is_complete:
            raise self._broken(f"event {event.seq} came after the last one")
        if isinstance(event, Fragment | RefinedFragment):
            self._check_fragment(event)
        self._next_seq = due + 1
        self._is_complete = isinstance(event, Completed)
        self.has_begun = True
        return event

    def _check_fragment(self, event: Fragment | RefinedFragment) -> None:
        """A fragment must continue the one before it, or where the stream was followed from its start be the first."""
        due = self._next_fragment.get(type(event))
        if due is None and (self._start.from_seq or self._start.WhichOneof("start") in ("from_chunk", "live")):
            due = event.fragment_index
        if event.fragment_index != (due or 0):
            raise self._broken(
                f"fragment {event.fragment_index} came where {due or 0} was due: the server has lost events of the job"
            )
        self._next_fragment[type(event)] = event.fragment_index + 1

    def resume(self) -> video_pb2.AttachRequest:
        """What asks for the rest, or for all of it where nothing has come."""
        if self._is_joining or (self._start.job_id and not self.has_begun):
            return self._start
        return video_pb2.AttachRequest(job_id=self.job_id, from_seq=self._next_seq)

    def end(self) -> None:
        """To be called when the stream has ended well. Raises BrokenStreamError if its last event has not come."""
        if self._start.from_seq and not self.has_begun:
            return  # there was nothing after the last event, which the caller has
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

    def spend(self, waited_s: float, event: Event | None) -> None:
        """Takes off the time waited, or starts anew if it ended with an event which shows that the job has moved."""
        if self.left_s is None:
            return
        has_moved = event is not None and not (isinstance(event, Progress) and event.is_heartbeat)
        self.left_s = self._limit_s if has_moved else max(0.0, self.left_s - waited_s)

    def exceeded(self, job_id: str) -> DeadlineError:
        """The error to raise when nothing is left."""
        return DeadlineError(f"the job has not moved for {self._limit_s:g} s", job_id=job_id)


class Reconnection:
    """When a lost connection is tried again: after delays that double.

    They are jittered, or the viewers of a server that comes back would come all at once.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """limit_s: how long it is tried, in seconds since the loss; 0 for never.  jitter: gives numbers from 0 to 1."""
        if not limit_s >= 0:
            raise ValueError(f"reconnect_s is {limit_s}; it must be 0 or more")
        self._limit_s = limit_s
        self._clock = clock
        self._jitter = jitter
        self._lost_s: float | None = None
        self._num_tries = 0

    @property
    def is_trying(self) -> bool:
        """Whether a connection was lost and has not come back."""
        return self._lost_s is not None

    def succeeded(self) -> None:
        """Notes that something has come."""
        if self._lost_s is not None:
            log.warning("connected again")
        self._lost_s = None
        self._num_tries = 0

    def next_delay_s(self) -> float | None:
        """Seconds to wait before the next try; None where there is to be none."""
        now_s = self._clock()
        if self._lost_s is None and self._limit_s > 0:
            log.warning("connection lost; trying again for up to %g s", self._limit_s)
        if self._lost_s is None:
            self._lost_s = now_s
        if now_s - self._lost_s >= self._limit_s:
            return None
        delay_s = min(FIRST_DELAY_S * 2.0**self._num_tries, MAX_DELAY_S)
        self._num_tries += 1
        return delay_s * (1 + self._jitter()) / 2


class Line:
    """The call that a job's events come over; another one after each loss of the connection."""

    def __init__(
        self,
        submit: Callable[[], Any] | None,
        attach: Callable[[video_pb2.AttachRequest], Any],
        order: EventOrder,
        again: Reconnection,
        asked: RefineCall | None = None,
        *,
        address: str = "",
    ) -> None:
        """submit: asks for a new job by Generate or RefineAudio, under one name however often; None: it is there.
        attach: the stub's Attach.  asked: what RefineAudio is asked with.  address: of the server, for messages."""
        self.order = order
        self._submit = submit
        self._attach = attach
        self._again = again
        self._asked = asked
        self._address = address
        self.reopen()

    def accept(self, response: EventResponse) -> Event | None:
        """What EventOrder says of a response."""
        event = self.order.accept(response)
        self._again.succeeded()
        return event

    def delay_s(self, error: grpc.RpcError) -> float:
        """Seconds to wait before `reopen`, now that the call has failed. Raises its error where that must not be."""
        is_lost = is_connection_loss(error) or (self._again.is_trying and is_starting(error))
        can_resume = is_lost and (self.order.job_id or self._can_submit_again())
        if not self.order.has_begun and not self._again.is_trying and is_nobody_there(error):
            can_resume = False  # a wrong address more likely than a server that is just being started again
        delay_s = self._again.next_delay_s() if can_resume else None
        if delay_s is None:
            raise self._explained(from_rpc_error(error, self._address)) from error
        return delay_s

    def _can_submit_again(self) -> bool:
        """Whether a job that may never have been made can be asked for once more; an upload is not sent twice."""
        return self._asked is None or not self._asked.is_upload

    def _explained(self, error: GenerationError) -> GenerationError:
        return error if self._asked is None else self._asked.explain(error, self.order.has_begun)

    def reopen(self) -> None:
        """Asks for what has yet to come."""
        if self._submit is not None and not self.order.job_id:
            self.call = self._submit()
        else:
            self.call = self._attach(self.order.resume())
