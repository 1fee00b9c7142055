"""A clip that goes on from another job's chunk boundary."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.artifacts import LATENTS
from core.geometry import chunk_table
from h3stream.errors import PhaseError
from h3stream.v1 import records_pb2, types_pb2, video_pb2, workers_pb2
from orchestrator.caller import Caller
from orchestrator.chunk_store import CHUNKS_NAME, ChunkStore
from orchestrator.job import Job
from orchestrator.job_files import read_job_record
from orchestrator.lane import Lane
from orchestrator.latents import read_latents
from orchestrator.scheduler import Scheduler
from tests.job_logs import read_log
from tests.service.callers import CoreCaller, callers, status_of
from tests.service.conftest import CLIP, Service
from tests.service.fake_workers import FakeLaneHost
from tests.service.test_cancel_and_queue import start, until

FRAMES = 73  # four chunks and a tail
LAST = 4


@pytest.fixture
async def studio(service: Service) -> AsyncIterator[CoreCaller]:
    async with callers(service, ("default", "generate")) as [caller]:
        yield caller


async def running(service: Service, stands_at: str = "sample:3.1", **fields: Any) -> str:
    """A job that has finished three chunks and stands in its fourth."""
    service.script.gates[stands_at] = asyncio.Event()
    _, job_id = await start(service, num_frames=FRAMES, **fields)
    await until(service, stands_at)
    return job_id


def go_on(service: Service) -> None:
    """Lets what stands somewhere go on."""
    for gate in service.script.gates.values():
        gate.set()
    service.script.gates.clear()


async def events_of(service: Service, job_id: str) -> list[video_pb2.Event]:
    return [response.event async for response in service.stub.Attach(video_pb2.AttachRequest(job_id=job_id))]


def media(events: list[video_pb2.Event]) -> list[bytes]:
    """Init segment and fragments."""
    parts = [e.init_segment if e.HasField("init_segment") else e.fragment for e in events]
    return [part.SerializeToString(deterministic=True) for part in parts if part.data]


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def branch(job_id: str, from_chunk: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "", "branch": video_pb2.Branch(job_id=job_id, from_chunk=from_chunk, **fields)}


def record_of(service: Service, job_id: str) -> records_pb2.JobRecord:
    return read_job_record(service.data / "jobs" / job_id)


async def test_without_changes_it_is_the_clip_of_its_source(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    job_id = (await studio.submit(**branch(source, 2))).job_id
    go_on(service)
    made, source_events = await events_of(service, job_id), await events_of(service, source)
    assert media(made) == media(source_events)
    assert made[-1].completed.latents_sha256 == source_events[-1].completed.latents_sha256
    assert [event.seq for event in made] == list(range(len(made)))
    assert {event.job_id for event in made} == {job_id}


async def test_what_comes_before_the_boundary_is_told_at_once_and_not_sampled_again(
    service: Service, studio: CoreCaller
) -> None:
    source = await running(service, seed=3)
    job_id = (await studio.submit(**branch(source, 3))).job_id  # waits: the lane is its source's
    kinds = [event.WhichOneof("payload") for event in await first_events(service, job_id, 4)]
    assert kinds == ["accepted", "init_segment", "fragment", "fragment"]
    go_on(service)
    await studio.ended(source)
    del service.script.work[:]
    await studio.ended(job_id)
    assert [word for word in service.script.work if word.startswith("sampled")] == ["sampled:3", "sampled:4"]
    assert [word for word in service.script.work if word.startswith("restored")] == [f"restored:{i}" for i in range(3)]


async def first_events(service: Service, job_id: str, number: int) -> list[video_pb2.Event]:
    events = []
    async for response in service.stub.Attach(video_pb2.AttachRequest(job_id=job_id)):
        events.append(response.event)
        if len(events) == number:
            break
    return events


@pytest.mark.parametrize("from_chunk", [1, 2, 3])
async def test_another_seed_changes_what_follows_the_boundary_alone(
    service: Service, studio: CoreCaller, from_chunk: int
) -> None:
    source = await running(service, seed=3)
    before = content(service.data / "jobs" / source / CHUNKS_NAME)
    job_id = (await studio.submit(**branch(source, from_chunk, seed=4))).job_id
    assert content(service.data / "jobs" / source / CHUNKS_NAME) == before
    go_on(service)
    made, of_source = media(await events_of(service, job_id)), media(await events_of(service, source))
    assert len(made) == len(of_source)
    num_kept = max(1, from_chunk)  # the init segment, and a fragment of each chunk but the first
    assert made[:num_kept] == of_source[:num_kept]
    assert not set(made[num_kept:]) & set(of_source[num_kept:])
    plan = (await studio.get(job_id)).plan
    assert plan.branch == video_pb2.Branch(job_id=source, from_chunk=from_chunk, prompt="a fox", seed=4)
    assert plan.clip.seed == 4
    noise = [(segment.first_chunk, segment.seed) for segment in record_of(service, job_id).noise]
    assert noise == [(0, 3), (from_chunk, 4)]


async def test_another_prompt_is_the_jobs(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    job_id = (await studio.submit(**branch(source, 2, prompt="a bear"))).job_id
    job = await studio.get(job_id)
    assert (job.prompt, job.plan.branch.prompt, job.plan.branch.seed) == ("a bear", "a bear", 3)
    assert (await studio.get(source)).prompt == "a fox"
    assert not record_of(service, job_id).noise
    go_on(service)
    await studio.ended(job_id)
    assert service.script.work.count("encoded") == 2


async def test_its_plan_counts_what_is_sampled_anew(service: Service, studio: CoreCaller) -> None:
    source = await running(service, adapters=[{"name": "style", "strength": 0.25}])
    whole = (await studio.get(source)).plan
    asked = branch(source, 3, seed=9) | {"artifacts": ["stream.mp4"], "preview": {"max_side": 0, "every_steps": 1}}
    plan = await studio.plan(**asked)
    assert plan.num_noise_forwards == CLIP.steps * 2
    assert (plan.num_clean_forwards, plan.chunks) == (whole.num_clean_forwards, whole.chunks)
    assert list(plan.artifacts) == ["stream.mp4"]
    assert plan.preview.max_side == 0
    plan.clip.seed = whole.clip.seed
    assert plan.clip == whole.clip
    assert len((await studio.list()).jobs) == 1


async def test_seeds_of_a_branch_of_a_branch(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    first = (await studio.submit(**branch(source, 3, seed=4))).job_id

    async def noise(**fields: Any) -> tuple[list[tuple[int, int]], int]:
        """Of a branch of the branch, which is no sooner made than cancelled; and its clip's seed."""
        job_id = (await studio.submit(**branch(first, **fields))).job_id
        record = record_of(service, job_id)
        await studio.cancel(job_id)
        return [(segment.first_chunk, segment.seed) for segment in record.noise], record.plan.clip.seed

    assert await noise(from_chunk=2) == ([(0, 3), (3, 4)], 4), "the clip of the branch, as long as nothing is said"
    assert await noise(from_chunk=2, seed=7) == ([(0, 3), (2, 7)], 7)
    assert await noise(from_chunk=3, seed=7) == ([(0, 3), (3, 7)], 7)
    assert await noise(from_chunk=2, seed=3) == ([], 3)


