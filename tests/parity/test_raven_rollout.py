"""The rollout against the RAVEN vectors: every recorded tensor of cases a, b, c and of the adapter variants.

Tolerances: two right float32 implementations differ by 6e-7 relative, so 3e-6 leaves room for other kernels and catches
every mistake of the vectors' table; in bfloat16 two right ones differ by up to 1e-2.
"""

import pytest
import torch

from core.geometry import chunk_table, latent_size, text_positions
from core.schedule import context_timestep, timestep
from services.dit.adapters import AdapterBank
from services.dit.noise import ClipNoise
from services.dit.rows import chunk_position_ids
from services.dit.weights import load_transformer
from tests.raven_vectors import (
    Recording,
    case_clip,
    case_facts,
    extra_adapter,
    raven_adapter,
    relative_l2,
    settings,
    tensors,
    write_transformer,
)

FP32_L2, FP32_MAX = 3e-6, 3e-5
BF16_L2 = 1e-2
CASES = ("a", "b", "c")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("raven") / "transformer"
    write_transformer(path)
    return path


@pytest.fixture(scope="module")
def recordings(directory):
    """Cases by name, run once in float32 without an adapter."""
    done = {}

    def get(case):
        if case not in done:
            transformer = load_transformer(directory, "float32")
            done[case] = Recording(transformer, AdapterBank(transformer, {}), (), case)
        return done[case]

    return get


def fed_timesteps(forward):
    """Video and audio timestep of a listed forward; a clean one has no sigmas."""
    if forward["role"] == "clean":
        return context_timestep(), context_timestep()
    return timestep(forward["video_sigma"]), timestep(forward["audio_sigma"])


def compare(recording, expected, capsys, label):
    """Worst relative L2 and worst difference over all tensors of a file; prints them."""
    assert expected.keys() <= recording.keys()
    worst_l2 = max((relative_l2(recording[key], tensor), key) for key, tensor in expected.items())
    worst_abs = max(((recording[key] - tensor).abs().max().item(), key) for key, tensor in expected.items())
    with capsys.disabled():
        print(
            f"\n{label}: {len(expected)} tensors, relative L2 at most {worst_l2[0]:.2e} ({worst_l2[1]}), "
            f"difference at most {worst_abs[0]:.2e} ({worst_abs[1]})"
        )
    return worst_l2[0], worst_abs[0]


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_tensor_agrees_in_float32(case, recordings, capsys):
    expected = {k: v for k, v in tensors(f"{case}.expected").items() if not k.startswith("positions.")}
    worst_l2, worst_abs = compare(recordings(case).tensors, expected, capsys, f"case {case}, float32")
    assert worst_l2 <= FP32_L2
    assert worst_abs <= FP32_MAX


@pytest.mark.parametrize("case", CASES)
def test_positions_are_exact(case):
    expected = tensors(f"{case}.expected")
    clip = case_clip(case)
    num_tokens = settings()["cases"][case]["request"]["text_len"]
    assert torch.equal(torch.tensor(text_positions(num_tokens), dtype=torch.float64), expected["positions.text"])
    for chunk in chunk_table(clip.num_frames)[:3]:
        positions = chunk_position_ids(chunk, num_tokens, latent_size(clip.height), latent_size(clip.width))
        assert torch.equal(positions, expected[f"positions.chunk{chunk.index}"])


@pytest.mark.parametrize("case", CASES)
def test_draws_from_the_seed_are_exact_and_in_order(case):
    inputs = tensors(f"{case}.inputs")
    clip = case_clip(case)
    noise = ClipNoise(clip, torch.device("cpu"))
    chunks = chunk_table(clip.num_frames)
    for kind, get in (("initial_noise", noise.initial), ("clean_eps", noise.context)):
        parts = [get(chunk) for chunk in chunks]
        assert torch.equal(torch.cat([part.video for part in parts], 2), inputs[f"draw.video_{kind}"])
        assert torch.equal(torch.cat([part.audio for part in parts], 3), inputs[f"draw.audio_{kind}"])
    listed = [(d["chunk"], d["step"]) for d in case_facts(case)["draws"] if d["label"] == "video_step_eps"]
    assert listed == [(chunk.index, step) for chunk in chunks for step in range(clip.steps)]
    for chunk, step in listed:
        eps = noise.step(chunks[chunk])
        assert torch.equal(eps.video, inputs[f"draw.video_step_eps.chunk{chunk}.step{step}"])
        assert torch.equal(eps.audio, inputs[f"draw.audio_step_eps.chunk{chunk}.step{step}"])


@pytest.mark.parametrize("case", CASES)
def test_commits_forwards_and_cache_statistics_agree(case, recordings):
    facts, recording = case_facts(case), recordings(case)
    assert recording.commits == facts["commits"]
    keys = ("chunk", "role", "past_rows", "retained_indices")
    assert recording.model.forwards == [
        {key: forward[key] for key in keys} | {"timesteps": fed_timesteps(forward)} for forward in facts["forwards"]
    ]
    assert recording.rollout.num_noise_forwards == facts["noise_forwards"]
    assert recording.rollout.num_clean_forwards == facts["clean_forwards"]
    stats, expected = recording.rollout.cache.stats(), facts["kv_stats"]
    assert (stats.requested_storage, stats.storage) == (expected["requested_storage"], expected["actual_storage"])
    assert stats.fallback_reason == (expected["pin_fallback_reason"] or "")
    assert stats.num_committed == expected["committed_chunks"]
    assert len(stats.retained) == expected["retained_chunks"]
    assert stats.retained_rows == expected["retained_rows"]
    assert stats.peak_slot_bytes == expected["peak_gpu_slot_bytes"]
    moved = stats.transfers
    assert (moved.host_bytes, moved.peak_host_bytes) == (
        expected["canonical_cpu_bytes"],
        expected["peak_canonical_cpu_bytes"],
    )
    assert (moved.to_device_bytes, moved.to_device_calls) == (expected["h2d_bytes"], expected["h2d_calls"])
    assert (moved.to_host_bytes, moved.to_host_calls) == (expected["d2h_bytes"], expected["d2h_calls"])


def test_bfloat16_agrees(directory, capsys):
    transformer = load_transformer(directory, "bfloat16")
    recording = Recording(transformer, AdapterBank(transformer, {}), (), "a")
    worst_l2, _ = compare(recording.tensors, tensors("a.expected.bf16"), capsys, "case a, bfloat16")
    assert worst_l2 <= BF16_L2


@pytest.mark.parametrize(
    ("variant", "dtype", "extra", "tolerance"),
    [
        ("lora", "float32", False, FP32_L2),
        ("lora_bf16", "bfloat16", False, BF16_L2),
        ("lora_extra", "float32", True, FP32_L2),
    ],
)
def test_adapter_variants_agree(variant, dtype, extra, tolerance, directory, capsys):
    transformer = load_transformer(directory, dtype)
    adapters = {"raven": raven_adapter(transformer)}
    mix = (("raven", settings()["cases"]["a"]["variants"]["lora"]["lora"]["strength"]),)
    if extra:
        adapters["extra"] = extra_adapter(transformer)
        mix = (*mix, ("extra", settings()["cases"]["a"]["variants"]["lora_extra"]["extra_strength"]))
    recording = Recording(transformer, AdapterBank(transformer, adapters), mix, "a")
    worst_l2, _ = compare(recording.tensors, tensors(f"a.expected.{variant}"), capsys, f"case a, {variant}")
    assert worst_l2 <= tolerance
