"""Refinements through the worker: what is planned, what runs, what is left behind, and that nothing before matters."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from core.budget import GIB
from core.latents_file import latent_shapes
from h3stream.adapters import AdapterChoice
from h3stream.errors import ConfigError, DeviceMemoryError, InvalidRequestError, PhaseError, UnsupportedError
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from h3stream.request import ClipSpec
from services.common.config import AdapterSource
from services.common.verbs import VerbCancelled
from services.dit.config import DitConfig
from services.dit.refine import scratch
from services.dit.refine.identity import CONDITIONING_CHANGED, VIDEO_CHANGED
from services.dit.refine.plan import RefinePlan
from services.dit.refine.refiner import Branch, StepReport
from services.dit.refine.stores import RecordStore
from services.dit.refine.verb import Refined, RefineListener
from services.dit.rows import ChunkLatents
from services.dit.worker import DitWorker
from tests.raven_vectors import FIXTURES

EXTRA = AdapterSource("extra", FIXTURES / "lora_extra.safetensors", 0.5)
SPEC = RefineSpec(steps=3, seed=3)
TEXT, AUDIO, VIDEO, LAYERS, HIDDEN = 5, 2 * 37, 7 * 1 * 2, 3, 128
FROZEN = VIDEO
INT4_ROW = HIDDEN // 128 * 66
CACHE_BYTES = LAYERS * FROZEN * INT4_ROW
NO_CACHE = FrozenCacheSpec(enabled=False)
MADE: WeakKeyDictionary[DitWorker, list[RecordStore]] = WeakKeyDictionary()
"""The stores that a worker has made."""


@dataclass
class Told:
    """A listener of one call."""

    plan: RefinePlan | None = None
    reports: list[StepReport] = field(default_factory=list)
    cancel_after: int = -1
    """Polls that find the caller still there; -1: all."""

    @property
    def modes(self) -> list[str]:
        return [report.mode for report in self.reports]

    @property
    def reasons(self) -> list[str]:
        return [report.reason for report in self.reports]

    def listener(self) -> RefineListener:
        def started(plan: RefinePlan) -> None:
            assert self.plan is None
            assert self.reports == []
            self.plan = plan

        def stepped(report: StepReport, done: int, num_steps: int) -> None:
            self.reports.append(report)
            assert (done, num_steps) == (len(self.reports), self.plan.spec.steps)

        def cancelled() -> bool:
            self.cancel_after -= 1
            return self.cancel_after == -1

        return RefineListener(started, stepped, cancelled)


def make_worker(directory: Path, **settings: Any) -> DitWorker:
    worker = DitWorker(DitConfig(directory, device="cpu", compute_dtype="float32", adapters=(EXTRA,), **settings))
    worker.weights.enter()
    give_room(worker)
    make_store, made = worker._rooms.new_store, MADE.setdefault(worker, [])

    def new_store(*args: Any) -> Any:
        made.append(make_store(*args))
        return made[-1]

    worker._rooms.new_store = new_store  # type: ignore[method-assign]
    return worker


def give_room(worker: DitWorker, device_gib: float = 100, host_gib: float = 100) -> None:
    """What the worker measures, in place of this machine's memory."""
    worker._rooms._free_device = lambda: int(device_gib * GIB)
    worker._rooms._available_host = lambda: int(host_gib * GIB)


@pytest.fixture
def worker(model_directory: Path, tmp_path: Path) -> DitWorker:
    return make_worker(model_directory, frozen_caches=tmp_path / "caches")


@pytest.fixture
def clip(clip: ClipSpec) -> ClipSpec:
    return dataclasses.replace(clip, num_frames=22)


@pytest.fixture
def latents(clip: ClipSpec) -> ChunkLatents:
    return random_latents(clip, 11)


@pytest.fixture
def prompt(context: torch.Tensor, token_tags: torch.Tensor) -> Branch:
    return Branch(context, token_tags)


@pytest.fixture
def negative(context: torch.Tensor, token_tags: torch.Tensor) -> Branch:
    return Branch(context.flip(0), token_tags)