async def test_a_branch_of_a_branch_has_the_chunks_of_both(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    first = (await studio.submit(**branch(source, 2, seed=4))).job_id
    go_on(service)
    await studio.ended(source)
    gate = service.script.gates["sample:4.1"] = asyncio.Event()
    del service.script.calls[:]
    await until(service, "sample:4.1")
    second = (await studio.submit(**branch(first, 4, seed=5))).job_id
    gate.set()
    medias = [media(await events_of(service, job_id)) for job_id in (source, first, second)]
    assert medias[1][:2] == medias[0][:2]
    assert medias[2][:4] == medias[1][:4]
    assert len({tuple(each) for each in medias}) == 3


async def test_chunks_of_an_ended_job_are_cut_out_of_its_latents(service: Service, studio: CoreCaller) -> None:
    source = (await service.generate(num_frames=FRAMES, seed=3))[0].job_id
    directory = service.data / "jobs" / source
    assert not (directory / CHUNKS_NAME).exists()
    before = content(directory)
    service.script.gates["lookup"] = service.script.gates["open_vae"] = asyncio.Event()
    job_id = (await studio.submit(**branch(source, 3, seed=4))).job_id
    own = service.data / "jobs" / job_id
    file = read_latents(directory / LATENTS, CLIP)
    store = ChunkStore(own)
    assert store.num_finished == 3
    for chunk in chunk_table(FRAMES)[:3]:
        assert store.get(chunk.index) == await file.latents.chunk(chunk)
    names = {path.name for path in own.iterdir()}
    assert names <= {"job.binpb", "events.log", CHUNKS_NAME}
    assert content(directory) == before
    cancelling = asyncio.create_task(studio.cancel(job_id))
    go_on(service)
    await cancelling


async def test_a_source_that_ends_meanwhile_is_still_gone_on_from(
    service: Service, studio: CoreCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await running(service, seed=3)
    get = ChunkStore.get

    def lose_its_chunks(store: ChunkStore, index: int) -> Any:
        """As the end of a job takes them away, between the first and the second one."""
        if index == 1 and store.directory.parent.name == source:
            loop.call_soon_threadsafe(go_on, service)
            asyncio.run_coroutine_threadsafe(studio.ended(source), loop).result(20)
        return get(store, index)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(ChunkStore, "get", lose_its_chunks)
    job_id = (await studio.submit(**branch(source, 3, seed=4))).job_id
    assert (await studio.get(source)).state == video_pb2.JOB_STATE_SUCCEEDED
    assert (await studio.get(job_id)).plan.branch.from_chunk == 3


async def test_its_source_may_be_deleted_at_once(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    job_id = (await studio.submit(**branch(source, 2, seed=4))).job_id
    cancelling = asyncio.create_task(studio.cancel(source))
    go_on(service)
    await cancelling
    await studio.delete(source)
    await studio.ended(job_id)


async def test_one_request_is_one_branch_though_its_source_has_gone(service: Service, studio: CoreCaller) -> None:
    source = await running(service)
    asked = branch(source, 2) | {"idempotency_key": "take-1"}
    job_id = (await studio.submit(**asked)).job_id
    cancelling = asyncio.create_task(studio.cancel(source))
    go_on(service)
    await cancelling
    await studio.delete(source)
    again = await studio.submit(**asked)
    assert (again.job_id, again.is_known) == (job_id, True)


WRONG_FIELDS: dict[str, Any] = {
    "prompt": "a fox", "num_frames": 39, "width": 64, "height": 64, "steps": 2, "video_shift": 12.0,
    "audio_shift": 3.0, "sink": 2, "window": 2, "kv_storage": 1, "seed": 0, "mode": 1,
    "adapters": [{"name": "style"}],
}  # fmt: skip


async def test_every_field_of_the_clip_must_be_left_out(service: Service, studio: CoreCaller) -> None:
    source = await running(service)
    for name, value in WRONG_FIELDS.items():
        for call in (studio.submit, studio.plan):
            status, message = await status_of(call(**branch(source, 2) | {name: value}))
            assert status == "INVALID_ARGUMENT", name
            assert f"{name} is" in message
            assert "it must be left out" in message
    _, message = await status_of(studio.plan(**branch(source, 2) | WRONG_FIELDS))
    assert message.count("it must be left out") == len(WRONG_FIELDS)
    assert "branch.prompt is its place" in message
    assert "branch.seed is its place" in message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"from_chunk": 0}, "branch.from_chunk is 0; it must be from 1 to 4; the nearest valid value is 1"),
        ({"from_chunk": 5}, "branch.from_chunk is 5; it must be from 1 to 4; the nearest valid value is 4"),
        ({"from_chunk": -7}, "branch.from_chunk is -7; it must be from 1 to 4"),
        ({"from_chunk": 1, "prompt": " "}, "branch.prompt: the prompt is 1 characters of white space"),
        ({"from_chunk": 1, "prompt": "a <|image_pad|>"}, "branch.prompt: the prompt holds the control token"),
    ],
)
async def test_what_is_wrong_with_a_branch_is_told_with_what_is_right(
    service: Service, studio: CoreCaller, fields: dict[str, Any], told: str
) -> None:
    source = await running(service)
    status, message = await status_of(studio.submit(**branch(source, **fields)))
    assert status == "INVALID_ARGUMENT"
    assert told in message


