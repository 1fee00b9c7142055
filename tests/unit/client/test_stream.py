"""Order, end and patience, decided without a connection."""

from __future__ import annotations

from typing import Any

import pytest

from h3stream import GenerateRequest, codec, events
from h3stream.errors import BrokenStreamError, DeadlineError, InvalidRequestError
from h3stream.events import Event
from h3stream.stream import EventOrder, Reconnection, StallBudget, attach_request
from h3stream.v1 import video_pb2
from tests.fakes import events_of, plan_of

LAST = {
    "artifacts": (),
    "latents_sha256": "",
    "audio_health": events.AudioHealth(0, 0, 0, 0, 1),
    "timings": events.Timings(0, 0, 0, 0),
}


def response(event: Event) -> video_pb2.GenerateResponse:
    return video_pb2.GenerateResponse(event=codec.event_to_proto(event))


def phase(seq: int, job_id: str = "job-1") -> events.PhaseChange:
    return events.PhaseChange(seq=seq, job_id=job_id, media_time_ticks=0, phase="encode", chunk_index=-1)


def progress(*, is_heartbeat: bool) -> events.Progress:
    return events.Progress(
        seq=0, job_id="job-1", media_time_ticks=0, phase="denoise", chunk_index=0, num_chunks=3, step=1, num_steps=4,
        num_frames_emitted=0, queue_position=0, is_heartbeat=is_heartbeat,
    )  # fmt: skip


def completed(seq: int) -> events.Completed:
    return events.Completed(seq=seq, job_id="job-1", media_time_ticks=0, **LAST)  # type: ignore[arg-type]


def test_events_in_order_are_accepted_to_the_end() -> None:
    order = EventOrder()
    assert order.job_id == ""
    assert [order.accept(response(event)) for event in (phase(0), phase(1), completed(2))] == [
        phase(0),
        phase(1),
        completed(2),
    ]
    assert order.job_id == "job-1"
    order.end()


@pytest.mark.parametrize(
    ("seqs", "words"),
    [
        ([1], "event 1 came where 0 was due: events are missing"),
        ([0, 2], "event 2 came where 1 was due: events are missing"),
        ([0, 0], "event 0 came where 1 was due: events are repeated or out of order"),
        ([0, 1, 0], "event 0 came where 2 was due: events are repeated or out of order"),
    ],
)
def test_a_gap_or_a_repeat_is_refused(seqs: list[int], words: str) -> None:
    order = EventOrder()
    for seq in seqs[:-1]:
        order.accept(response(phase(seq)))
    with pytest.raises(BrokenStreamError, match=words) as caught:
        order.accept(response(phase(seqs[-1])))
    assert caught.value.job_id == "job-1"


def fragment(seq: int, index: int) -> events.Fragment:
    return events.Fragment(
        seq=seq, job_id="job-1", media_time_ticks=0, data=b"", fragment_index=index, chunk_index=index, start_ticks=0,
        duration_ticks=0, first_frame=0, num_frames=0, num_samples_total=0, is_keyframe=True,
    )  # fmt: skip


def test_media_that_the_server_has_lost_are_missed_although_the_numbers_go_on() -> None:
    order = EventOrder()
    for event in (phase(0), fragment(1, 0), fragment(2, 1)):
        order.accept(response(event))
    with pytest.raises(BrokenStreamError, match="fragment 1 came where 2 was due: the server has lost events"):
        order.accept(response(fragment(3, 1)))
    order = EventOrder()
    with pytest.raises(BrokenStreamError, match="fragment 1 came where 0 was due"):
        order.accept(response(fragment(0, 1)))
    order = EventOrder(attach_request("job-1", from_seq=7))
    for event in (fragment(7, 4), fragment(8, 5)):
        order.accept(response(event))


def test_events_of_another_job_and_events_after_the_last_are_refused() -> None:
    order = EventOrder()
    order.accept(response(phase(0)))
    with pytest.raises(BrokenStreamError, match="belongs to another job, job-2"):
        order.accept(response(phase(1, job_id="job-2")))
    order = EventOrder()
    order.accept(response(completed(0)))
    with pytest.raises(BrokenStreamError, match="event 1 came after the last one"):
        order.accept(response(phase(1)))


def test_a_stream_without_its_last_event_is_no_whole_one() -> None:
    order = EventOrder()
    with pytest.raises(BrokenStreamError, match="after 0 events"):
        order.end()
    order.accept(response(phase(0)))
    with pytest.raises(BrokenStreamError, match="after 1 events"):
        order.end()


def test_patience_shrinks_with_heartbeats_and_returns_when_the_job_moves() -> None:
    budget = StallBudget(10.0)
    for expected_left_s in (8.0, 6.0, 4.0):
        budget.spend(2.0, progress(is_heartbeat=True))
        assert budget.left_s == pytest.approx(expected_left_s)
    budget.spend(3.0, progress(is_heartbeat=False))
    assert budget.left_s == 10.0
    budget.spend(11.0, progress(is_heartbeat=True))
    assert budget.left_s == 0.0
    budget.spend(0.0, phase(4))
    assert budget.left_s == 10.0


def test_patience_without_a_limit_never_ends() -> None:
    budget = StallBudget(None)
    budget.spend(1e9, progress(is_heartbeat=True))
    assert budget.left_s is None


