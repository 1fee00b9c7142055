"""Refining a job's clip as a job of its own: the source never changes, and may go while it is being refined."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
from typing import Any

import grpc
import pytest

from core.artifacts import REFINED, REFINED_LATENTS, REFINED_SOUND
from core.geometry import chunk_table
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.scheduler import INCOMING
from services.common.ledger import overlaps, read_ledger
from tests.job_logs import JOB_FILES
from tests.service.conftest import Service
from tests.service.fake_workers import broken, refined_values
from tests.service.test_artifacts import finished
from tests.service.test_attach import attach
from tests.service.test_cancel_and_queue import cancel, start, until
from tests.service.test_dense import phases
from tests.service.test_generate import kinds
from tests.service.test_refine import POINTS, RENDITION, SPEC, check_clip, media, provenance, without_heartbeats

LEFT = {REFINED, REFINED_SOUND, REFINED_LATENTS, "timeline.json", "provenance.json"}


def request(job_id: str, **fields: Any) -> video_pb2.RefineAudioRequest:
    return video_pb2.RefineAudioRequest(header=video_pb2.RefineHeader(job_id=job_id, **{"spec": SPEC, **fields}))


def call(service: Service, *messages: video_pb2.RefineAudioRequest) -> Any:
    return service.stub.RefineAudio(iter(messages))


async def refine(service: Service, job_id: str, **fields: Any) -> list[video_pb2.Event]:
    return [response.event async for response in call(service, request(job_id, **fields))]


async def begin(service: Service, job_id: str, **fields: Any) -> tuple[Any, str]:
    stream = call(service, request(job_id, **fields))
    return stream, (await anext(aiter(stream))).event.job_id


async def refused(service: Service, *messages: video_pb2.RefineAudioRequest) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call(service, *messages)]
    assert list((service.data / INCOMING).glob("*")) == [], "nothing is left of it"
    return caught.value


def content(service: Service, job_id: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (service.data / "jobs" / job_id).iterdir()}


async def get(service: Service, job_id: str) -> video_pb2.Job:
    return (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job


async def test_its_events_are_those_of_a_job(service: Service) -> None:
    source = await finished(service)
    before = content(service, source)
    events = await refine(service, source)
    assert [event.seq for event in events] == list(range(len(events)))
    assert without_heartbeats(events) == [
        *("accepted", "phase", "refine_started", "refine_progress", "refine_progress", "phase"),
        *("refined_init_segment", "refined_fragment", "refined_fragment", "phase"),
        *("warning", "refined_audio", "completed"),
    ]
    assert phases(events) == [("REFINE", -1), ("DECODE", -1), ("FINISH", -1)]
    job_id = events[0].job_id
    assert job_id != source
    await check_clip(service, job_id, LEFT)
    job = await get(service, job_id)
    assert (job.source_job_id, job.state) == (source, video_pb2.JOB_STATE_SUCCEEDED)
    assert list(job.artifacts) == list(events[-1].completed.artifacts)
    assert content(service, source) == before
    assert await attach(service, job_id) == events
    assert overlaps(read_ledger(service.host.ledger)) == []


async def test_its_plan_is_the_clips_with_the_refinement(service: Service) -> None:
    made = await service.generate(seed=8, num_frames=73, video_shift=9.0)
    plan = (await refine(service, made[0].job_id))[0].accepted.plan
    assert plan.clip == made[0].accepted.plan.clip
    assert (plan.refine_audio.steps, plan.refine_audio.seed) == (2, 8)
    assert set(plan.artifacts) == LEFT
    assert (plan.num_noise_forwards, plan.num_clean_forwards, len(plan.chunks)) == (0, 0, 5)
    assert plan.expected_stream_bytes < made[0].accepted.plan.expected_stream_bytes / 10, "the sound alone"


async def test_it_makes_what_a_refinement_behind_the_clip_makes(service: Service) -> None:
    both = await service.generate(seed=5, refine_audio=SPEC)
    alone = await refine(service, await finished_with(service, seed=5))
    again = await refine(service, both[0].job_id)
    digests = {
        event.refined_audio.latents_sha256
        for events in (both, alone, again)
        for event in events
        if event.HasField("refined_audio")
    }
    assert len(digests) == 1
    assert media(both, *RENDITION) == media(alone, *RENDITION) == media(again, *RENDITION)


async def finished_with(service: Service, **fields: Any) -> str:
    return (await service.generate(**fields))[0].job_id


@pytest.mark.parametrize("video_denoise", [0.0, 0.3])
async def test_its_digest_is_of_all_latents_chunk_by_chunk(service: Service, video_denoise: float) -> None:
    events = await refine(service, await finished(service), spec={**SPEC, "video_denoise": video_denoise})
    audio = service.script.decode_inputs[0]["audio"]
    video = service.script.refine_inputs[0]["video"]
    if video_denoise:
        video = refined_values(video, (1, 24, 12, 4, 4), 0).numpy().tobytes()
    digest = hashlib.sha256()
    for chunk in chunk_table(39):
        for data, rows, step, total, span in (
            (video, 24, 64, 12, (chunk.video_start, chunk.video_stop)),
            (audio, 64, 4, 65, (chunk.audio_start, chunk.audio_stop)),
        ):
            for row in range(rows):
                digest.update(data[(row * total + span[0]) * step : (row * total + span[1]) * step])
    assert events[-1].completed.latents_sha256 == digest.hexdigest()
    frames = [event.refined_fragment.num_frames for event in events if event.HasField("refined_fragment")]
    assert frames == ([17, 22] if video_denoise else [0, 0])


async def test_what_it_writes_down_is_its_own_and_names_the_source(service: Service) -> None:
    source = await finished(service)
    events = await refine(service, source, spec={**SPEC, "adapters": [{"name": "style"}]})
    told = provenance(service, events[0].job_id)
    latents = content(service, source)["latents.safetensors"]
    assert told["source"] == {
        "job_id": source,
        "latents_sha256": hashlib.sha256(latents).hexdigest(),
        "has_video": True,
    }
    assert told["request"]["job_id"] == source
    assert told["refinement"]["audio"]["num_samples"] == "52000"
    assert (told["sigmas"], told["kv_storage"]) == (None, "")
    assert [adapter["name"] for adapter in told["workers"]["dit"]["adapters"]] == ["style"]
    assert told["result"]["latents_sha256"] == events[-1].completed.latents_sha256
    timeline = json.loads(content(service, events[0].job_id)["timeline.json"])
    assert len(timeline["refine_steps"]) == 2


@pytest.mark.parametrize(("kept_bytes", "num_lanes"), [(1, 2)])
async def test_a_source_that_is_removed_meanwhile_is_still_refined(
    service: Service, kept_bytes: int, num_lanes: int
) -> None:
    source = await finished(service)
    gate = service.script.gates["refine:0"] = asyncio.Event()
    stream, job_id = await begin(service, source)
    await until(service, "refine:0")
    await finished(service)  # on the other lane; it takes the room
    assert [artifact.name for artifact in (await get(service, source)).artifacts] == []
    assert {path.name for path in (service.data / "jobs" / source).iterdir()} == JOB_FILES
    gate.set()
    events = [response.event async for response in stream]
    assert kinds(events)[-1] == "completed"
    (header,) = service.script.decode_headers
    assert header.video_file == str(service.data / "jobs" / job_id / ".source.mp4")
    await check_clip(service, job_id, LEFT)


async def test_where_files_cannot_have_two_names_they_are_copied(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await finished(service)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    events = await refine(service, source)
    assert kinds(events)[-1] == "completed"
    await check_clip(service, events[0].job_id, LEFT)


async def test_a_source_must_be_known_ended_and_have_its_latents(service: Service) -> None:
    error = await refused(service, request("none"))
    assert (error.code(), "there is no job 'none'" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)

    service.script.calls.clear()
    gate = service.script.gates["sample:1.1"] = asyncio.Event()
    running, job_id = await start(service)
    await until(service, "sample:1.1")
    error = await refused(service, request(job_id))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "has not ended; its sound can be refined once it has" in error.details()
    gate.set()
    [_ async for _ in running]

    without = await finished_with(service, artifacts=["final.mp4"])
    error = await refused(service, request(without))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "has no artifact 'latents.safetensors'; it has final.mp4" in error.details()

    refined = (await refine(service, job_id))[0].job_id
    error = await refused(service, request(refined))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert f"it refined the clip of job {job_id} itself" in error.details()
    assert "upload its refined-latents.safetensors" in error.details()

    (service.data / "jobs" / job_id / "latents.safetensors").write_bytes(b"other")
    error = await refused(service, request(job_id))
    assert (error.code(), "no longer what the job left" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)
    (service.data / "jobs" / job_id / "latents.safetensors").unlink()
    error = await refused(service, request(job_id))
    assert (error.code(), "no longer what the job left" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)


@pytest.mark.parametrize("kept_bytes", [1])
async def test_a_source_whose_latents_were_removed_says_which_limit_did_it(service: Service, kept_bytes: int) -> None:
    source = await finished(service)
    await finished(service)
    error = await refused(service, request(source))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "has been removed: artifacts took more than 1 bytes (kept_bytes)" in error.details()


async def test_a_clip_that_was_complete_before_its_job_was_cancelled_can_be_refined(service: Service) -> None:
    gate = service.script.gates["refine:1"] = asyncio.Event()
    _, source = await start(service, refine_audio=SPEC)
    await until(service, "refine:1")
    await cancel(service, source)
    gate.set()
    assert kinds(await refine(service, source))[-1] == "completed"


async def test_a_source_without_a_plain_file_gets_new_pictures(service: Service) -> None:
    source = await finished_with(service, artifacts=["latents.safetensors"])
    events = await refine(service, source)
    assert [e.refined_fragment.num_frames for e in events if e.HasField("refined_fragment")] == [17, 22]
    await check_clip(service, events[0].job_id, LEFT)


async def test_both_texts_are_encoded_if_they_are_not_known(service: Service) -> None:
    source = await finished(service)
    await service.host.kill(next(worker for worker in service.host.workers if worker.value == "text_encoder"))
    events = await refine(service, source, spec={**SPEC, "cfg": 3.0, "negative_prompt": "hiss"})
    assert phases(events) == [("ENCODE", -1), ("ENCODE", -1), ("REFINE", -1), ("DECODE", -1), ("FINISH", -1)]


@pytest.mark.parametrize("point", POINTS)
async def test_a_failure_fails_the_job_with_its_error(service: Service, point: str) -> None:
    source = await finished(service)
    service.script.errors[point] = broken()
    error = await refused(service, request(source))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the kernel is out of order")
    job = service.jobs()[-1]
    assert job.state == video_pb2.JOB_STATE_FAILED
    await check_clip(service, job.job_id, set())
    assert kinds(await refine(service, source))[-1] == "completed"


@pytest.mark.parametrize("point", POINTS)
async def test_cancel_works_in_every_phase(service: Service, point: str) -> None:
    source = await finished(service)
    before = content(service, source)
    gate = service.script.gates[point] = asyncio.Event()
    _, job_id = await begin(service, source)
    await until(service, point)
    cancelling = asyncio.create_task(cancel(service, job_id))
    await asyncio.sleep(0.02)
    gate.set()
    assert (await cancelling).state == video_pb2.JOB_STATE_CANCELLED
    await check_clip(service, job_id, set())
    assert content(service, source) == before
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())


async def test_it_waits_for_its_turn_and_can_be_cancelled_while_it_does(service: Service) -> None:
    source = await finished(service)
    service.script.calls.clear()
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    running, _ = await start(service, "a bear")
    await until(service, "sample:0.1")
    stream, job_id = await begin(service, source)
    second, _ = await begin(service, source, cancel_on_disconnect=True)
    progress = (await anext(aiter(stream))).event.progress
    assert (progress.phase, progress.queue_position) == (types_pb2.PHASE_QUEUED, 1)
    assert (service.data / "jobs" / job_id / ".source.safetensors").exists()
    assert (await cancel(service, job_id)).state == video_pb2.JOB_STATE_CANCELLED
    await check_clip(service, job_id, set())
    second.cancel()
    last = service.jobs()[-1]
    async with asyncio.timeout(10):
        await last.ended.wait()
    assert last.state == video_pb2.JOB_STATE_CANCELLED
    gate.set()
    assert [response.event async for response in running][-1].HasField("completed")
    assert not any(point.startswith("refine") for point in service.script.calls)


@pytest.mark.parametrize("max_queued_jobs", [1])
async def test_a_full_queue_refuses_it(service: Service) -> None:
    source = await finished(service)
    service.script.calls.clear()
    service.script.gates["sample:0.1"] = asyncio.Event()
    await start(service)
    await until(service, "sample:0.1")
    waiting, _ = await start(service)
    error = await refused(service, request(source))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert waiting is not None


async def test_wrong_requests_are_refused_before_anything_is_queued(service: Service) -> None:
    source = await finished(service)
    known = len(service.jobs())
    unknown = request(source)
    unknown.header.MergeFromString(b"\xf8\x07\x01")  # field 127
    cases = [
        ((), "the first message must hold a header; the call ended without one"),
        ((video_pb2.RefineAudioRequest(),), "the first message must hold a header; it holds None"),
        ((video_pb2.RefineAudioRequest(data=b"x"),), "the first message must hold a header; it holds data"),
        ((video_pb2.RefineAudioRequest(header={}),), "name a job_id, or announce an upload"),
        ((unknown,), "RefineHeader has no field number 127"),
        ((request(source), request(source)), "a message follows the header"),
        ((request(source), video_pb2.RefineAudioRequest(data=b"x")), "a message follows the header"),
        ((request(source, spec={"steps": 101}),), "spec.steps is 101"),
        ((request(source, spec={"audio_range": {"start_s": 1, "end_s": 2}}),), "spec.audio_range.end_s is 2"),
        ((request(source, spec={"adapters": [{"name": "styl"}]}),), "spec.adapters[0].name is 'styl'"),
    ]
    for messages, words in cases:
        error = await refused(service, *messages)
        assert (error.code(), words in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
    assert len(service.jobs()) == known