async def test_what_is_wrong_beside_the_branch_is_told_too(service: Service, studio: CoreCaller) -> None:
    source = await running(service)
    wrong = {"artifacts": ["movie.avi"], "deadline_s": -1, "refine_audio": {"steps": 0}}
    status, message = await status_of(studio.submit(**branch(source, 9) | wrong))
    assert status == "INVALID_ARGUMENT"
    for words in ("branch.from_chunk is 9", "movie.avi", "deadline_s is -1", "refine_audio.steps is 0"):
        assert words in message


async def test_a_chunk_that_is_not_finished_yet_is_no_boundary_yet(service: Service, studio: CoreCaller) -> None:
    source = await running(service)
    status, message = await status_of(studio.submit(**branch(source, 4)))
    assert status == "FAILED_PRECONDITION"
    assert "has finished 3 of its chunks; from_chunk can be from 1 to 3 now" in message
    waiting = (await studio.submit()).job_id
    status, message = await status_of(studio.submit(**branch(waiting, 1)))
    assert status == "FAILED_PRECONDITION"
    assert "none can be gone on from yet" in message


async def test_a_dense_clip_and_a_refinement_have_no_boundaries(service: Service, studio: CoreCaller) -> None:
    dense = (await service.generate(mode=video_pb2.GenerateRequest(mode=2).mode))[0].job_id
    refined = (await studio.refine(job_id=dense)).job_id
    await studio.ended(refined)
    for job_id, words in ((dense, "whose clip is dense"), (refined, f"refines the sound of job {dense}")):
        status, message = await status_of(studio.submit(**branch(job_id, 1)))
        assert status == "INVALID_ARGUMENT"
        assert f"branch.job_id is {job_id}" in message
        assert words in message


