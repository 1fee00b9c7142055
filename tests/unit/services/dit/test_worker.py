from __future__ import annotations

import dataclasses
import gc
import hashlib
import weakref
from pathlib import Path

import pytest
import torch

from h3stream.adapters import AdapterUse
from h3stream.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    InvalidRequestError,
    OverloadedError,
    UnsupportedError,
)
from h3stream.request import ClipSpec
from services.common.config import AdapterSource
from services.common.ledger import read_ledger
from services.common.sessions import MAX_SESSIONS
from services.common.verbs import VerbCancelled
from services.dit.config import DitConfig
from services.dit.noise import NoiseSegment
from services.dit.rows import ChunkLatents
from services.dit.worker import DitWorker
from tests.adapter_files import named, official_pairs, write
from tests.raven_vectors import FIXTURES


def never() -> bool:
    return False


def always() -> bool:
    return True


def ignore(step: int, num_steps: int) -> None:
    pass


@pytest.fixture
def session(worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor) -> DitWorker:
    worker.open_session("s", clip, context, token_tags, never)
    return worker


def test_weights_digests_and_the_device_are_described(worker: DitWorker) -> None:
    assert worker.weight_digests.keys() == {
        "dit/diffusion_pytorch_model.safetensors",
        "adapters/raven",
    }
    transformer_bytes = sum(p.nbytes for p in worker._model.transformer.parameters())
    adapter_bytes = sum(p.nbytes for p in worker._adapters.parameters())
    rope_bytes = 16 * 4
    assert worker.weights.device_bytes == transformer_bytes + adapter_bytes + rope_bytes


EXTRA = AdapterSource("extra", FIXTURES / "lora_extra.safetensors", 0.5)


def test_adapters_of_the_settings_stand_beside_the_folders(model_directory: Path) -> None:
    worker = DitWorker(DitConfig(model_directory, device="cpu", adapters=(EXTRA,)))
    extra, raven = worker.adapters
    assert (extra.name, extra.format, extra.num_bound_modules, extra.default_strength) == ("extra", "comfyui", 20, 0.5)
    assert (raven.name, raven.is_streaming, raven.num_bound_modules) == ("raven", True, 31)
    assert raven.sha256 == hashlib.sha256((FIXTURES / "lora_raven.safetensors").read_bytes()).hexdigest()
    assert worker.weight_digests.keys() >= {"adapters/extra", "adapters/raven"}