def test_giving_up_says_how_long_was_waited() -> None:
    error = StallBudget(2.5).exceeded("job-1")
    assert isinstance(error, DeadlineError)
    assert (error.message, error.job_id) == ("the job has not moved for 2.5 s", "job-1")


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_patience_has_to_be_some(limit_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        StallBudget(limit_s)


MADE = list(events_of(plan_of(GenerateRequest("a fox", num_frames=73)), "job-1"))
INIT = next(event.seq for event in MADE if isinstance(event, events.InitSegment))
FRAGMENTS = [event.seq for event in MADE if isinstance(event, events.Fragment)]
ACCEPTED = 0
JOIN = attach_request("job-1", from_chunk=2)


def accept(order: EventOrder, *seqs: int) -> list[int]:
    """Positions of the events that an order lets through."""
    taken = [order.accept(response(MADE[seq])) for seq in seqs]
    return [event.seq for event in taken if event is not None]


@pytest.mark.parametrize(
    "seqs",
    [
        (ACCEPTED, INIT, *range(FRAGMENTS[1], len(MADE))),
        (ACCEPTED, INIT, *range(FRAGMENTS[-1], len(MADE))),
        (ACCEPTED, *range(len(MADE) - 3, len(MADE))),
    ],
    ids=["at a chunk", "at the last", "without media"],
)
@pytest.mark.parametrize("start", [JOIN, attach_request("job-1", live=True)], ids=["chunk", "live"])
def test_a_stream_that_joins_leaves_out_what_came_before(start: video_pb2.AttachRequest, seqs: tuple[int, ...]) -> None:
    order = EventOrder(start)
    assert accept(order, *seqs) == list(seqs)
    order.end()


@pytest.mark.parametrize(
    ("start", "seqs"),
    [
        (JOIN, (INIT,)),
        (JOIN, (ACCEPTED, FRAGMENTS[1], FRAGMENTS[2])),
        (JOIN, (ACCEPTED, INIT, FRAGMENTS[1], FRAGMENTS[1])),
        (JOIN, (ACCEPTED, INIT, INIT - 1)),
        (attach_request("job-1", from_seq=5), (4,)),
        (attach_request("job-1", from_seq=5), (6,)),
        (attach_request("job-2"), (0,)),
    ],
)
def test_a_stream_that_joins_is_held_to_its_order_too(start: video_pb2.AttachRequest, seqs: tuple[int, ...]) -> None:
    order = EventOrder(start)
    accept(order, *seqs[:-1])
    with pytest.raises(BrokenStreamError):
        accept(order, seqs[-1])


def test_the_rest_is_asked_for_from_the_next_event_on() -> None:
    order = EventOrder()
    accept(order, 0, 1, 2)
    assert order.resume() == attach_request("job-1", from_seq=3)
    order = EventOrder(attach_request("job-1", from_seq=5))
    assert order.resume() == attach_request("job-1", from_seq=5)
    accept(order, 5)
    assert order.resume() == attach_request("job-1", from_seq=6)


def test_joining_starts_over_until_it_has_joined() -> None:
    order = EventOrder(JOIN)
    assert accept(order, ACCEPTED) == [ACCEPTED]
    assert order.resume() == JOIN
    assert accept(order, ACCEPTED, INIT) == [INIT]
    assert accept(order, ACCEPTED, INIT, FRAGMENTS[1]) == [FRAGMENTS[1]]
    assert order.resume() == attach_request("job-1", from_seq=FRAGMENTS[1] + 1)


def test_nothing_after_the_last_event_is_a_whole_stream() -> None:
    EventOrder(attach_request("job-1", from_seq=len(MADE))).end()
    with pytest.raises(BrokenStreamError):
        EventOrder(attach_request("job-1")).end()


@pytest.mark.parametrize(
    ("start", "fields", "words"),
    [
        ({"from_seq": -1}, ["from_seq"], "from_seq is -1; it must be 0 or more"),
        ({"from_chunk": 2**31}, ["from_chunk"], "from_chunk is 2147483648"),
        ({"from_seq": 0, "live": True}, ["from_seq", "live"], "from_seq and live are given; give one of them"),
    ],
)
def test_a_start_that_no_message_can_hold_is_refused(start: dict[str, Any], fields: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        attach_request("job-1", **start)
    assert [violation.field for violation in caught.value.violations] == fields


def test_a_lost_connection_is_tried_again_after_growing_delays_until_the_limit() -> None:
    now_s = 100.0
    again = Reconnection(10.0, clock=lambda: now_s, jitter=lambda: 1.0)
    assert [again.next_delay_s() for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    now_s = 109.9
    assert again.next_delay_s() == 2.0
    now_s = 110.0
    assert again.next_delay_s() is None
    again.succeeded()
    assert again.next_delay_s() == 0.1


def test_delays_are_jittered_by_half() -> None:
    assert Reconnection(1.0, jitter=lambda: 0.0).next_delay_s() == pytest.approx(0.05)
    assert Reconnection(1.0, jitter=lambda: 1.0).next_delay_s() == pytest.approx(0.1)


def test_no_time_is_no_try() -> None:
    assert Reconnection(0.0).next_delay_s() is None
    for limit_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="must be 0 or more"):
            Reconnection(limit_s)


def test_time_without_an_event_is_taken_off() -> None:
    budget = StallBudget(10.0)
    budget.spend(4.0, None)
    assert budget.left_s == 6.0