async def test_latents_that_are_gone_are_nothing_to_go_on_from(service: Service, studio: CoreCaller) -> None:
    without = (await service.generate(num_frames=FRAMES, artifacts=["stream.mp4"]))[0].job_id
    damaged = (await service.generate(num_frames=FRAMES))[0].job_id
    path = service.data / "jobs" / damaged / LATENTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    cancelled = await running(service)
    cancelling = asyncio.create_task(studio.cancel(cancelled))
    go_on(service)
    await cancelling
    for job_id, words in (
        (without, "it has stream.mp4"),
        (damaged, "is no longer what the job left"),
        (cancelled, "nothing to go on from"),
    ):
        status, message = await status_of(studio.submit(**branch(job_id, 1)))
        assert status == "NOT_FOUND"
        assert words in message
    assert not list((service.data / "jobs" / ".incoming").iterdir()), "what had been prepared is gone"


async def test_media_that_cannot_be_told_at_once_are_told_when_they_are_decoded(
    service: Service, studio: CoreCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await running(service, seed=3)
    emit = Job.emit

    def fail_once(job: Job, payload: Any, *, is_refined: bool = False) -> None:
        if isinstance(payload, types_pb2.Fragment):
            monkeypatch.setattr(Job, "emit", emit)
            raise PhaseError("the job's events cannot be written: No space left on device")
        emit(job, payload, is_refined=is_refined)

    monkeypatch.setattr(Job, "emit", fail_once)
    job_id = (await studio.submit(**branch(source, 3))).job_id
    kinds = [event.WhichOneof("payload") for event in await first_events(service, job_id, 3)]
    assert kinds[:2] == ["accepted", "init_segment"]
    assert kinds[2] != "fragment"
    go_on(service)
    assert media(await events_of(service, job_id)) == media(await events_of(service, source))


async def test_a_branch_that_waits_goes_on_when_the_server_is_back(service: Service, studio: CoreCaller) -> None:
    source = await running(service, seed=3)
    job_id, twin = [(await studio.submit(**branch(source, 3, seed=4))).job_id for _ in range(2)]
    gate = service.script.gates["sample:4.1"] = asyncio.Event()  # its source's, and then its own
    service.script.gates.pop("sample:3.1").set()
    await until(service, "sample:4.1")
    await service.scheduler.stop(0, asyncio.Event())
    gate.set()

    (service.data / "again").mkdir()
    scheduler = Scheduler(
        [Lane(FakeLaneHost(service.data / "again", service.script))], service.data, max_queued_jobs=4, kept_jobs=4
    )
    scheduler.open()
    await scheduler.start()
    async with asyncio.timeout(20):
        for each in (source, job_id, twin):
            await scheduler.job(each, Caller()).wait_ended()
    logs = {each: media(read_log(scheduler.job(each, Caller()).log)) for each in (source, job_id, twin)}
    await scheduler.stop(0, asyncio.Event())
    assert logs[job_id] == logs[twin]
    assert logs[job_id][:3] == logs[source][:3]
    assert not set(logs[job_id][3:]) & set(logs[source][3:])


async def test_there_must_be_such_a_job(studio: CoreCaller) -> None:
    for call in (studio.submit(**branch("nobody", 1)), studio.plan(**branch("nobody", 1))):
        assert (await status_of(call))[0] == "NOT_FOUND"


def test_a_segment_is_what_the_workers_are_told() -> None:
    assert records_pb2.JobRecord.DESCRIPTOR.fields_by_name["noise"].message_type == workers_pb2.NoiseSegment.DESCRIPTOR
