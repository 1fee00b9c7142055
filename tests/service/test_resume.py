"""Jobs whose workers or servers are lost: what is done is not done again, and the clip shows no difference."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.phases import Worker
from h3stream.errors import PhaseError, ResumeError, StartupError, WorkerLostError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec
from h3stream.v1 import records_pb2, video_pb2, workers_pb2
from orchestrator.admission import make_plan, make_refine_plan, resolve_refinement
from orchestrator.chunk_store import ChunkStore
from orchestrator.job import LOG_NAME, Job
from orchestrator.job_log import JobLog
from orchestrator.lane import Lane
from orchestrator.model_info import dense_clip
from orchestrator.recovery import MAX_LOSSES, run_job
from orchestrator.refine import SOURCE_LATENTS, SOURCE_VIDEO
from services.common.ledger import overlaps, read_ledger
from tests.job_logs import read_log
from tests.service.conftest import CLIP as SHORT
from tests.service.conftest import MODEL
from tests.service.fake_workers import ADAPTERS, FakeLaneHost, Script, broken, latents_file

CLIP = ClipSpec(
    num_frames=56, width=64, height=64, steps=2, video_shift=12.0, audio_shift=3.0, sink=2, window=2,
    kv_storage="gpu", seed=5,
)  # fmt: skip
"""Four chunks."""
STREAMED, DENSE, REFINED = "streamed", "dense", "refined behind the clip"
SOURCE, SOURCE_ALONE = "a refinement with the clip's video", "a refinement of latents alone"
KINDS = (STREAMED, DENSE, REFINED, SOURCE, SOURCE_ALONE)
TOLD_ONCE = ("init_segment", "fragment", "refined_init_segment", "refined_fragment", "stream_complete", "completed")


@dataclass
class Bench:
    """A lane of fakes, and jobs that are run on it."""

    lane: Lane
    host: FakeLaneHost
    script: Script
    data: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)
    num_unclear: int = 0
    """Ends of jobs at which a worker was lost."""

    def job(self, kind: str = STREAMED, noise: Sequence[workers_pb2.NoiseSegment] = ()) -> Job:
        """A job that has just been accepted; its prompt is no other's."""
        number = next(self.numbers)
        spec = RefineSpec(steps=2, compare=kind == SOURCE_ALONE)
        clip = CLIP if kind == STREAMED else dense_clip(SHORT, 3) if kind == DENSE else SHORT
        refinement = resolve_refinement(spec, clip, ADAPTERS, "spec") if kind not in (STREAMED, DENSE) else None
        directory = self.data / f"job{number}"
        directory.mkdir()
        record = records_pb2.JobRecord(job_id=directory.name, prompt=f"a fox, {number}", noise=noise)
        record.create_time.GetCurrentTime()
        if kind in (SOURCE, SOURCE_ALONE):
            assert refinement is not None
            plan = make_refine_plan(clip, MODEL, refinement, 0)
            (directory / SOURCE_LATENTS).write_bytes(latents_file(clip))
            if kind == SOURCE:
                (directory / SOURCE_VIDEO).write_bytes(b"video")
            record.source.has_video = kind == SOURCE
        else:
            plan = make_plan(clip, MODEL, (), 1_000_000, refinement=refinement)
        record.plan.CopyFrom(plan)
        job = Job(record, directory, JobLog(directory / LOG_NAME))
        job.emit(video_pb2.Accepted(plan=plan))
        return job

    async def run(self, job: Job) -> Made:
        """Runs a job to its end, as a scheduler does, and tells what it left."""
        self.script.work.clear()
        self.script.arrivals.clear()
        self.script.calls.clear()
        try:
            await run_job(job, self.lane)
        finally:
            made = Made.of(job, self.script)
            try:
                await self.lane.clear(job.job_id)
            except WorkerLostError:
                self.num_unclear += 1
                await self.lane.restart()
        return made


