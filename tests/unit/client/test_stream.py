"""Order, end and patience, decided without a connection."""

from __future__ import annotations

import pytest

from h3stream import codec, events
from h3stream.errors import BrokenStreamError, DeadlineError
from h3stream.events import Event
from h3stream.stream import EventOrder, StallBudget
from h3stream.v1 import video_pb2

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
