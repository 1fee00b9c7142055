"""The dense sampler against the H3 vectors, and against diffusers' own pipeline run here.

Tolerances: two right float32 implementations differ by 1.5e-6 on the vectors, which allow 5e-5. On the tiny model our
rounding is diffusers' own, in float32 and in bfloat16, so its clips must be equal; what would differ there is a CPU
without fused multiply-add, whose torch computes another even grid.
"""

import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline, MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep

from core.schedule import dense_sigmas
from h3stream.request import ClipSpec
from services.dit.adaln import distinct, modulation_table
from services.dit.adapters import Adapter, AdapterBank
from services.dit.dense import DenseSampler
from services.dit.model import H3Dit
from services.dit.rows import ChunkLatents, audio_rows, dense_position_ids, rows_to_audio, rows_to_video, video_rows
from tests import h3_vectors
from tools.tiny.transformer import write_transformer

CPU = torch.device("cpu")
TOLERANCE = 5e-5
LATENTS, HEIGHT, WIDTH, TOKENS = 7, 4, 6, 9
"""Of the vectors' dense cases: 22 frames."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def vectors_dit():
    return H3Dit(h3_vectors.dit())


def dense_clip(**values):
    defaults = {"num_frames": 22, "width": 128, "height": 64, "steps": 4, "video_shift": 12.0, "audio_shift": 3.0}
    unused = {"sink": 0, "window": None, "kv_storage": "gpu"}
    return ClipSpec(**{**defaults, "seed": 7, **values}, **unused, mode="dense")


def sampled(transformer, clip, context, tags, bank=None, mix=()):
    sampler = DenseSampler(H3Dit(transformer), bank or AdapterBank(transformer, {}), mix, clip, context, tags, CPU)
    return run(sampler)


def run(sampler):
    for _ in range(sampler.clip.steps):
        sampler.step()
    return sampler.latents


def worst(ours, theirs):
    return max((ours.video - theirs.video).abs().max().item(), (ours.audio - theirs.audio).abs().max().item())


@pytest.mark.parametrize("name", ["t2va", "t2va_clean_end"])
def test_a_forward_agrees_with_the_vectors(name, vectors_dit, capsys):
    case = h3_vectors.case("dit_cases", name)
    tags = case["token_tags"][:TOKENS]
    audio_t, video_t = (case["timestep"][case["timestep_indices"][row]].item() for row in (TOKENS, -1))
    latents = ChunkLatents(
        rows_to_video(case["hidden_states"][0], LATENTS, HEIGHT, WIDTH), rows_to_audio(case["audio_hidden_states"][0])
    )
    velocity = vectors_dit.forward_dense(
        vectors_dit.refine_text(case["encoder_hidden_states"][0], dense=True),
        latents,
        (video_t, audio_t),
        vectors_dit.dense_layout(22, tags, HEIGHT, WIDTH),
        modulation_table(vectors_dit.transformer, [(video_t, audio_t)])[distinct(video_t, audio_t)],
    )
    video = (video_rows(velocity.video) - case["out_video"][0]).abs().max().item()
    audio = (audio_rows(velocity.audio) - case["out_audio"][0]).abs().max().item()
    with capsys.disabled():
        print(f"\n{name}: velocity differs by at most {video:.1e} (video), {audio:.1e} (audio)")
    assert max(video, audio) <= TOLERANCE


def test_positions_are_those_of_the_vectors_and_equal_in_float32():
    expected = h3_vectors.case("dit_cases", "t2va")["position_ids"]
    positions = dense_position_ids(22, TOKENS, HEIGHT, WIDTH)
    assert (positions - expected).abs().max() <= 1e-14  # a running sum there, a product here
    assert torch.equal(positions.float(), expected.float())


@pytest.mark.parametrize("name", ["n5", "n9"])
def test_a_trajectory_agrees_with_the_vectors(name, vectors_dit, capsys):
    case = h3_vectors.case("dit_dense_trajectory", name)
    clip = dense_clip(width=16 * WIDTH, height=16 * HEIGHT, steps=len(case["sigmas_video"]) - 1)
    for stream, shift in (("video", clip.video_shift), ("audio", clip.audio_shift)):
        assert list(dense_sigmas(clip.steps, shift)) == case[f"sigmas_{stream}"].tolist()
    context, tags = case["encoder_hidden_states"][0], torch.ones(TOKENS, dtype=torch.int64)
    sampler = DenseSampler(vectors_dit, AdapterBank(vectors_dit.transformer, {}), (), clip, context, tags, CPU)
    sampler.latents = ChunkLatents(case["noise_video_latent"], rows_to_audio(case["noise_audio_rows"]).contiguous())
    latents = run(sampler)
    expected = ChunkLatents(case["final_video_latent"], case["final_audio_latent"].permute(1, 0, 2)[None])
    difference = worst(latents, expected)
    with capsys.disabled():
        print(f"\n{name}: latents differ by at most {difference:.1e} after {clip.steps} forwards")
    assert difference <= TOLERANCE


class ShortClips(MiniMaxH3ModularPipeline):
    """Diffusers' pipeline for clips shorter than its 5 seconds."""

    min_duration = 0.0