def test_a_further_adapter_changes_a_streaming_clip_and_only_that_clip(
    model_directory: Path, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    worker = DitWorker(DitConfig(model_directory, device="cpu", compute_dtype="float32", adapters=(EXTRA,)))
    worker.weights.enter()
    sampled = []
    for session_id, uses in (("plain", ()), ("styled", (AdapterUse("extra", 0.5),)), ("again", ())):
        worker.open_session(session_id, dataclasses.replace(clip, adapters=uses), context, token_tags, never)
        sampled.append(worker.sample_chunk(session_id, 0, ignore, never).video)
    assert torch.equal(sampled[0], sampled[2])
    assert (sampled[0] - sampled[1]).abs().max() > 1e-3


def test_an_adapter_that_is_not_there_is_refused_before_anything_runs(
    worker: DitWorker, clip: ClipSpec, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    worker.weights.leave()
    for plain, name, message in (
        (clip, "ghost", "there is no adapter 'ghost'; there are raven"),
        (dense_clip, "ghost", "there is no adapter 'ghost'; there are raven"),
        (clip, "raven", "raven is always on in a streaming clip and must not be listed"),
    ):
        asked = dataclasses.replace(plain, adapters=(AdapterUse(name, 1.0),))
        with pytest.raises(InvalidRequestError, match=message):
            worker.open_session("s", asked, context, token_tags, never)
    assert worker.session_ids() == []


def test_without_the_streaming_adapter_there_are_dense_clips_only(
    model_directory: Path, clip: ClipSpec, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    worker = DitWorker(DitConfig(dit=model_directory / "transformer", device="cpu", adapters=(EXTRA,)))
    worker.weights.enter()
    with pytest.raises(UnsupportedError, match="no streaming adapter, so only dense clips can be made"):
        worker.open_session("s", clip, context, token_tags, never)
    styled = dataclasses.replace(dense_clip, adapters=(AdapterUse("extra", 1.0),))
    worker.open_session("s", styled, context, token_tags, never)


def test_a_device_that_does_not_exist_is_refused_before_any_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        DitWorker(DitConfig(tmp_path, device="gpu"))


def test_an_adapter_that_does_not_fit_is_refused_before_the_weights_are_read(
    model_directory: Path, tmp_path: Path
) -> None:
    pairs = official_pairs()
    pairs["blocks.3.mlp.fc2"] = pairs["blocks.2.mlp.fc2"]
    source = AdapterSource("style", write(tmp_path / "style.safetensors", named(pairs, "diffusion_model.")))
    with pytest.raises(CheckpointError, match=r"31 of 32 modules match; .*: blocks\.3\.mlp\.fc2"):
        DitWorker(DitConfig(model_directory, device="cpu", adapters=(source,)))
    config = DitConfig(model_directory, device="cpu", adapters=(source,), allow_partial_adapters=True)
    style, _ = DitWorker(config).adapters
    assert (style.num_bound_modules, style.num_modules) == (31, 32)


def test_an_adapter_for_the_other_weights_is_refused(model_directory: Path, tmp_path: Path) -> None:
    dit = tmp_path / "minimax_h3_fl2va_tiny"
    dit.symlink_to(model_directory / "transformer")
    path = write(tmp_path / "style_ref2va.safetensors", named(official_pairs(), "diffusion_model."))
    config = DitConfig(dit=dit, device="cpu", adapters=(AdapterSource("style", path),))
    with pytest.raises(CheckpointError, match="was trained on the ref2va DiT, and the one that is loaded is fl2va"):
        DitWorker(config)


def test_a_chunk_is_sampled_once_and_sent_as_often_as_asked(session: DitWorker) -> None:
    steps: list[tuple[int, int]] = []
    first = session.sample_chunk("s", 0, lambda done, total: steps.append((done, total)), never)
    assert steps == [(1, 2), (2, 2)]
    assert first.video.shape == (1, 24, 5, 2, 4)
    assert first.audio.shape == (1, 32, 2, 29)
    again = session.sample_chunk("s", 0, lambda done, total: steps.append((done, total)), never)
    assert len(steps) == 2
    assert torch.equal(again.video, first.video)
    session.commit_chunk("s", 0, never)
    assert torch.equal(session.sample_chunk("s", 0, ignore, never).audio, first.audio)


def test_a_commit_repeated_changes_nothing(session: DitWorker) -> None:
    session.sample_chunk("s", 0, ignore, never)
    first = session.commit_chunk("s", 0, never)
    assert (first.num_committed, first.retained, first.retained_rows) == (2, (0, 1), 5 + 2 * 29 + 5 * 2)
    assert session.commit_chunk("s", 0, never) == first
    stats = session.close_session("s")
    assert stats is not None
    assert (stats.num_noise_forwards, stats.num_clean_forwards) == (2, 1)


def test_repeated_calls_need_no_weights_and_new_ones_do(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    first = session.sample_chunk("s", 0, ignore, never)
    session.commit_chunk("s", 0, never)
    session.weights.leave()
    assert torch.equal(session.sample_chunk("s", 0, ignore, never).video, first.video)
    assert session.commit_chunk("s", 0, never).num_committed == 2
    session.open_session("s", clip, context, token_tags, never)
    for call in (
        lambda: session.sample_chunk("s", 1, ignore, never),
        lambda: session.open_session("t", clip, context, token_tags, never),
    ):
        with pytest.raises(UnsupportedError, match="enter the phase first"):
            call()
    session.weights.enter()
    session.sample_chunk("s", 1, ignore, never)
    session.weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        session.commit_chunk("s", 1, never)


def test_leaving_the_phase_between_calls_changes_no_bit(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    session.open_session("through", clip, context, token_tags, never)
    for index in range(5):
        for name in ("s", "through"):
            if name == "s":
                session.weights.leave()
                session.weights.enter()
            session.sample_chunk(name, index, ignore, never)
        ours, theirs = (session.sample_chunk(name, index, ignore, never) for name in ("s", "through"))
        assert torch.equal(ours.video, theirs.video)
        assert torch.equal(ours.audio, theirs.audio)
        if index < 4:
            session.commit_chunk("s", index, never)
            session.commit_chunk("through", index, never)


def test_opening_again_with_the_same_clip_changes_nothing_and_with_another_is_refused(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    session.sample_chunk("s", 0, ignore, never)
    session.commit_chunk("s", 0, never)
    assert session.open_session("s", clip, context, token_tags, never).num_committed == 2
    with pytest.raises(InvalidRequestError, match="open with another clip"):
        session.open_session("s", dataclasses.replace(clip, seed=9), context, token_tags, never)
    assert session.session_ids() == ["s"]


SEEDS = (NoiseSegment(0, 7), NoiseSegment(2, 8))


def test_an_open_session_keeps_its_noise(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    def opened(name: str, *noise: NoiseSegment) -> None:
        worker.open_session(name, clip, context, token_tags, never, noise)

    opened("own")
    opened("own", NoiseSegment(0, clip.seed))  # says the same
    opened("two", *SEEDS)
    opened("two", *SEEDS)
    for name, noise in (("own", SEEDS), ("own", (NoiseSegment(0, 8),)), ("two", ()), ("two", SEEDS[:1])):
        with pytest.raises(InvalidRequestError, match=f"session '{name}' is open with another noise"):
            opened(name, *noise)


@pytest.mark.parametrize(
    ("first_chunks", "message"),
    [
        ((1,), "noise begins with chunk 1; its first segment must be from chunk 0"),
        ((-1, 0), "noise begins with chunk -1"),
        ((0, 0), "a segment from chunk 0 behind one from chunk 0; they must ascend"),
        ((0, 3, 2), "a segment from chunk 2 behind one from chunk 3"),
        ((0, 5), "a segment from chunk 5 behind one from chunk 0; they must ascend up to the last chunk, 4"),
    ],
)
def test_noise_that_does_not_fit_the_clip_is_refused(
    worker: DitWorker,
    clip: ClipSpec,
    context: torch.Tensor,
    token_tags: torch.Tensor,
    first_chunks: tuple[int, ...],
    message: str,
) -> None:
    noise = [NoiseSegment(first_chunk, 1) for first_chunk in first_chunks]
    with pytest.raises(InvalidRequestError, match=message):
        worker.open_session("s", clip, context, token_tags, never, noise)
    assert worker.session_ids() == []


def test_a_dense_clip_has_one_seed(
    worker: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(InvalidRequestError, match="a dense clip is sampled at once, from its own seed"):
        worker.open_session("d", dense_clip, context, token_tags, never, SEEDS)
    worker.open_session("d", dense_clip, context, token_tags, never, [NoiseSegment(0, dense_clip.seed)])
    latents = ChunkLatents(torch.zeros(1, 24, 5, 2, 4), torch.zeros(1, 32, 2, 29))
    with pytest.raises(UnsupportedError, match="'d' has a dense clip, which has no KV cache: nothing to restore"):
        worker.restore_chunk("d", 0, latents)


def test_a_lost_session_is_taken_up_by_another_worker_without_a_phase_for_what_is_restored(
    session: DitWorker, model_directory: Path, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    sampled = []
    for index in range(3):
        sampled.append(session.sample_chunk("s", index, ignore, never))
        session.commit_chunk("s", index, never)
    expected = session.sample_chunk("s", 3, ignore, never)

    other = DitWorker(DitConfig(model_directory, device="cpu", compute_dtype="float32"))
    other.weights.enter()
    other.open_session("s", clip, context, token_tags, never)
    for index, latents in enumerate(sampled):
        other.weights.leave()
        other.restore_chunk("s", index, latents)
        other.restore_chunk("s", index, latents)
        assert torch.equal(other.sample_chunk("s", index, ignore, never).video, latents.video)
        other.weights.enter()
        other.commit_chunk("s", index, never)
    found = other.sample_chunk("s", 3, ignore, never)
    assert torch.equal(found.video, expected.video)
    assert torch.equal(found.audio, expected.audio)
    stats = other.close_session("s")
    assert stats is not None
    assert (stats.num_noise_forwards, stats.num_clean_forwards) == (2, 3)


def test_latents_that_cannot_be_a_chunks_are_refused_and_cost_nothing(session: DitWorker) -> None:
    right = ChunkLatents(torch.zeros(1, 24, 5, 2, 4), torch.zeros(1, 32, 2, 29))
    nan = ChunkLatents(right.video, torch.full_like(right.audio, torch.nan))
    infinite = ChunkLatents(torch.full_like(right.video, torch.inf), right.audio)
    for latents, message in (
        (ChunkLatents(right.video[:, :, :4], right.audio), "the latents of chunk 0 have shapes"),
        (nan, "tensor 'audio' holds 1856 values that are not finite"),
        (infinite, "tensor 'video' holds 960 values that are not finite"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            session.restore_chunk("s", 0, latents)
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        session.restore_chunk("ghost", 0, right)
    session.restore_chunk("s", 0, right)


def test_only_so_many_sessions_are_open_at_a_time(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    for number in range(MAX_SESSIONS):
        worker.open_session(str(number), clip, context, token_tags, never)
    with pytest.raises(OverloadedError, match="16 sessions are open"):
        worker.open_session("more", clip, context, token_tags, never)
    worker.open_session("0", clip, context, token_tags, never)
    worker.close_session("0")
    worker.open_session("more", clip, context, token_tags, never)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_frames": 40}, "num_frames"),
        ({"width": 33}, "width"),
        ({"steps": 0}, "steps"),
        ({"audio_shift": 0.0}, "audio_shift"),
        ({"sink": 0}, "sink"),
        ({"window": -1}, "window"),
    ],
)
def test_a_clip_that_cannot_be_made_is_refused_before_anything_runs(
    worker: DitWorker,
    clip: ClipSpec,
    context: torch.Tensor,
    token_tags: torch.Tensor,
    change: dict[str, int],
    field: str,
) -> None:
    worker.weights.leave()
    with pytest.raises(InvalidRequestError) as raised:
        worker.open_session("s", dataclasses.replace(clip, **change), context, token_tags, never)
    assert [violation.field for violation in raised.value.violations] == [field]
    assert worker.session_ids() == []


def test_tags_must_fit_the_tokens(worker: DitWorker, clip: ClipSpec, context: torch.Tensor) -> None:
    with pytest.raises(InvalidRequestError, match="context has 5 tokens and token_tags 4"):
        worker.open_session("s", clip, context, torch.ones(4, dtype=torch.int64), never)
    with pytest.raises(InvalidRequestError, match="tensor 'context' holds 320 values that are not finite"):
        worker.open_session("s", clip, context * torch.nan, torch.ones(5, dtype=torch.int64), never)
    with pytest.raises(InvalidRequestError, match=r"token_tags holds \[-1, 3\]; allowed are \[0, 1, 2\]"):
        worker.open_session("s", clip, context, torch.tensor([1, 3, -1, 0, 2]), never)


def test_cancelled_calls_leave_the_session_usable(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(VerbCancelled):
        session.open_session("late", clip, context, token_tags, always)
    assert session.session_ids() == ["s"]
    with pytest.raises(VerbCancelled):
        session.sample_chunk("s", 0, ignore, always)
    session.sample_chunk("s", 0, ignore, never)
    with pytest.raises(VerbCancelled):
        session.commit_chunk("s", 0, always)
    assert session.commit_chunk("s", 0, never).num_committed == 2
    assert session.close_session("s") is not None


def test_a_session_needs_a_name(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    for session_id, message in (("", "session_id is empty"), ("s" * 129, "129 characters; at most 128 are taken")):
        with pytest.raises(InvalidRequestError, match=message):
            worker.open_session(session_id, clip, context, token_tags, never)
    assert worker.session_ids() == []


def test_calls_without_a_session_are_refused_and_closing_one_is_not(worker: DitWorker) -> None:
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        worker.sample_chunk("ghost", 0, ignore, never)
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        worker.commit_chunk("ghost", 0, never)
    assert worker.close_session("ghost") is None


def test_running_out_of_device_memory_is_a_typed_error_and_the_session_survives(session: DitWorker) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = session._model.transformer.transformer_blocks[1].norm2.register_forward_pre_hook(fail)
    with pytest.raises(DeviceMemoryError, match="while sampling chunk 0"):
        session.sample_chunk("s", 0, ignore, never)
    hook.remove()
    session.sample_chunk("s", 0, ignore, never)


def test_phases_are_recorded_in_the_ledger(model_directory: Path, tmp_path: Path) -> None:
    worker = DitWorker(DitConfig(model_directory, device="cpu", ledger=tmp_path / "ledger"))
    worker.weights.enter()
    worker.weights.leave()
    entries = read_ledger(tmp_path / "ledger")
    assert [(entry.worker, entry.event) for entry in entries] == [("dit", "enter"), ("dit", "leave")]
    assert entries[0].device_weight_bytes == worker.weights.host_bytes


@pytest.fixture
def dense(worker: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor) -> DitWorker:
    assert worker.open_session("d", dense_clip, context, token_tags, never) is None  # no KV cache
    return worker


def test_a_dense_clip_is_sampled_once_and_its_chunks_need_no_weights(dense: DitWorker) -> None:
    steps: list[tuple[int, int]] = []
    dense.sample_dense("d", lambda done, total: steps.append((done, total)), never)
    assert steps == [(1, 3), (2, 3), (3, 3)]
    dense.weights.leave()
    dense.sample_dense("d", lambda done, total: steps.append((done, total)), never)
    assert len(steps) == 3
    chunks = [dense.sample_chunk("d", index, ignore, never) for index in (3, 0, 3)]
    assert torch.equal(chunks[0].video, chunks[2].video)
    assert chunks[1].audio.shape == (1, 32, 2, 29)
    stats = dense.close_session("d")
    assert stats is not None
    assert (stats.num_noise_forwards, stats.num_clean_forwards, stats.kv) == (3, 0, None)


def test_dense_and_streaming_sessions_refuse_each_others_calls(dense: DitWorker, clip: ClipSpec) -> None:
    with pytest.raises(UnsupportedError, match="chunk 0 is not there yet: sample the dense clip first"):
        dense.sample_chunk("d", 0, ignore, never)
    with pytest.raises(UnsupportedError, match="'d' has a dense clip, which has no KV cache: nothing to restore"):
        dense.commit_chunk("d", 0, never)
    dense.open_session("s", clip, torch.randn(5, 64), torch.ones(5, dtype=torch.int64), never)
    with pytest.raises(UnsupportedError, match="session 's' streams its clip: sample it chunk by chunk"):
        dense.sample_dense("s", ignore, never)
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        dense.sample_dense("ghost", ignore, never)


def test_a_dense_session_opens_twice_with_the_same_clip_only(
    dense: DitWorker, dense_clip: ClipSpec, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    dense.sample_dense("d", ignore, never)
    assert dense.open_session("d", dense_clip, context, token_tags, never) is None
    dense.sample_chunk("d", 0, ignore, never)
    for other in (clip, dataclasses.replace(dense_clip, seed=9)):
        with pytest.raises(InvalidRequestError, match="open with another clip"):
            dense.open_session("d", other, context, token_tags, never)


def test_a_dense_clip_with_a_cache_is_refused(
    worker: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        worker.open_session("d", dataclasses.replace(dense_clip, sink=2, window=2), context, token_tags, never)
    assert [violation.field for violation in raised.value.violations] == ["sink", "window"]


def test_a_dense_clip_uses_the_adapters_it_names_and_no_other(
    worker: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    videos = []
    for session_id, strength in (("none", None), ("half", 0.5), ("whole", 1.0), ("again", 0.5)):
        uses = () if strength is None else (AdapterUse("raven", strength),)
        worker.open_session(session_id, dataclasses.replace(dense_clip, adapters=uses), context, token_tags, never)
        worker.sample_dense(session_id, ignore, never)
        videos.append(worker.sample_chunk(session_id, 0, ignore, never).video)
    none, half, whole, again = videos
    assert torch.equal(half, again)
    assert not torch.equal(none, half)
    assert not torch.equal(half, whole)


def test_sampling_a_dense_clip_needs_the_weights_and_survives_without_them(dense: DitWorker) -> None:
    dense.weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        dense.sample_dense("d", ignore, never)
    dense.weights.enter()
    with pytest.raises(VerbCancelled):
        dense.sample_dense("d", ignore, always)
    dense.sample_dense("d", ignore, never)


def test_running_out_of_memory_in_a_dense_clip_is_a_typed_error_and_the_session_survives(
    dense: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    transformer = dense._model.transformer
    hook = transformer.transformer_blocks[1].norm2.register_forward_pre_hook(fail)
    with pytest.raises(DeviceMemoryError, match="while sampling a dense clip"):
        dense.sample_dense("d", ignore, never)
    hook.remove()
    dense.sample_dense("d", ignore, never)
    hook = transformer.token_refiner.final_norm.register_forward_pre_hook(fail)
    with pytest.raises(DeviceMemoryError, match=r"while opening a session of about \d+ bytes"):
        dense.open_session("e", dense_clip, context, token_tags, never)
    hook.remove()
    assert dense.session_ids() == ["d"]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_closing_a_dense_session_frees_what_it_held(dense: DitWorker, is_sampled: bool) -> None:
    if is_sampled:
        dense.sample_dense("d", ignore, never)
    session = weakref.ref(dense._sessions["d"])
    assert dense.close_session("d") is not None
    gc.collect()
    assert session() is None
    assert dense.close_session("d") is None
