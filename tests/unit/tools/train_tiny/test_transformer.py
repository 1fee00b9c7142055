from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.geometry import Chunk, chunk_positions, chunk_table, dense_positions, num_audio_latents, num_video_latents
from core.schedule import context_timestep, shifted_sigmas
from h3stream.request import ClipSpec
from services.dit.config import DitConfig
from services.dit.noise import ClipNoise, dense_noise
from services.dit.rollout import renoised
from services.dit.rows import ChunkLatents, audio_rows, video_rows
from services.dit.worker import DitWorker
from tools.train_tiny import training, transformer
from tools.train_tiny.text_encoder import ATTRIBUTES
from tools.train_tiny.training import generator
from tools.train_tiny.transformer import (
    FLOAT32_ISLANDS,
    VIDEO_SHIFT,
    Clips,
    Lesson,
    Segment,
    TinyDit,
    causal_segments,
    lesson,
    train_transformer,
    velocities,
    write,
)

CLIP = ClipSpec(
    num_frames=73,
    width=160,
    height=96,
    steps=1,
    video_shift=12.0,
    audio_shift=3.0,
    sink=2,
    window=1,
    kv_storage="gpu",
    seed=5,
)
DENSE = dataclasses.replace(CLIP, mode="dense", sink=0, window=None, num_frames=39)
NUM_TOKENS = 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dit() -> TinyDit:
    """As training begins, but with an adapter that does something and weights that bf16 holds."""
    model = TinyDit(0)
    random = generator(0, "test")
    with torch.no_grad():
        for up in model.up.values():
            up.copy_(0.05 * torch.randn(up.shape, generator=random))
        for name, parameter in model.base.named_parameters():
            if not name.startswith(FLOAT32_ISLANDS):
                parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.fixture(scope="module")
def worker(dit: TinyDit, tmp_path_factory: pytest.TempPathFactory) -> DitWorker:
    directory = tmp_path_factory.mktemp("model")
    write(directory, dit)
    made = DitWorker(DitConfig(model_directory=directory, device="cpu", compute_dtype="float32"))
    made.weights.enter()
    return made


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randn(NUM_TOKENS, 128, generator=generator(1, "test"))


def never() -> bool:
    return False


def segment(latents: ChunkLatents, time: float, positions: list[tuple[float, float, float]], context: tuple[int, ...]):
    return Segment(
        audio_rows(latents.audio)[None],
        video_rows(latents.video)[None],
        torch.full((1, 2), time),
        torch.tensor(positions, dtype=torch.float64),
        context,
    )


def difference(found: ChunkLatents, start: ChunkLatents, velocity: tuple[Tensor, Tensor]) -> float:
    """Largest difference between a one-step sample and its start and velocity."""
    video = video_rows(found.video) - video_rows(start.video) - velocity[0][0]
    audio = audio_rows(found.audio) - audio_rows(start.audio) - velocity[1][0]
    return max(video.abs().amax().item(), audio.abs().amax().item())


@torch.no_grad()
def test_what_is_trained_to_stream_is_what_the_rollout_runs(dit: TinyDit, worker: DitWorker, text: Tensor) -> None:
    worker.open_session("stream", CLIP, text, torch.ones(NUM_TOKENS, dtype=torch.int64), never)
    noise = ClipNoise(CLIP, CPU)
    chunks = chunk_table(CLIP.num_frames)
    sampled = []
    for chunk in chunks:
        sampled.append(worker.sample_chunk("stream", chunk.index, lambda done, steps: None, never))
        if not chunk.is_tail:
            worker.commit_chunk("stream", chunk.index, never)
    worker.close_session("stream")

    # Noise and finished chunks in the order in which training has them: noise c at 2 c, finished c at 2 c + 1.
    segments = []
    for chunk in chunks:
        kept = sorted({0, *range(max(0, chunk.index - 1), chunk.index)}) if chunk.index else []
        context = tuple(2 * c + 1 for c in kept)
        positions = chunk_positions(chunk, NUM_TOKENS, 6, 10)
        segments.append(segment(noise.initial(chunk), 0.0, positions, context))
        finished = renoised(sampled[chunk.index], noise.context(chunk))
        segments.append(segment(finished, context_timestep(), positions, context))
    found = velocities(
        dit.weights(with_adapter=True),
        text[None],
        torch.full((1,), context_timestep()),
        segments[:-1],
        causal=True,
        dtype=torch.float32,
    )
    for chunk in chunks:
        assert difference(sampled[chunk.index], noise.initial(chunk), found[2 * chunk.index]) < 2e-4


@torch.no_grad()
def test_what_is_trained_dense_is_what_the_dense_sampler_runs_without_the_adapter(
    dit: TinyDit, worker: DitWorker, text: Tensor
) -> None:
    worker.open_session("dense", DENSE, text, torch.ones(NUM_TOKENS, dtype=torch.int64), never)
    worker.sample_dense("dense", lambda done, steps: None, never)
    parts = [
        worker.sample_chunk("dense", chunk.index, lambda done, steps: None, never)
        for chunk in chunk_table(DENSE.num_frames)
    ]
    worker.close_session("dense")
    whole = ChunkLatents(torch.cat([p.video for p in parts], 2), torch.cat([p.audio for p in parts], 3))
    start = dense_noise(DENSE, CPU)
    positions = dense_positions(DENSE.num_frames, NUM_TOKENS, 6, 10)[NUM_TOKENS:]
    (found,) = velocities(
        dit.weights(with_adapter=False),
        text[None],
        torch.zeros(1),
        [segment(start, 0.0, positions, ())],
        causal=False,
        dtype=torch.float32,
    )
    assert difference(whole, start, found) < 2e-4