def random_latents(clip: ClipSpec, seed: int) -> ChunkLatents:
    generator = torch.Generator().manual_seed(seed)
    shapes = latent_shapes(clip)
    return ChunkLatents(*(torch.randn(shapes[name], generator=generator) for name in ("video", "audio")))


def refine(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, *branches: Branch, spec: RefineSpec = SPEC, **cache: Any
) -> tuple[Refined, Told]:
    """One call.  cache: fields of the spec's cache that differ."""
    spec = dataclasses.replace(spec, cache=dataclasses.replace(spec.cache, **cache))
    told = Told()
    return worker.refine_audio(clip, spec, latents, branches, told.listener()), told


def test_what_is_about_to_be_done_is_told_before_the_first_step(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    refined, told = refine(worker, clip, latents, prompt, spec=RefineSpec(steps=3))
    plan = told.plan
    assert plan.spec == RefineSpec(steps=3, seed=clip.seed)
    assert (plan.num_rows, plan.num_live_rows, plan.num_blocks) == (TEXT + AUDIO + VIDEO, TEXT + AUDIO, LAYERS)
    assert (plan.has_cache, plan.backend, plan.cache_bytes) == (True, "vram", CACHE_BYTES)
    assert plan.transient_bytes == plan.num_rows * 2 * worker._model.size.ffn * 4
    assert told.modes == ["build", "cached", "cached"]
    assert told.reasons == ["no cache yet", "", ""]
    assert [report.cache_bytes for report in told.reports] == [CACHE_BYTES] * 3
    assert refined.latents.video is latents.video
    assert refined.sampling_s == pytest.approx(sum(report.block_s + report.outside_s for report in told.reports))
    assert not refined.is_warm
    difference = (refined.latents.audio - latents.audio).double().norm() / latents.audio.double().norm()
    assert refined.change == pytest.approx(difference.item())


@pytest.mark.parametrize(
    ("cache", "room", "backend", "reason"),
    [
        ({}, (100, 100), "vram", "the device has room for the cache"),
        ({}, (4, 100), "ram", "the device has no room for the cache"),
        ({"allow_disk": True}, (4, 4), "disk", "nor has host memory"),
        ({"shared": True}, (100, 100), "ram", "a shared cache cannot stay on the device"),
        ({"backend": "vram"}, (0, 100), "vram", "vram was asked for"),
        ({"backend": "ram"}, (100, 100), "ram", "ram was asked for"),
        ({"backend": "disk", "allow_disk": True}, (100, 100), "disk", "disk was asked for"),
    ],
)
def test_the_cache_lives_where_there_is_room_and_says_why(
    worker: DitWorker,
    clip: ClipSpec,
    latents: ChunkLatents,
    prompt: Branch,
    cache: dict[str, Any],
    room: tuple[float, float],
    backend: str,
    reason: str,
) -> None:
    give_room(worker, *room)
    refined, told = refine(worker, clip, latents, prompt, **cache)
    assert told.plan.backend == backend
    assert reason in told.plan.reason
    exact, _ = refine(worker, clip, latents, prompt, backend="vram")
    assert torch.equal(refined.latents.audio, exact.latents.audio)


def test_where_there_is_no_room_it_fails_with_the_ways_out_or_goes_on_exactly(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    give_room(worker, 4, 4)
    with pytest.raises(DeviceMemoryError, match=r"no room for the frozen cache.*allow_disk.*slower and exact"):
        refine(worker, clip, latents, prompt)
    exact, _ = refine(worker, clip, latents, prompt, enabled=False)
    refined, told = refine(worker, clip, latents, prompt, on_no_room="exact")
    assert told.modes == ["exact"] * 3
    assert not told.plan.has_cache
    assert told.plan.reason.startswith("no room for the frozen cache")
    assert told.reasons == [told.plan.reason] * 3
    assert torch.equal(refined.latents.audio, exact.latents.audio)


def test_a_disk_that_is_not_there_is_refused(
    model_directory: Path, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    worker = make_worker(model_directory)
    with pytest.raises(UnsupportedError, match="no directory for it"):
        refine(worker, clip, latents, prompt, backend="disk", allow_disk=True)
    give_room(worker, 4, 4)
    with pytest.raises(DeviceMemoryError, match="no room"):
        refine(worker, clip, latents, prompt, allow_disk=True)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (dataclasses.replace(SPEC, cache=NO_CACHE), "switched off"),
        (dataclasses.replace(SPEC, steps=1), "a single step"),
        (dataclasses.replace(SPEC, video_denoise=0.3), "the video may move: its mask reaches 0.3"),
    ],
)
def test_steps_that_no_cache_could_serve_are_exact_and_say_why(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, spec: RefineSpec, reason: str
) -> None:
    refined, told = refine(worker, clip, latents, prompt, spec=spec)
    assert set(told.modes) == {"exact"}
    assert reason in told.plan.reason
    assert told.reasons == [told.plan.reason] * spec.steps
    assert (told.plan.has_cache, told.plan.cache_bytes, told.plan.backend) == (False, 0, "")
    assert told.plan.num_live_rows == told.plan.num_rows
    assert all(report.num_blocks["exact"] == LAYERS for report in told.reports)
    assert (refined.latents.video is latents.video) == (spec.video_denoise == 0)


@pytest.fixture
def fresh(model_directory: Path, clip: ClipSpec, latents: ChunkLatents, prompt: Branch) -> torch.Tensor:
    """What a worker makes that has done nothing before."""
    return refine(make_worker(model_directory), clip, latents, prompt)[0].latents.audio


def cancel(worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, branch: Branch, after: int) -> None:
    with pytest.raises(VerbCancelled):
        worker.refine_audio(clip, SPEC, latents, [branch], Told(cancel_after=after).listener())


def test_a_result_does_not_depend_on_what_ran_before(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, negative: Branch, fresh: torch.Tensor
) -> None:
    def again() -> torch.Tensor:
        return refine(worker, clip, latents, prompt)[0].latents.audio

    cancel(worker, clip, latents, prompt, after=2)
    assert torch.equal(again(), fresh)
    other = refine(worker, clip, latents, negative)[0].latents.audio
    assert not torch.equal(other, fresh)
    assert torch.equal(again(), fresh)
    styled = dataclasses.replace(SPEC, adapters=(AdapterChoice("extra"),))
    assert not torch.equal(refine(worker, clip, latents, prompt, spec=styled)[0].latents.audio, fresh)
    assert torch.equal(again(), fresh)
    refine(worker, clip, random_latents(clip, 5), prompt, shared=True)
    assert torch.equal(again(), fresh)
    worker.open_session("s", clip, prompt.context, prompt.token_tags, lambda: False)
    worker.sample_chunk("s", 0, lambda *_: None, lambda: False)  # with the streaming adapter
    assert torch.equal(again(), fresh)


@pytest.mark.parametrize("contents", ["hidden", "kv"])
@pytest.mark.parametrize("precision", ["int4", "fp8", "bf16"])
def test_where_a_cache_lives_changes_no_bit(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, contents: str, precision: str
) -> None:
    sounds = [
        refine(worker, clip, latents, prompt, contents=contents, precision=precision, backend=backend, allow_disk=True)[
            0
        ].latents.audio
        for backend in ("vram", "ram", "disk")
    ]
    assert torch.equal(sounds[0], sounds[1])
    assert torch.equal(sounds[0], sounds[2])


def test_adapters_are_those_of_the_request_at_the_registrys_strength(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, fresh: torch.Tensor
) -> None:
    made = {}
    for strength in (None, 0.5, 1.0):
        spec = dataclasses.replace(SPEC, adapters=(AdapterChoice("extra", strength),))
        refined, told = refine(worker, clip, latents, prompt, spec=spec)
        made[strength] = refined.latents.audio
        assert told.plan.spec.adapters == (AdapterChoice("extra", strength or 0.5),)
    assert torch.equal(made[None], made[0.5])
    assert not torch.equal(made[1.0], made[0.5])
    assert not torch.equal(made[0.5], fresh)
    raven = dataclasses.replace(SPEC, adapters=(AdapterChoice("raven"),))
    assert not torch.equal(refine(worker, clip, latents, prompt, spec=raven)[0].latents.audio, fresh)


def tensor_bytes() -> int:
    gc.collect()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor))