@dataclass
class Made:
    """What a job made, apart from what tells of times and of its own name."""

    media: list[bytes]
    refined: list[bytes]
    facts: tuple[str, int, str]
    """SHA-256 of the latents, frames out before the end of sampling, health of the sound."""
    artifacts: dict[str, str]
    """SHA-256 by name, of those that hold no times."""
    told: Counter[str]
    """Events that are told once, by kind."""
    calls: list[str]
    """Points and arrivals at which a worker can die."""
    work: list[str]
    events: list[video_pb2.Event]

    @classmethod
    def of(cls, job: Job, script: Script) -> Made:
        events = read_log(job.log)
        kinds = [event.WhichOneof("payload") or "" for event in events]

        def media(*wanted: str) -> list[bytes]:
            told = zip(events, kinds, strict=True)
            return [getattr(event, kind).SerializeToString() for event, kind in told if kind in wanted]

        completed = events[-1].completed
        seen: Counter[str] = Counter()
        arrivals = []
        for name in script.arrivals:
            if name.endswith(("Describe", "Phase", "LookupEmbedding")):  # all others have points
                arrivals.append(f"{name}#{seen[name]}")
            seen[name] += 1
        return cls(
            media=media("init_segment", "fragment"),
            refined=media("refined_init_segment", "refined_fragment"),
            facts=(
                completed.latents_sha256,
                completed.timings.num_frames_before_sampling_end,
                str(completed.audio_health),
            ),
            artifacts={a.name: a.sha256 for a in completed.artifacts if not a.name.endswith(".json")},
            told=Counter(kind for kind in kinds if kind in TOLD_ONCE),
            calls=[*dict.fromkeys([*script.calls, *arrivals])],
            work=list(script.work),
            events=events,
        )

    def check(self, undisturbed: Made) -> None:
        """Holds it against an undisturbed run."""
        assert self.events[-1].HasField("completed")
        assert [event.seq for event in self.events] == list(range(len(self.events)))
        for name in ("media", "refined", "facts", "artifacts", "told"):
            assert getattr(self, name) == getattr(undisturbed, name), name
        for name, digest in self.artifacts.items():
            assert digest, name
        reasons = [{w.reason for w in made.warnings()} - {"RESUMED"} for made in (self, undisturbed)]
        assert reasons[0] == reasons[1]

    def warnings(self) -> list[video_pb2.Warning]:
        return [event.warning for event in self.events if event.HasField("warning")]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    script = Script()
    host = FakeLaneHost(tmp_path, script)
    lane = Lane(host)
    await lane.start()
    yield Bench(lane, host, script, tmp_path)
    await lane.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_may_die_at_any_call(bench: Bench, kind: str) -> None:
    """Before it answers and in the middle of an answer. What it is lost after is what the next call finds out."""
    undisturbed = await bench.run(bench.job(kind))
    points = undisturbed.calls
    if kind == REFINED:  # what comes before is what it is without a refinement
        points = [
            point for point in points if point.startswith(("finish", "close", "refine", "decode_audio", "vae.", "dit."))
        ]
    assert len(points) > 10
    for point in points:
        bench.script.deaths.add(point)
        made = await bench.run(bench.job(kind))
        try:
            assert not bench.script.deaths
            made.check(undisturbed)
            check_work(made.work, bench.host.restarts)
        except AssertionError as failure:
            failure.add_note(f"the worker died at {point}")
            raise
        bench.host.restarts.clear()
    assert overlaps(read_ledger(bench.host.ledger)) == []
    assert bench.host.num_starts == 1 + bench.num_unclear  # nobody was replaced who was not lost


def check_work(work: list[str], lost: Sequence[Worker]) -> None:
    """No chunk is sampled twice, and none decoded or cleaned twice but where the worker that had it was lost."""
    counts = Counter(work)
    twice = {name.partition(":")[0] for name, count in counts.items() if count > 1}
    allowed = {
        Worker.TEXT_ENCODER: {"encoded"},
        Worker.DIT: {"prefilled", "cleaned", "restored", "refined"} | ({"sampled"} & set(work)),
        Worker.VAE: {"decoded", "refined"},
    }
    assert twice <= set().union(*(allowed[worker] for worker in lost)), (work, lost)


class Crash(BaseException):
    """The server is killed."""