def random_clips(what: Lesson, random: torch.Generator) -> Clips:
    return Clips(
        torch.randn(1, NUM_TOKENS, 128, generator=random),
        torch.randn(1, 24, num_video_latents(what.num_frames), 6, 10, generator=random),
        torch.randn(1, 32, 2, num_audio_latents(what.num_frames), generator=random),
    )


class RandomLessons:
    def texts(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        states = torch.randn(count, NUM_TOKENS, 128, generator=random)
        return states, torch.stack([(states[:, 0, k] > 0).long() for k in range(len(ATTRIBUTES))], 1)

    def __call__(self, what: Lesson, random: torch.Generator) -> Clips:
        return random_clips(what, random)


def train(directory: Path, work: Path) -> None:
    train_transformer(directory, work, 0, RandomLessons(), CPU, num_text_steps=3, num_steps=3)


def contents(directory: Path) -> list[bytes]:
    names = ("transformer/diffusion_pytorch_model.safetensors", "adapters/raven.safetensors")
    return [(directory / name).read_bytes() for name in names]


def test_a_chunk_learns_from_the_chunks_that_the_cache_would_hold() -> None:
    what = Lesson("causal", 107)
    segments, noisy, _ = causal_segments(random_clips(what, generator(2, "test")), what, generator(3, "test"))
    finished = [i for i in range(len(segments)) if i not in noisy]
    seen = [[finished.index(i) for i in segments[n].context] for n in noisy]
    assert seen == [[], [0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    for n in noisy[:-1]:
        assert segments[n + 1].context == segments[n].context
        assert (segments[n + 1].times == context_timestep()).all()


def test_a_first_chunk_is_learnt_most_at_the_levels_of_the_first_steps() -> None:
    what = Lesson("causal", 22, 1)
    times = torch.cat(
        [causal_segments(random_clips(what, generator(i)), what, generator(i, 1))[0][0].times for i in range(600)]
    )
    share = [
        torch.isclose(times[:, 0], torch.tensor(1 - sigma)).float().mean().item()
        for sigma in shifted_sigmas(4, VIDEO_SHIFT)[:2]
    ]
    assert all(0.2 < each < 0.4 for each in share)


def test_lessons_go_from_first_chunks_to_whole_clips_of_every_kind() -> None:
    first = [lesson(generator(0, i), 0.1) for i in range(50)]
    assert {(what.kind, what.num_chunks) for what in first if what.kind == "causal"} == {("causal", 1)}
    last = [lesson(generator(0, i), 0.9) for i in range(1000)]
    assert {what.kind for what in last} == {"causal", "dense", "sound"}
    whole = [what for what in last if what.kind == "causal" and what.num_chunks > 12]
    assert {what.num_frames for what in whole} >= {22, 39, 73, 192}
    assert {(what.sink, what.window) for what in whole} > {(2, 2), (1, 2), (2, None)}


def test_a_short_lesson_brings_many_scenes() -> None:
    assert Lesson("causal", 192, num_chunks=1).num_clips > 40
    assert Lesson("causal", 192).num_clips == 1
    for what in (Lesson("causal", 39, num_chunks=1), Lesson("causal", 73), Lesson("dense", 22)):
        assert 0.7 < what.num_clips * what.num_rows / 6500 <= 1


@pytest.mark.parametrize("stopped_in", ["text rows", "transformer"])
def test_a_stopped_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_in: str
) -> None:
    monkeypatch.setattr(transformer, "_LENGTHS", (22,))
    monkeypatch.setattr(transformer, "_TEXTS", 4)
    train(tmp_path / "whole", tmp_path / "work")

    monkeypatch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    seeded = transformer.generator

    def stop(seed: int, *names: object) -> torch.Generator:
        if names == (stopped_in, 2):
            raise KeyboardInterrupt
        return seeded(seed, *names)

    monkeypatch.setattr(transformer, "generator", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again", tmp_path / "stopped")
    monkeypatch.setattr(transformer, "generator", seeded)
    train(tmp_path / "again", tmp_path / "stopped")
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


@torch.enable_grad()
def test_a_random_lesson_moves_both_the_base_and_what_the_rollout_adds() -> None:
    model = TinyDit(0)
    for kind, moves_adapter in (("causal", True), ("dense", False)):
        model.zero_grad(set_to_none=True)
        what = Lesson(kind, 22)
        video, audio = transformer.loss_of(model, random_clips(what, generator(4, "test")), what, generator(5, "test"))
        (video + audio).backward()
        assert all(p.grad is not None for n, p in model.base.named_parameters() if n.startswith("transformer_blocks"))
        assert all((up.grad is not None) == moves_adapter for up in model.up.values())


def test_clips_of_a_chunk_are_cut_where_the_rollout_cuts_them() -> None:
    what = Lesson("causal", 39)
    clips = random_clips(what, generator(6, "test"))
    chunk: Chunk = chunk_table(39)[1]
    video, audio = transformer.rows_of(clips, chunk)
    part = ChunkLatents(clips.video, clips.audio).of(chunk)
    assert torch.equal(video[0], video_rows(part.video))
    assert torch.equal(audio[0], audio_rows(part.audio))
