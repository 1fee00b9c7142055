"""One job over the wire: the order of its events, what they hold, and who holds the device meanwhile."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from core.clock import TICKS_PER_FRAME
from core.phases import Worker
from h3stream.v1 import types_pb2, video_pb2
from services.common.ledger import overlaps, read_ledger
from tests.service.conftest import Service


def kinds(events: list[video_pb2.Event]) -> list[str]:
    return [event.WhichOneof("payload") for event in events]


async def test_events_are_numbered_without_gaps_and_start_with_the_plan(service: Service) -> None:
    events = await service.generate(seed=7)
    assert [event.seq for event in events] == list(range(len(events)))
    assert len({event.job_id for event in events}) == 1
    plan = events[0].accepted.plan
    assert (plan.clip.num_frames, plan.clip.seed, plan.clip.window) == (39, 7, 2)
    assert [(c.video_start, c.video_stop, c.audio_start, c.audio_stop) for c in plan.chunks] == [
        (0, 5, 0, 29),
        (5, 10, 29, 57),
        (10, 12, 57, 65),
    ]
    assert [c.num_frames_emitted for c in plan.chunks] == [0, 17, 39]
    assert (plan.num_noise_forwards, plan.num_clean_forwards, plan.num_samples) == (6, 2, 52_000)
    assert [w.reason for w in plan.warnings] == ["MODEL_NOTICE"]


async def test_phases_come_in_the_order_of_the_rollout(service: Service) -> None:
    events = await service.generate()
    names = [
        (types_pb2.Phase.Name(e.phase.phase).removeprefix("PHASE_"), e.phase.chunk_index)
        for e in events
        if e.HasField("phase")
    ]
    assert names == [
        ("ENCODE", -1),
        ("PREFILL", -1),
        ("DENOISE", 0),
        ("COMMIT", 0),
        ("DENOISE", 1),
        ("DECODE", 0),
        ("DECODE", 1),
        ("COMMIT", 1),
        ("DENOISE", 2),
        ("DECODE", 2),
        ("FINISH", -1),
    ]


async def test_a_chunk_is_delivered_before_it_is_committed_and_before_the_next_is_sampled(service: Service) -> None:
    release = service.script.gates["commit:1"] = asyncio.Event()
    stream = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox"))
    async for response in stream:
        if response.event.HasField("fragment"):
            break
    assert response.event.fragment.num_frames == 17
    assert "sample:2.1" not in service.script.calls
    release.set()
    rest = [r.event async for r in stream]
    assert kinds(rest)[-1] == "completed"


async def test_media_time_is_the_end_of_the_last_frame_emitted(service: Service) -> None:
    events = await service.generate()
    times = {e.media_time_ticks for e in events}
    assert times == {0, 17 * TICKS_PER_FRAME, 39 * TICKS_PER_FRAME}
    complete = next(e.stream_complete for e in events if e.HasField("stream_complete"))
    media = [e.init_segment.data or e.fragment.data for e in events if kinds([e])[0] in ("init_segment", "fragment")]
    assert (complete.num_fragments, complete.num_frames, complete.num_samples) == (2, 39, 52_000)
    assert complete.num_bytes == sum(map(len, media))
    assert events[-1].completed.timings.num_frames_before_sampling_end == 17


async def test_no_two_workers_hold_the_device_at_once(service: Service) -> None:
    await service.generate()
    entries = read_ledger(service.host.ledger)
    assert overlaps(entries) == []
    order = [e.worker for e in entries if e.event == "enter"]
    assert order == ["text_encoder", "dit", "vae", "dit", "vae"]
    assert [e.event for e in entries] == ["enter", "leave"] * 5


async def test_a_prompt_seen_before_skips_the_text_phase(service: Service) -> None:
    await service.generate("a fox")
    before = len(read_ledger(service.host.ledger))
    events = await service.generate("a fox", seed=1)
    later = read_ledger(service.host.ledger)[before:]
    assert "text_encoder" not in {e.worker for e in later}
    first_phase = next(e.phase.phase for e in events if e.HasField("phase"))
    assert first_phase == types_pb2.PHASE_PREFILL


async def test_equal_requests_give_equal_digests_and_other_seeds_do_not(service: Service) -> None:
    digests = [(await service.generate(seed=seed))[-1].completed.latents_sha256 for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]


async def test_a_silent_phase_sends_a_heartbeat_within_two_seconds(service: Service) -> None:
    release = service.script.gates["encode"] = asyncio.Event()
    stream = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox"))
    async with asyncio.timeout(5):
        async for response in stream:
            if response.event.HasField("progress") and response.event.progress.is_heartbeat:
                break
    assert response.event.progress.phase == types_pb2.PHASE_ENCODE
    release.set()
    assert kinds([r.event async for r in stream])[-1] == "completed"


async def test_a_worker_that_raises_fails_the_job_and_not_the_next(service: Service) -> None:
    service.script.errors["sample:1.2"] = RuntimeError("secret detail")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await service.generate()
    assert failure.value.code() == grpc.StatusCode.INTERNAL
    assert "secret detail" not in (failure.value.details() or "")
    (job,) = service.jobs()
    assert (job.state, job.error.phase, job.error.chunk_index) == (video_pb2.JOB_STATE_FAILED, "denoise", 1)
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())
    assert kinds(await service.generate())[-1] == "completed"


async def test_what_was_delivered_before_a_failure_stays_delivered(service: Service) -> None:
    service.script.errors["decode:2"] = RuntimeError("no")
    received = []

    async def receive() -> None:
        async for response in service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox")):
            received.append(response.event)

    with pytest.raises(grpc.aio.AioRpcError):
        await receive()
    assert [e.fragment.num_frames for e in received if e.HasField("fragment")] == [17]
    assert "stream_complete" not in kinds(received)


async def test_a_worker_that_is_lost_costs_its_job_nothing(service: Service) -> None:
    undisturbed = await service.generate()
    release = service.script.gates["commit:0"] = asyncio.Event()
    events = []
    async for response in service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox")):
        events.append(response.event)
        if response.event.phase.phase == types_pb2.PHASE_COMMIT and not release.is_set():
            await service.host.kill(Worker.DIT)
            release.set()
    assert [event.seq for event in events] == list(range(len(events)))
    assert [e.warning.reason for e in events if e.HasField("warning")] == ["RESUMED"]
    assert events[-1].completed.latents_sha256 == undisturbed[-1].completed.latents_sha256
    media = [[e.fragment.data for e in told if e.HasField("fragment")] for told in (events, undisturbed)]
    assert media[0] == media[1]
    assert (service.host.num_starts, service.host.restarts) == (1, [Worker.DIT])


@pytest.mark.parametrize("worker", list(Worker))
async def test_a_worker_lost_while_idle_costs_no_job(service: Service, worker: Worker) -> None:
    first = await service.generate()
    await service.host.kill(worker)
    second = await service.generate()
    assert second[-1].completed.latents_sha256 == first[-1].completed.latents_sha256
    assert service.host.num_starts == 2