class Killer:
    """Kills the server at one of the places where it leaves something on the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_writes = 0
        self.write: int | None = None
        """The one that is not done any more; None: it lives."""
        for place, name in ((JobLog, "append"), (os, "replace")):
            monkeypatch.setattr(place, name, self.watched(getattr(place, name)))

    def watched(self, write: Callable[..., None]) -> Callable[..., None]:
        def watching(*args: Any, **options: Any) -> None:
            if self.num_writes == self.write:
                raise Crash
            self.num_writes += 1
            write(*args, **options)

        return watching


async def test_the_server_may_be_killed_before_any_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.job(REFINED)
    killer = Killer(monkeypatch)
    undisturbed = await bench.run(first)
    num_writes = killer.num_writes
    assert num_writes > 40
    for write in range(num_writes):
        job = bench.job(REFINED)
        killer.num_writes, killer.write = 0, write
        with pytest.raises(Crash):
            await bench.run(job)
        killer.write = None
        await bench.lane.restart()  # its workers die with it
        sampled = [w for w in bench.script.work if w.startswith("sampled")]
        made = await bench.run(Job.restore(job.record, job.directory))
        sampled += [w for w in made.work if w.startswith("sampled")]
        try:
            made.check(undisturbed)
            assert set(sampled) == {"sampled:0", "sampled:1", "sampled:2"}
            assert len(sampled) <= 4  # one that had not been stored
        except AssertionError as failure:
            failure.add_note(f"the server was killed before write {write}")
            raise


@pytest.mark.parametrize("lost", [(Worker.DIT,), (Worker.VAE,), tuple(Worker)])
async def test_whoever_is_lost_at_once_the_rest_goes_on(bench: Bench, lost: tuple[Worker, ...]) -> None:
    undisturbed = await bench.run(bench.job())
    gate = bench.script.gates["sample:2.2"] = asyncio.Event()
    job = bench.job()
    running = asyncio.create_task(bench.run(job))
    while "sample:2.2" not in bench.script.calls:
        await asyncio.sleep(0.005)
    for worker in lost:
        await bench.host.kill(worker)
    gate.set()
    made = await running
    made.check(undisturbed)
    assert set(bench.host.restarts) == set(lost)
    (told,) = [w.message for w in made.warnings()]
    names = {1: f"the {lost[0].value} worker was", 3: "the text_encoder, dit and vae workers were"}[len(lost)]
    assert told.startswith(f"{names} lost in phase ")
    assert job.num_resumes == 1
    if Worker.DIT not in lost:
        assert [w for w in made.work if w.startswith("cleaned")] == ["cleaned:0", "cleaned:1", "cleaned:2"]
        assert not any(w.startswith("restored") for w in made.work)
    if Worker.VAE not in lost:
        assert [w for w in made.work if w.startswith("decoded")] == [f"decoded:{index}" for index in range(4)]


async def test_what_dies_at_the_same_place_each_time_ends_its_job(bench: Bench) -> None:
    bench.script.deaths |= {f"dit.SampleChunk#{2 + loss}" for loss in range(MAX_LOSSES)}
    job = bench.job()
    with pytest.raises(WorkerLostError, match=r"^the dit worker is gone$"):
        await bench.run(job)
    assert not bench.script.deaths
    assert job.num_resumes == MAX_LOSSES - 1
    assert (await bench.run(bench.job())).events[-1].HasField("completed")


async def test_any_number_of_losses_is_survived_while_chunks_are_finished_between_them(bench: Bench) -> None:
    undisturbed = await bench.run(bench.job())
    bench.script.deaths |= {f"dit.SampleChunk#{2 * chunk}" for chunk in range(4)}
    job = bench.job()
    (await bench.run(job)).check(undisturbed)
    assert job.num_resumes == 4 > MAX_LOSSES


async def test_a_refinement_that_kills_its_worker_each_time_costs_the_clip_nothing(bench: Bench) -> None:
    undisturbed = await bench.run(bench.job(REFINED))
    bench.script.deaths |= {f"dit.RefineAudio#{loss}" for loss in range(MAX_LOSSES)}
    made = await bench.run(bench.job(REFINED))
    assert not bench.script.deaths
    assert (made.media, made.facts) == (undisturbed.media, undisturbed.facts)
    (failed,) = [event.refine_failed for event in made.events if event.HasField("refine_failed")]
    assert (failed.reason, failed.message) == ("WORKER_LOST", "the dit worker is gone")
    assert made.artifacts == {name: undisturbed.artifacts[name] for name in made.artifacts}
    assert "final.mp4" in made.artifacts


async def test_a_worker_that_cannot_be_replaced_by_itself_is_replaced_with_the_others(bench: Bench) -> None:
    undisturbed = await bench.run(bench.job())
    bench.script.deaths.add("decode:2")
    bench.host.refusals.append(StartupError("there is no room"))
    (await bench.run(bench.job())).check(undisturbed)
    assert (bench.host.num_starts, bench.host.restarts) == (2, [])


async def test_a_job_waits_for_a_lane_that_cannot_start_at_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = await bench.run(bench.job())
    monkeypatch.setattr("orchestrator.lane.RETRY_S", 0.01)
    bench.script.deaths.add("decode:2")
    bench.host.refusals += [StartupError(f"there is no room, {attempt}") for attempt in range(4)]
    (await bench.run(bench.job())).check(undisturbed)
    assert bench.host.num_starts == 2


async def test_a_job_that_waits_for_its_lane_can_be_cancelled(bench: Bench) -> None:
    bench.script.deaths.add("decode:2")
    bench.host.refusals += [StartupError("there is no room"), StartupError("nor now")]
    running = asyncio.create_task(bench.run(bench.job()))
    while bench.host.refusals:
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert (await bench.run(bench.job())).events[-1].HasField("completed")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("kind", [STREAMED, DENSE])
async def test_chunks_whose_files_are_damaged_are_sampled_again(
    bench: Bench, kind: str, damage: Callable[[Path], None]
) -> None:
    undisturbed = await bench.run(bench.job(kind))
    job = bench.job(kind)
    bench.script.gates["decode:2"] = asyncio.Event()
    await stop_at(bench, job, "decode:2")
    await bench.lane.restart()
    damage(ChunkStore(job.directory).path(1))
    made = await bench.run(Job.restore(job.record, job.directory))
    made.check(undisturbed)
    sampled = [w for w in made.work if w.startswith("sampled")]
    assert sampled == (["sampled"] if kind == DENSE else ["sampled:1", "sampled:3"])


async def test_a_damaged_chunk_that_lies_behind_the_cache_is_sampled_in_a_new_session(bench: Bench) -> None:
    """The DiT worker has more chunks than are known: it cannot go back, and is not asked to."""
    undisturbed = await bench.run(bench.job())
    job = bench.job()
    restart = bench.host.restart

    async def damage_and_restart(worker: Worker) -> str:
        flip(ChunkStore(job.directory).path(1))
        return await restart(worker)

    bench.host.restart = damage_and_restart  # type: ignore[method-assign]
    bench.script.deaths.add("decode:3")
    made = await bench.run(job)
    made.check(undisturbed)
    assert Counter(made.work)["prefilled"] == 2
    assert [w for w in made.work if w.startswith("sampled")] == [f"sampled:{index}" for index in (0, 1, 2, 3, 1)]


async def stop_at(bench: Bench, job: Job, point: str) -> None:
    """Runs a job until its server dies at a point."""
    bench.script.gates[point] = asyncio.Event()
    bench.script.calls.clear()
    running = asyncio.create_task(run_job(job, bench.lane))
    while point not in bench.script.calls:
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.wait([running])
    del bench.script.gates[point]


async def test_media_that_would_differ_from_what_was_delivered_are_not_sent(bench: Bench) -> None:
    job = bench.job()
    await stop_at(bench, job, "decode:3")
    await bench.lane.restart()
    bench.script.encoder = b"of another version"
    told = len(job.log)
    restored = Job.restore(job.record, job.directory)
    with pytest.raises(ResumeError, match="piece 1 of the media stream was made again, but not as it was delivered"):
        await bench.run(restored)
    assert not any(event.HasField("fragment") for event in read_log(restored.log)[told:])


async def test_a_stream_that_was_said_to_have_ended_does_not_go_on(bench: Bench) -> None:
    bench.script.stream_end, bench.script.stream_failure = 17, "the encoder broke"
    job = bench.job()
    await stop_at(bench, job, "decode:3")
    await bench.lane.restart()
    bench.script.stream_end = None
    made = await bench.run(Job.restore(job.record, job.directory))
    assert [w.reason for w in made.warnings()] == ["STREAM_FAILED"]
    assert len(made.media) == 2
    assert made.told == Counter(init_segment=1, fragment=1, completed=1)


async def test_a_full_disk_ends_the_job_and_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = await bench.run(bench.job())

    def refuse(path: Path, data: bytes) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = bench.job()
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.sealed.write_whole", refuse)
        with pytest.raises(
            PhaseError, match=r"^the latents of finished chunks cannot be stored: No space left on device$"
        ):
            await bench.run(job)
    assert not any(event.HasField("fragment") for event in read_log(job.log))
    (await bench.run(bench.job())).check(undisturbed)


async def test_a_directory_that_somebody_removes_is_made_again(bench: Bench) -> None:
    store = ChunkStore(bench.data / "gone" / "job")
    store.directory.parent.mkdir(parents=True)
    shutil.rmtree(store.directory.parent)
    store.put(0, [])
    assert store.get(0) == ()
    assert store.num_finished == 1


async def test_a_job_s_own_noise_holds_when_it_is_taken_up_again(bench: Bench) -> None:
    noise = [workers_pb2.NoiseSegment(first_chunk=0, seed=CLIP.seed), workers_pb2.NoiseSegment(first_chunk=2, seed=9)]
    plain, undisturbed = await bench.run(bench.job()), await bench.run(bench.job(noise=noise))
    assert (undisturbed.media == plain.media, undisturbed.media[:2] == plain.media[:2]) == (False, True)
    bench.script.deaths.add("sample:3.1")
    (await bench.run(bench.job(noise=noise))).check(undisturbed)


async def test_a_failure_that_is_no_loss_ends_the_job_at_once(bench: Bench) -> None:
    bench.script.errors["commit:1"] = broken()
    job = bench.job()
    with pytest.raises(PhaseError, match="out of order"):
        await bench.run(job)
    assert (job.num_resumes, bench.host.restarts) == (0, [])