def diffusers_clip(transformer, clip, context, tags):
    """The clip of diffusers' own layout, noise, schedule and denoising blocks."""
    blocks = MiniMaxH3CoreDenoiseStep()
    pipeline = ShortClips(blocks=blocks)
    pipeline.update_components(
        transformer=transformer,
        scheduler=MiniMaxH3Scheduler(shift=clip.video_shift),
        audio_scheduler=MiniMaxH3Scheduler(shift=clip.audio_shift),
    )
    blocks.sub_blocks["denoise"].set_progress_bar_config(disable=True)
    result = pipeline(
        prompt_embeds=context[None],
        text_token_tags=tags,
        num_frames=clip.num_frames,
        width=clip.width,
        height=clip.height,
        num_inference_steps=clip.steps + 1,  # grid points there, forwards here
        generator=torch.Generator().manual_seed(clip.seed),
        output=["latents", "audio_latents"],
    )
    return ChunkLatents(result["latents"], result["audio_latents"].permute(1, 0, 2)[None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_equals_that_of_diffusers_own_pipeline(dtype, tmp_path, capsys):
    transformer = write_transformer(tmp_path, seed=0).requires_grad_(False).eval()
    if dtype == "float32":
        transformer = transformer.float()
    context = torch.randn(9, 128, generator=torch.Generator().manual_seed(3))
    tags = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1])
    differences = []
    for clip in (
        dense_clip(),
        dense_clip(num_frames=39, width=64, height=96, steps=8, seed=8),
        dense_clip(steps=3, video_shift=6.0, audio_shift=2.5, seed=2**63 + 1),
    ):
        theirs = diffusers_clip(transformer, clip, context, tags)
        differences.append(worst(sampled(transformer, clip, context, tags), theirs))
    with capsys.disabled():
        print(f"\ndiffusers' pipeline, {dtype}: latents differ by at most {max(differences):.1e}")
    assert differences == [0, 0, 0]


def test_an_adapter_applies_to_every_module_of_a_dense_clip(capsys):
    base, merged = h3_vectors.dit(), h3_vectors.dit()
    adapter, strength = Adapter(()), 0.5
    draw = torch.Generator().manual_seed(11)
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            num_out, num_in = module.weight.shape
            down, up = (torch.randn(size, generator=draw) * 0.2 for size in ((4, num_in), (num_out, 4)))
            adapter.residuals[name] = (down, up, 0.5)
            merged.get_submodule(name).weight += strength * 0.5 * (up @ down)
    bank = AdapterBank(base, {"one": adapter})
    context, tags = torch.randn(5, 40, generator=draw), torch.ones(5, dtype=torch.int64)
    clip = dense_clip(width=64, height=64, steps=2)
    with_adapter = sampled(base, clip, context, tags, bank, (("one", strength),))
    difference = worst(with_adapter, sampled(merged, clip, context, tags))
    with capsys.disabled():
        print(f"\nresiduals against merged weights, {len(adapter.residuals)} modules: at most {difference:.1e}")
    assert difference <= TOLERANCE
    assert worst(with_adapter, sampled(base, clip, context, tags, bank)) > 0.1