def stores(worker: DitWorker) -> list[RecordStore]:
    """Those that are not freed."""
    return [store for store in MADE[worker] if not store._is_freed]


def test_nothing_is_left_of_calls_that_were_cancelled_failed_or_done(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, tmp_path: Path
) -> None:
    refine(worker, clip, latents, prompt)
    before = tensor_bytes()
    for index in range(20):
        cancel(worker, clip, latents, prompt, after=1 + index % 3)
        assert stores(worker) == []
    head = worker._model.transformer.audio_proj_out
    broken = head.register_forward_hook(lambda module, args, out: out.fill_(torch.nan))
    with pytest.raises(PhaseError, match="not finite"):
        refine(worker, clip, latents, prompt, backend="disk", allow_disk=True)
    broken.remove()
    refine(worker, clip, latents, prompt, backend="disk", allow_disk=True)
    assert stores(worker) == []
    assert list((tmp_path / "caches").iterdir()) == []
    assert tensor_bytes() == before


def test_a_shared_cache_serves_the_same_refinement_again_and_says_so(
    worker: DitWorker,
    clip: ClipSpec,
    latents: ChunkLatents,
    prompt: Branch,
    fresh: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, _ = refine(worker, clip, latents, prompt, shared=True)
    assert torch.equal(first.latents.audio, fresh)
    moved = Branch(prompt.context.clone(), prompt.token_tags.clone())
    with caplog.at_level(logging.INFO):
        warm, told = refine(
            worker, clip, ChunkLatents(latents.video.clone(), latents.audio.clone()), moved, shared=True
        )
    assert told.modes == ["cached"] * 3
    assert (first.is_warm, warm.is_warm) == (False, True)
    assert "; warm" in caplog.text
    assert not torch.equal(warm.latents.audio, fresh)
    own, told = refine(worker, clip, latents, prompt)
    assert torch.equal(own.latents.audio, fresh)
    assert told.modes == ["build", "cached", "cached"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latents": 12}, VIDEO_CHANGED),
        ({"spec": dataclasses.replace(SPEC, seed=4)}, VIDEO_CHANGED),  # its noise is fed with the video
        ({"spec": dataclasses.replace(SPEC, audio_denoise=0.6)}, CONDITIONING_CHANGED),
        ({"spec": dataclasses.replace(SPEC, adapters=(AdapterChoice("extra"),))}, CONDITIONING_CHANGED),
        ({"branch": "negative"}, CONDITIONING_CHANGED),
        ({"precision": "fp8"}, "no cache yet"),
        ({"contents": "kv"}, "no cache yet"),
        ({"text": "kept"}, "no cache yet"),
        ({"backend": "disk", "allow_disk": True}, "no cache yet"),
    ],
)
def test_a_shared_cache_of_other_content_is_built_anew_and_says_why(
    worker: DitWorker,
    clip: ClipSpec,
    latents: ChunkLatents,
    prompt: Branch,
    negative: Branch,
    change: dict[str, Any],
    reason: str,
) -> None:
    refine(worker, clip, latents, prompt, shared=True)
    change = dict(change)
    if "latents" in change:
        latents = random_latents(clip, change.pop("latents"))
    branch = negative if change.pop("branch", "") else prompt
    spec = change.pop("spec", SPEC)
    refined, told = refine(worker, clip, latents, branch, spec=spec, shared=True, **change)
    assert told.modes == ["build", "cached", "cached"]
    assert told.reasons[0] == reason
    assert not refined.is_warm
    own, _ = refine(worker, clip, latents, branch, spec=spec, **change)
    assert torch.equal(refined.latents.audio, own.latents.audio)


