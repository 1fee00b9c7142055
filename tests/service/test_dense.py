"""A dense clip over the wire: sampled at once, then decoded, streamed and stored as any other."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from core.clock import TICKS_PER_FRAME
from core.phases import MOVES, Phase
from h3stream.v1 import types_pb2, video_pb2
from services.common.ledger import overlaps, read_ledger
from tests.service.conftest import Service
from tests.service.fake_workers import broken
from tests.service.test_cancel_and_queue import cancel, start, until
from tests.service.test_generate import kinds

DENSE = types_pb2.SAMPLING_MODE_DENSE


def phases(events: list[video_pb2.Event]) -> list[tuple[str, int]]:
    return [
        (types_pb2.Phase.Name(e.phase.phase).removeprefix("PHASE_"), e.phase.chunk_index)
        for e in events
        if e.HasField("phase")
    ]


async def test_the_clip_is_sampled_as_a_whole_and_decoded_chunk_by_chunk(service: Service) -> None:
    events = await service.generate(mode=DENSE)
    assert phases(events) == [
        ("ENCODE", -1),
        ("PREFILL", -1),
        ("DENOISE", -1),
        ("DECODE", 0),
        ("DECODE", 1),
        ("DECODE", 2),
        ("FINISH", -1),
    ]
    walk = [Phase.QUEUED, *(Phase[name] for name, _ in phases(events))]
    assert all(after in MOVES[before] for before, after in itertools.pairwise(walk))
    assert [event.seq for event in events] == list(range(len(events)))
    assert kinds(events)[-1] == "completed"
    assert not any(call.startswith(("sample", "commit")) for call in service.script.calls)


async def test_its_plan_is_a_dense_one(service: Service) -> None:
    plan = (await service.generate(mode=DENSE, seed=7))[0].accepted.plan
    assert (plan.clip.mode, plan.clip.steps, plan.clip.sink, plan.clip.seed) == (DENSE, 5, 0, 7)
    assert not plan.clip.HasField("window")
    assert (plan.num_noise_forwards, plan.num_clean_forwards) == (5, 0)
    assert [c.num_frames_emitted for c in plan.chunks] == [0, 17, 39]


async def test_each_forward_is_announced_without_a_chunk(service: Service) -> None:
    events = await service.generate(mode=DENSE, steps=3)
    steps = [e.progress for e in events if e.HasField("progress") and e.progress.step]
    assert [(p.step, p.num_steps, p.chunk_index, p.num_chunks) for p in steps] == [(n, 3, -1, 3) for n in (1, 2, 3)]


async def test_its_media_and_its_latents_are_those_of_a_streamed_clip_of_the_same_latents(service: Service) -> None:
    """The fake DiT makes the same latents in both modes, so everything after it must agree."""
    streamed, dense = await service.generate(seed=3), await service.generate(seed=3, mode=DENSE)

    def media(events: list[video_pb2.Event]) -> list[bytes]:
        return [getattr(e, kind).data for e in events if (kind := kinds([e])[0]) in ("init_segment", "fragment")]

    assert media(dense) == media(streamed)
    complete = [
        next(e.stream_complete for e in events if e.HasField("stream_complete")) for events in (streamed, dense)
    ]
    assert complete[0] == complete[1]
    assert dense[-1].completed.latents_sha256 == streamed[-1].completed.latents_sha256
    assert {e.media_time_ticks for e in dense} == {0, 17 * TICKS_PER_FRAME, 39 * TICKS_PER_FRAME}


async def test_no_frame_is_out_before_sampling_ends(service: Service) -> None:
    timings = (await service.generate(mode=DENSE))[-1].completed.timings
    assert timings.num_frames_before_sampling_end == 0
    assert 0 < timings.sampling_s < timings.first_fragment_s < timings.total_s


async def test_the_device_changes_hands_once(service: Service) -> None:
    await service.generate(mode=DENSE)
    entries = read_ledger(service.host.ledger)
    assert overlaps(entries) == []
    assert [e.worker for e in entries if e.event == "enter"] == ["text_encoder", "dit", "vae"]


@pytest.mark.parametrize("point", ["dense:1", "dense:4", "slice:0", "decode:0", "slice:2", "decode:2", "finish"])
async def test_cancel_works_in_every_phase(service: Service, point: str) -> None:
    gate = service.script.gates[point] = asyncio.Event()
    _, job_id = await start(service, mode=DENSE)
    await until(service, point)
    cancelling = asyncio.create_task(cancel(service, job_id))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await cancelling).state == video_pb2.JOB_STATE_CANCELLED
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())
    assert (await service.generate())[-1].HasField("completed")
    assert (await service.generate(mode=DENSE))[-1].HasField("completed")


async def test_a_failure_while_sampling_names_the_phase_and_no_chunk(service: Service) -> None:
    service.script.errors["dense:2"] = broken()
    with pytest.raises(grpc.aio.AioRpcError):
        await service.generate(mode=DENSE)
    (job,) = service.jobs()
    assert (job.state, job.error.phase, job.error.chunk_index) == (video_pb2.JOB_STATE_FAILED, "denoise", -1)
    assert (await service.generate(mode=DENSE))[-1].HasField("completed")


async def test_heartbeats_bridge_a_long_forward(service: Service) -> None:
    gate = service.script.gates["dense:2"] = asyncio.Event()
    stream, _ = await start(service, mode=DENSE)
    async with asyncio.timeout(10):
        async for response in stream:
            if response.event.progress.is_heartbeat:
                break
    progress = response.event.progress
    assert (progress.phase, progress.chunk_index, progress.step) == (types_pb2.PHASE_DENOISE, -1, 1)
    gate.set()
    assert kinds([r.event async for r in stream])[-1] == "completed"
