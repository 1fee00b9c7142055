"""A clip whose sound is refined behind it: the clip comes first and stays as it is, whatever follows."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from typing import Any

import grpc
import pytest

from core.artifacts import COMPARISON, DEFAULT_ARTIFACTS, REFINED, REFINED_ARTIFACTS, REFINED_LATENTS, REFINED_SOUND
from core.phases import MOVES, Phase, Worker
from core.refine import refine_sigmas
from h3stream.errors import DeviceMemoryError
from h3stream.v1 import types_pb2, video_pb2
from services.common.ledger import overlaps, read_ledger
from tests.job_logs import JOB_FILES
from tests.service.conftest import Service
from tests.service.fake_workers import broken
from tests.service.test_artifacts import pieces, warnings
from tests.service.test_cancel_and_queue import cancel, start, until
from tests.service.test_dense import phases
from tests.service.test_generate import kinds
from tests.service.test_requests import refusal

SPEC = {"steps": 2}
RENDITION = ["refined_init_segment", "refined_fragment"]
POINTS = ["refine:0", "refine:1", "refined", "decode_audio:0", "decode_audio:1"]
"""Where a refinement can stand still, fail or be cancelled."""


def media(events: list[video_pb2.Event], *names: str) -> list[bytes]:
    return [getattr(event, name).data for event in events if (name := kinds([event])[0]) in names]


def without_heartbeats(events: list[video_pb2.Event]) -> list[str]:
    return [kind for kind in kinds(events) if kind != "progress"]


async def check_clip(service: Service, job_id: str, names: set[str]) -> None:
    """The job lists exactly these artifacts, has no other file, and sends what it lists."""
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job
    assert {artifact.name for artifact in job.artifacts} == names
    assert {path.name for path in (service.data / "jobs" / job_id).iterdir()} == JOB_FILES | names
    for artifact in job.artifacts:
        _, *data = await pieces(service, job_id, artifact.name, 0)
        assert hashlib.sha256(b"".join(response.data for response in data)).hexdigest() == artifact.sha256


def provenance(service: Service, job_id: str) -> Any:
    return json.loads((service.data / "jobs" / job_id / "provenance.json").read_text())


async def test_the_clip_is_whole_before_its_sound_is_refined(service: Service) -> None:
    events = await service.generate(refine_audio=SPEC)
    told = without_heartbeats(events)
    assert [event.seq for event in events] == list(range(len(events)))
    assert told[told.index("stream_complete") :] == [
        *("stream_complete", "phase", "phase", "refine_started", "refine_progress", "refine_progress", "phase"),
        *("refined_init_segment", "refined_fragment", "refined_fragment", "phase"),
        *("warning", "refined_audio", "completed"),
    ]
    assert phases(events)[-4:] == [("FINISH", -1), ("REFINE", -1), ("DECODE", -1), ("FINISH", -1)]
    walk = [Phase.QUEUED, *(Phase[name] for name, _ in phases(events))]
    assert all(after in MOVES[before] for before, after in itertools.pairwise(walk))
    assert media(events, *RENDITION)[0] == b"refined init"
    entries = read_ledger(service.host.ledger)
    assert overlaps(entries) == []
    assert [e.worker for e in entries if e.event == "enter"][-3:] == ["vae", "dit", "vae"]


async def test_the_stream_and_its_digest_are_those_of_a_clip_that_is_not_refined(service: Service) -> None:
    plain, refined = await service.generate(seed=3), await service.generate(seed=3, refine_audio=SPEC)
    assert media(refined, "init_segment", "fragment") == media(plain, "init_segment", "fragment")
    completed = [events[-1].completed for events in (plain, refined)]
    assert completed[0].latents_sha256 == completed[1].latents_sha256
    assert completed[0].audio_health == completed[1].audio_health
    assert {e.media_time_ticks for e in refined} == {e.media_time_ticks for e in plain}


async def test_the_plan_and_the_workers_get_every_default(service: Service) -> None:
    spec = types_pb2.RefineSpec(adapters=[types_pb2.AdapterChoice(name="turbo")])
    request = video_pb2.GenerateRequest(prompt="a fox", seed=9, refine_audio=spec)
    plan = (await service.stub.PlanGeneration(video_pb2.PlanGenerationRequest(generation=request))).plan
    assert (plan.refine_audio.steps, plan.refine_audio.seed, plan.refine_audio.sampler) == (6, 9, "euler")
    assert plan.refine_audio.cache.contents == types_pb2.CACHE_CONTENTS_HIDDEN
    assert [(choice.name, choice.strength) for choice in plan.refine_audio.adapters] == [("turbo", 0.5)]
    assert tuple(plan.artifacts) == (*DEFAULT_ARTIFACTS, REFINED, REFINED_SOUND, REFINED_LATENTS)
    assert service.jobs() == []
    events = await service.generate(seed=9, refine_audio=spec)
    assert events[0].accepted.plan == plan
    (header,) = service.script.refine_headers
    assert header.spec == plan.refine_audio
    assert header.clip == plan.clip


async def test_the_result_says_what_both_workers_measured(service: Service) -> None:
    events = await service.generate(refine_audio={**SPEC, "compare": True})
    (audio,) = [event.refined_audio for event in events if event.HasField("refined_audio")]
    sound = service.script.decode_inputs[0]
    assert audio.latents_sha256 == hashlib.sha256(sound["audio"]).hexdigest()
    assert sound["audio_before"] == service.script.refine_inputs[0]["audio"] != sound["audio"]
    assert audio.num_samples == 52_000
    assert (audio.audio_health.peak, audio.audio_health_before.peak) == (0.9, 0.5)
    assert (audio.change.latents, audio.change.log_mel_db, audio.change.rms_ratio) == (0.25, 3, 1.1)
    assert (audio.against_exact.latents, audio.against_exact.log_mel_db) == (0.125, 0.5)
    assert (audio.sampling_s, audio.speed_ratio, audio.is_warm) == (2, 3, False)
    assert {a.name for a in events[-1].completed.artifacts} == {*DEFAULT_ARTIFACTS, *REFINED_ARTIFACTS}
    without = await service.generate(refine_audio=SPEC)
    (audio,) = [event.refined_audio for event in without if event.HasField("refined_audio")]
    assert not audio.HasField("against_exact")
    assert COMPARISON not in {a.name for a in without[-1].completed.artifacts}


async def test_its_files_are_made_of_the_clips(service: Service) -> None:
    events = await service.generate(refine_audio=SPEC)
    directory = service.data / "jobs" / events[0].job_id
    (header,) = service.script.decode_headers
    assert (header.video_file, header.latents_file) == (
        str(directory / "final.mp4"),
        str(directory / "latents.safetensors"),
    )
    await check_clip(service, events[0].job_id, {*DEFAULT_ARTIFACTS, REFINED, REFINED_SOUND, REFINED_LATENTS})
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=events[0].job_id))).job
    assert list(job.artifacts) == list(events[-1].completed.artifacts)
    assert job.source_job_id == ""


async def test_what_is_written_down_says_how_it_was_refined(service: Service) -> None:
    events = await service.generate(refine_audio={**SPEC, "audio_denoise": 0.4, "compare": True})
    told = provenance(service, events[0].job_id)
    refinement = told["refinement"]
    assert refinement["spec"]["audio_denoise"] == 0.4
    sigmas = refine_sigmas(2, 0.4, 12.0, 3.0)
    assert [*zip(refinement["sigmas"]["video"], refinement["sigmas"]["audio"], strict=True)] == [*sigmas]
    assert refinement["started"]["cache_bytes"] == "1000"
    assert [step["mode"] for step in refinement["steps"]] == ["build", "cached"]
    (audio,) = [event.refined_audio for event in events if event.HasField("refined_audio")]
    assert refinement["audio"]["latents_sha256"] == audio.latents_sha256
    assert refinement["failure"] is None
    completed = events[-1].completed
    assert {(a["name"], a["sha256"]) for a in told["result"]["artifacts"]} == {
        (a.name, a.sha256) for a in completed.artifacts if a.name != "provenance.json"
    }
    timeline = json.loads((service.data / "jobs" / events[0].job_id / "timeline.json").read_text())
    steps = [event.seq for event in events if event.HasField("refine_progress")]
    assert [entry["seq"] for entry in timeline["refine_steps"]] == steps
    assert len(timeline["refined_fragments"]) == 2
    assert timeline["phases"][-1]["phase"] == "finish"
    plain = await service.generate()
    assert provenance(service, plain[0].job_id)["refinement"] is None


async def test_what_it_needs_is_kept_even_if_not_named_and_the_plan_says_so(service: Service) -> None:
    events = await service.generate(artifacts=["audio.flac", "final.mp4"], refine_audio=SPEC)
    plan = events[0].accepted.plan
    assert list(plan.artifacts)[:3] == ["audio.flac", "final.mp4", "latents.safetensors"]
    (message,) = [w.message for w in plan.warnings if w.reason == "ARTIFACTS_ADDED"]
    assert message == (
        "the sound is refined from final.mp4 and latents.safetensors, so latents.safetensors will be kept too"
    )
    assert {a.name for a in events[-1].completed.artifacts} == set(plan.artifacts)


async def test_guidance_encodes_what_it_leads_away_from_once(service: Service) -> None:
    spec = {**SPEC, "cfg": 2.0, "negative_prompt": "hiss"}
    events = await service.generate(refine_audio=spec)
    assert phases(events)[-5:] == [
        *(("FINISH", -1), ("ENCODE", -1), ("REFINE", -1), ("DECODE", -1), ("FINISH", -1)),
    ]
    assert "negative_context" in service.script.refine_inputs[0]
    events = await service.generate("a fox", seed=1, refine_audio=spec)
    assert "ENCODE" not in {name for name, _ in phases(events)}


async def test_a_video_that_moves_is_decoded_anew(service: Service) -> None:
    events = await service.generate(refine_audio={**SPEC, "video_denoise": 0.3, "compare": True})
    assert phases(events)[-7:] == [
        *(("FINISH", -1), ("REFINE", -1), ("DECODE", -1), ("DECODE", 0), ("DECODE", 1), ("DECODE", 2)),
        ("FINISH", -1),
    ]
    rendition = [event.refined_fragment for event in events if event.HasField("refined_fragment")]
    assert [(fragment.chunk_index, fragment.num_frames) for fragment in rendition] == [(1, 17), (2, 22)]
    assert media(events, "refined_init_segment") == [b"init"]
    (header,) = service.script.decode_headers
    assert (list(header.artifacts), header.video_file, header.latents_file) == ([COMPARISON], "", "")
    assert {a.name for a in events[-1].completed.artifacts} == {*DEFAULT_ARTIFACTS, *REFINED_ARTIFACTS}
    (audio,) = [event.refined_audio for event in events if event.HasField("refined_audio")]
    assert audio.change.log_mel_db == 3
    assert len({e.media_time_ticks for e in events}) == 3, "the rendition moves no media time"
    assert overlaps(read_ledger(service.host.ledger)) == []


async def test_without_a_plain_file_the_pictures_are_decoded_anew(service: Service) -> None:
    service.script.full = ("final.mp4",)
    events = await service.generate(refine_audio=SPEC)
    rendition = [event.refined_fragment for event in events if event.HasField("refined_fragment")]
    assert [fragment.num_frames for fragment in rendition] == [17, 22]
    assert kinds(events)[-2:] == ["refined_audio", "completed"]


async def test_without_latents_there_is_nothing_to_refine(service: Service) -> None:
    service.script.full = ("latents.safetensors",)
    events = await service.generate(refine_audio=SPEC)
    assert kinds(events)[-2:] == ["refine_failed", "completed"]
    assert events[-2].refine_failed.message == "there is no latents.safetensors to refine"


async def test_files_and_a_rendition_that_fail_are_told_by_name(service: Service) -> None:
    service.script.full, service.script.refined_stream_failure = (REFINED_SOUND,), "the encoder is out of order"
    events = await service.generate(refine_audio=SPEC)
    told = warnings(events)
    assert told["ARTIFACT_FAILED"] == "artifact refined.flac was given up: the disk is full"
    assert told["STREAM_FAILED"].startswith("the refined rendition ended early")
    assert told["AUDIO_NORMALISED"] == "refined.mp4 is quieter than the stream by a factor of 1.500"
    assert {a.name for a in events[-1].completed.artifacts} == {*DEFAULT_ARTIFACTS, REFINED, REFINED_LATENTS}


@pytest.mark.parametrize("point", POINTS)
async def test_a_failure_is_told_and_the_job_succeeds_with_its_clip(service: Service, point: str) -> None:
    service.script.errors[point] = DeviceMemoryError("the cache needs 9.7 GiB") if point == "refine:0" else broken()
    events = await service.generate(refine_audio=SPEC)
    assert kinds(events)[-2:] == ["refine_failed", "completed"]
    failed = events[-2].refine_failed
    if point == "refine:0":
        assert (failed.reason, failed.message) == ("OUT_OF_MEMORY", "the cache needs 9.7 GiB")
    else:
        assert (failed.reason, failed.message) == ("PHASE_FAILED", "the kernel is out of order")
    assert {a.name for a in events[-1].completed.artifacts} == set(DEFAULT_ARTIFACTS)
    await check_clip(service, events[0].job_id, set(DEFAULT_ARTIFACTS))
    told = provenance(service, events[0].job_id)["refinement"]
    assert (told["failure"]["reason"], told["audio"]) == (failed.reason, None)
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())
    assert kinds(await service.generate(refine_audio=SPEC))[-2:] == ["refined_audio", "completed"]


async def test_a_failure_of_ours_is_told_without_its_secrets(service: Service) -> None:
    service.script.errors["refine:1"] = RuntimeError("secret detail")
    events = await service.generate(refine_audio=SPEC)
    assert kinds(events)[-2:] == ["refine_failed", "completed"]
    assert "secret" not in events[-2].refine_failed.message


@pytest.mark.parametrize("point", ["decode:1", "finish"])
async def test_a_failure_of_the_new_pictures_leaves_nothing_half(service: Service, point: str) -> None:
    gate = service.script.gates["refine:1"] = asyncio.Event()
    stream, job_id = await start(service, refine_audio={**SPEC, "video_denoise": 0.3, "compare": True})
    await until(service, "refine:1")
    service.script.errors[point] = broken()
    gate.set()
    events = [response.event async for response in stream]
    assert kinds(events)[-2:] == ["refine_failed", "completed"]
    await check_clip(service, job_id, set(DEFAULT_ARTIFACTS))


@pytest.mark.parametrize("worker", [Worker.DIT, Worker.VAE])
async def test_a_worker_that_is_lost_while_refining_costs_nothing_but_time(service: Service, worker: Worker) -> None:
    undisturbed = await service.generate(refine_audio=SPEC)
    point = "refine:1" if worker is Worker.DIT else "decode_audio:1"
    gate = service.script.gates[point] = asyncio.Event()
    service.script.calls.clear()
    stream, _ = await start(service, refine_audio=SPEC)
    await until(service, point)
    await service.host.kill(worker)
    gate.set()
    events = [response.event async for response in stream]
    assert kinds(events)[-2:] == ["refined_audio", "completed"]
    refined = [[e.refined_fragment for e in told if e.HasField("refined_fragment")] for told in (events, undisturbed)]
    assert refined[0] == refined[1]
    assert (service.host.num_starts, service.host.restarts) == (1, [worker])


@pytest.mark.parametrize("video_denoise", [0.0, 0.3])
@pytest.mark.parametrize("point", POINTS)
async def test_cancel_leaves_the_clip_whole(service: Service, point: str, video_denoise: float) -> None:
    gate = service.script.gates[point] = asyncio.Event()
    stream, job_id = await start(service, refine_audio={**SPEC, "video_denoise": video_denoise})
    await until(service, point)
    cancelling = asyncio.create_task(cancel(service, job_id))
    await asyncio.sleep(0.02)
    gate.set()
    job = await cancelling
    assert job.state == video_pb2.JOB_STATE_CANCELLED
    assert {artifact.name for artifact in job.artifacts} == set(DEFAULT_ARTIFACTS)
    with pytest.raises(grpc.aio.AioRpcError) as end:
        [_ async for _ in stream]
    assert end.value.code() == grpc.StatusCode.CANCELLED
    await check_clip(service, job_id, set(DEFAULT_ARTIFACTS))
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())
    assert kinds(await service.generate())[-1] == "completed"


async def test_a_silent_refinement_shows_that_it_lives(service: Service) -> None:
    gate = service.script.gates["refine:2"] = asyncio.Event()
    stream, _ = await start(service, refine_audio=SPEC)
    async with asyncio.timeout(10):
        async for response in stream:
            progress = response.event.progress
            if progress.is_heartbeat and progress.phase == types_pb2.PHASE_REFINE:
                break
    assert (progress.step, progress.num_steps, progress.chunk_index) == (1, 2, -1)
    gate.set()
    assert kinds([response.event async for response in stream])[-1] == "completed"


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"steps": 0}, "refine_audio.steps", "refine_audio.steps is 0"),
        ({"sampler": "euler_ancestral"}, "refine_audio.sampler", "it draws fresh noise in every step"),
        ({"adapters": [{"name": "styl"}]}, "refine_audio.adapters[0].name", "the nearest is style"),
        ({"audio_range": {"start_s": 0, "end_s": 9}}, "refine_audio.audio_range.end_s", "at most the clip's length"),
        ({"cache": {"backend": 4}}, "refine_audio.cache.backend", "refine_audio.cache.backend is disk"),
        ({"cfg": 2.0}, "refine_audio.negative_prompt", "at least one word"),
        ({"steps": 100, "audio_denoise": 0.05}, "refine_audio.audio_denoise", "the nearest valid value is 0.1"),
    ],
)
async def test_a_bad_refinement_is_refused_with_the_request(
    service: Service, spec: dict[str, Any], field: str, words: str
) -> None:
    violations = await refusal(service, video_pb2.GenerateRequest(prompt="", refine_audio=spec))
    assert violations.keys() == {"prompt", field}
    assert words in violations[field]
    assert service.jobs() == []