def test_a_shared_cache_that_was_refreshed_on_the_way_is_not_kept(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    _, told = refine(worker, clip, latents, prompt, shared=True, refresh_interval=1)
    assert told.reasons == ["no cache yet", "", "refresh_interval reached"]
    assert len(worker._rooms.shared) == 0


def test_a_refresh_interval_is_that_of_the_refinement_which_a_shared_cache_serves(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    for _ in range(2):
        refine(worker, clip, latents, prompt, shared=True)
    warm, told = refine(worker, clip, latents, prompt, shared=True, refresh_interval=2)
    assert told.modes == ["cached", "cached", "build"]  # those of the refinements before do not count
    assert told.reasons[2] == "refresh_interval reached"
    assert warm.is_warm


def test_a_refresh_interval_counts_a_first_step_at_the_noise_level_where_the_one_before_ended(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    single = dataclasses.replace(SPEC, steps=1, audio_denoise=0.25)
    refine(worker, clip, latents, prompt, spec=single, shared=True)
    longer = dataclasses.replace(single, steps=4)  # begins where that one began, and ended
    _, told = refine(worker, clip, latents, prompt, spec=longer, shared=True, refresh_interval=1)
    assert told.modes == ["cached", "build", "cached", "build"]


def test_a_shared_cache_that_cannot_be_read_is_built_anew_and_the_refinement_not_warm(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, tmp_path: Path
) -> None:
    on_disk = {"shared": True, "backend": "disk", "allow_disk": True}
    refine(worker, clip, latents, prompt, **on_disk)
    (payload,) = tmp_path.glob("caches/*/0.payload")
    os.truncate(payload, 0)
    refined, told = refine(worker, clip, latents, prompt, **on_disk)
    assert told.modes == ["build", "cached", "cached"]
    assert not refined.is_warm


@pytest.mark.parametrize("is_guided", [False, True])
def test_a_shared_cache_on_disk_is_nothing_to_a_refinement_that_may_not_use_the_disk(
    worker: DitWorker,
    clip: ClipSpec,
    latents: ChunkLatents,
    prompt: Branch,
    negative: Branch,
    tmp_path: Path,
    is_guided: bool,
) -> None:
    refine(worker, clip, latents, prompt, shared=True, backend="disk", allow_disk=True)
    spec = dataclasses.replace(SPEC, cfg=3.0, negative_prompt="noise") if is_guided else SPEC
    branches = (prompt, negative) if is_guided else (prompt,)
    refined, told = refine(worker, clip, latents, *branches, spec=spec, shared=True)
    assert (told.plan.backend, told.modes) == ("ram", ["build", "cached", "cached"])
    assert told.reports[0].num_blocks["build"] == len(branches) * LAYERS
    assert list((tmp_path / "caches").iterdir()) == []
    assert not refined.is_warm


def test_both_branches_have_their_caches_in_one_place(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, negative: Branch, tmp_path: Path
) -> None:
    guided = dataclasses.replace(SPEC, cfg=3.0, negative_prompt="noise")
    refine(worker, clip, latents, prompt, negative, spec=guided, shared=True, backend="disk", allow_disk=True)
    refine(worker, clip, latents, prompt, shared=True)
    assert len(worker._rooms.shared) == 2
    refined, told = refine(worker, clip, latents, prompt, negative, spec=guided, shared=True, allow_disk=True)
    assert told.plan.backend == "ram"
    assert told.reports[0].num_blocks == {"exact": 0, "build": LAYERS, "cached": LAYERS}
    assert refined.is_warm
    assert list((tmp_path / "caches").iterdir()) == []


def test_both_branches_of_guidance_have_caches_of_their_own(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, negative: Branch
) -> None:
    spec = dataclasses.replace(SPEC, cfg=3.0, negative_prompt="noise")
    guided, told = refine(worker, clip, latents, prompt, negative, spec=spec, shared=True)
    assert told.plan.cache_bytes == 2 * CACHE_BYTES
    assert [report.num_forwards for report in told.reports] == [2] * 3
    assert told.modes == ["build", "cached", "cached"]
    assert told.reports[0].num_blocks == {"exact": 0, "build": 2 * LAYERS, "cached": 0}
    warm, told = refine(worker, clip, latents, prompt, negative, spec=spec, shared=True)
    assert told.modes == ["cached"] * 3
    assert warm.is_warm
    unguided, told = refine(worker, clip, latents, prompt, shared=True)
    assert told.modes == ["cached"] * 3  # the prompt's alone
    assert not torch.equal(unguided.latents.audio, guided.latents.audio)


def test_shared_caches_make_room_before_anything_fails(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    refine(worker, clip, latents, prompt, shared=True)
    shared = worker._rooms.shared
    give_room(worker, 4)
    worker._rooms._available_host = lambda: (4 if len(shared) else 100) * GIB
    _, told = refine(worker, clip, latents, prompt)
    assert told.plan.backend == "ram"
    assert len(shared) == 0


def test_shared_caches_leave_the_device_with_the_phase_and_end_with_the_worker(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, tmp_path: Path
) -> None:
    refine(worker, clip, latents, prompt, shared=True)
    other = dataclasses.replace(clip, num_frames=39)
    refine(worker, other, random_latents(other, 1), prompt, shared=True, backend="disk", allow_disk=True)
    assert [store.stats.num_device_bytes for store in stores(worker)] == [0, 0]
    assert len(list((tmp_path / "caches").glob(f"{scratch.PREFIX}*"))) == 1
    worker.weights.leave()
    worker.weights.enter()
    for spec_clip, spec_latents, backend in ((clip, latents, "ram"), (other, random_latents(other, 1), "disk")):
        _, told = refine(worker, spec_clip, spec_latents, prompt, shared=True, allow_disk=True)
        assert (told.modes, told.plan.backend) == (["cached"] * 3, backend)
    worker.close()
    assert stores(worker) == []
    assert list((tmp_path / "caches").iterdir()) == []


def test_no_more_is_shared_than_the_settings_allow(
    model_directory: Path, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    worker = make_worker(model_directory, shared_cache_bytes=CACHE_BYTES - 1)
    for _ in range(2):
        _, told = refine(worker, clip, latents, prompt, shared=True)
        assert told.modes == ["build", "cached", "cached"]
    assert stores(worker) == []


class Failing:
    """A new_store that runs out of memory some times before it makes one."""

    def __init__(self, worker: DitWorker, times: int, error: Exception) -> None:
        self._make, self.left, self.error = worker._rooms.new_store, times, error
        worker._rooms.new_store = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self.error
        return self._make(*args)


ERRORS: list[Exception] = [torch.OutOfMemoryError("tried to allocate 1 GiB"), DeviceMemoryError("the disk is full")]


@pytest.mark.parametrize("error", ERRORS)
def test_a_build_that_finds_no_memory_is_tried_again_without_the_shared_caches(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, fresh: torch.Tensor, error: Exception
) -> None:
    other = dataclasses.replace(clip, num_frames=39)
    refine(worker, other, random_latents(other, 1), prompt, shared=True)
    Failing(worker, 1, error)
    refined, told = refine(worker, clip, latents, prompt)
    assert torch.equal(refined.latents.audio, fresh)
    assert told.modes == ["build", "cached", "cached"]
    assert len(worker._rooms.shared) == 0


@pytest.mark.parametrize("error", ERRORS)
def test_a_build_that_never_finds_memory_fails_or_gives_the_cache_up(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, error: Exception
) -> None:
    failing = Failing(worker, 100, error)
    with pytest.raises(DeviceMemoryError, match=r"the disk is full|1 GiB.*no_pinned_caches"):
        refine(worker, clip, latents, prompt)
    assert failing.left == 98
    exact, _ = refine(worker, clip, latents, prompt, enabled=False)
    refined, told = refine(worker, clip, latents, prompt, on_no_room="exact")
    assert told.modes == ["exact"] * 3
    assert all(str(error) in reason for reason in told.reasons)
    assert torch.equal(refined.latents.audio, exact.latents.audio)
    assert stores(worker) == []


def test_the_exact_result_is_made_of_the_same_noise_and_compared(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, fresh: torch.Tensor
) -> None:
    spec = dataclasses.replace(SPEC, compare=True)
    refined, told = refine(worker, clip, latents, prompt, spec=spec)
    exact, _ = refine(worker, clip, latents, prompt, enabled=False)
    assert torch.equal(refined.latents.audio, fresh)
    assert torch.equal(refined.exact_audio, exact.latents.audio)
    distance = (fresh - exact.latents.audio).double().norm() / exact.latents.audio.double().norm()
    assert refined.against_exact == pytest.approx(distance.item())
    assert 0 < refined.against_exact < 0.1
    assert refined.exact_sampling_s > 0
    assert len(told.reports) == 3
    same, _ = refine(worker, clip, latents, prompt, spec=spec, enabled=False)
    assert torch.equal(same.exact_audio, same.latents.audio)
    assert (same.against_exact, same.exact_sampling_s) == (0, same.sampling_s)


def test_a_range_of_the_sound_leaves_the_rest_of_it(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    spec = dataclasses.replace(SPEC, audio_range=TimeRange(0.25, 0.5))
    refined, told = refine(worker, clip, latents, prompt, spec=spec)
    assert told.modes == ["build", "cached", "cached"]
    moved = (refined.latents.audio - latents.audio).abs().amax(dim=(0, 1, 2))
    assert moved[10:20].min() > 1e-2
    assert torch.cat((moved[:10], moved[20:])).max() < 1e-5


def styled(name: str) -> RefineSpec:
    return dataclasses.replace(SPEC, adapters=(AdapterChoice(name),))


def spoilt(latents: ChunkLatents, name: str) -> ChunkLatents:
    changed = getattr(latents, name).clone()
    changed.view(-1)[3] = torch.nan
    return dataclasses.replace(latents, **{name: changed})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case | {"latents": spoilt(case["latents"], "audio")}, "'audio' holds 1 values"),
        (lambda case: case | {"latents": spoilt(case["latents"], "video")}, "'video' holds 1 values"),
        (lambda case: case | {"spec": styled("ghost")}, "no adapter 'ghost'"),
        (lambda case: case | {"spec": dataclasses.replace(SPEC, steps=0)}, "spec.steps is 0"),
        (lambda case: case | {"spec": dataclasses.replace(SPEC, sampler="euler_ancestral")}, "spec.sampler"),
        (lambda case: case | {"clip": dataclasses.replace(case["clip"], num_frames=23)}, "num_frames"),
        (
            lambda case: case | {"prompt": Branch(case["prompt"].context, case["prompt"].token_tags + 2)},
            "token_tags holds",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_refined_is_refused_before_anything_runs(
    worker: DitWorker,
    clip: ClipSpec,
    latents: ChunkLatents,
    prompt: Branch,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    message: str,
) -> None:
    case = change({"clip": clip, "latents": latents, "prompt": prompt, "spec": SPEC})
    with pytest.raises(InvalidRequestError, match=message):
        refine(worker, case["clip"], case["latents"], case["prompt"], spec=case["spec"])


def test_without_the_weights_on_the_device_nothing_is_refined(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch
) -> None:
    worker.weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        refine(worker, clip, latents, prompt)


def test_builds_and_frees_are_logged(
    worker: DitWorker, clip: ClipSpec, latents: ChunkLatents, prompt: Branch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="services.dit.refine"):
        refine(worker, clip, latents, prompt, backend="disk", allow_disk=True, refresh_interval=1)
    planned, *rest = [record.message for record in caplog.records if record.levelno == logging.INFO]
    for part in (
        f"hidden, int4, text live; {FROZEN} of {TEXT + AUDIO + VIDEO} rows frozen, {LAYERS} blocks",
        f"in disk, all written by every build: {CACHE_BYTES} bytes, since disk was asked for",
        "of device memory beside it",
    ):
        assert part in planned
    first, second, freed = rest
    assert first.startswith(f"frozen cache built in step 1 (no cache yet): {CACHE_BYTES} bytes in disk; before,")
    assert second.startswith("frozen cache built in step 3 (refresh_interval reached)")
    assert "resident" in first
    assert "in disk freed: before," in freed
    assert len([record for record in caplog.records if record.levelno == logging.DEBUG]) == 3


def test_a_worker_that_starts_sweeps_what_others_have_left(model_directory: Path, tmp_path: Path) -> None:
    orphan, foreign = tmp_path / f"{scratch.PREFIX}{2**22 + 1}-7-left", tmp_path / "mine"
    orphan.mkdir()
    foreign.mkdir()
    make_worker(model_directory, frozen_caches=tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_bound_below_nothing_is_refused(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="shared_cache_bytes is -1; it must be 0 or more"):
        DitConfig(model_directory, shared_cache_bytes=-1)
