"""The incremental video decoder against RAVEN's frames and against the whole-clip decode of the published class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.vae.video_stream import PIXEL_MEAN, PIXEL_STD, VideoStream
from services.vae.weights import VaeModels, load_models
from tests.vae_model import media, video_case, write_model_directory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> VaeModels:
    torch.set_num_threads(1)
    return load_models(write_model_directory(tmp_path_factory.mktemp("model")), torch.float32)


def stream_decode(models: VaeModels, latents: torch.Tensor, pushes: list[int]) -> list[torch.Tensor]:
    """The batches of frames that the pushes yield, then those of the flush."""
    stream = VideoStream(models.video, models.video_statistics, CPU)
    batches = []
    for piece in latents.split(pushes, dim=2):
        batches.extend(stream.push(piece))
    return [*batches, stream.flush()]


@torch.inference_mode()
def whole_decode(models: VaeModels, latents: torch.Tensor) -> torch.Tensor:
    """The published class on the whole clip, with the pixel statistics applied as its pipeline does."""
    dtype = models.video.post_quant_conv.weight.dtype
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (models.video_statistics.mean, models.video_statistics.std)
    )
    raw = models.video.decode(latents.to(dtype) * std.to(dtype) + mean.to(dtype)).sample
    pixel_mean, pixel_std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    return (raw.float() * pixel_std + pixel_mean).clamp(0, 1)


def test_frames_are_those_of_the_reference(models: VaeModels) -> None:
    case = video_case()
    frames = torch.cat(stream_decode(models, case["latents"], [5, 5, 5, 2]), dim=2)
    assert frames.shape == case["frames"].shape
    error = (frames - case["frames"]).abs().max().item()
    print(f"video frames against RAVEN: max abs {error:.2e}")
    assert error <= 2e-5  # the vectors' own tolerance; processes differ by about 3e-7


def test_batches_come_when_the_reference_has_them(models: VaeModels) -> None:
    latents = video_case()["latents"]
    stream = VideoStream(models.video, models.video_statistics, CPU)
    start, first_frame = 0, 0
    for entry in media()["video"]["v1"]["log"]:
        if "push" in entry:
            batches = stream.push(latents[:, :, start : start + entry["push"]])
            start += entry["push"]
        else:
            batches = [stream.flush()]
        expected = [(first, count) for first, count, _, _ in entry["batches"]]
        found = []
        for batch in batches:
            found.append((first_frame, batch.shape[2]))
            first_frame += batch.shape[2]
        assert found == expected, entry


@pytest.mark.parametrize("num_latents", [7, 12, 17, 22])
@pytest.mark.parametrize("size", [(2, 3), (2, 20)], ids=["one tile", "two tiles"])
def test_stream_equals_whole_clip_bit_for_bit(models: VaeModels, num_latents: int, size: tuple[int, int]) -> None:
    latents = torch.randn(1, 24, num_latents, *size, generator=torch.Generator().manual_seed(num_latents))
    frames = torch.cat(stream_decode(models, latents, [5] * (num_latents // 5) + [2]), dim=2)
    assert frames.shape == (1, 3, 17 * (num_latents // 5) + 5, 16 * size[0], 16 * size[1])
    assert torch.equal(frames, whole_decode(models, latents))


def test_the_cut_into_pushes_does_not_matter(models: VaeModels) -> None:
    latents = video_case()["latents"]
    one_by_one = torch.cat(stream_decode(models, latents, [1] * 17), dim=2)
    at_once = torch.cat(stream_decode(models, latents, [17]), dim=2)
    assert torch.equal(one_by_one, at_once)


def test_half_precision_streams_equal_whole_clips_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    models = load_models(write_model_directory(tmp_path), torch.float16)
    latents = torch.randn(1, 24, 12, 1, 1, generator=torch.Generator().manual_seed(1))
    frames = torch.cat(stream_decode(models, latents, [5, 5, 2]), dim=2)
    assert torch.equal(frames, whole_decode(models, latents))


def test_a_stream_holds_no_more_than_its_lookahead_and_overlap(models: VaeModels) -> None:
    stream = VideoStream(models.video, models.video_statistics, CPU)
    for _ in range(6):
        stream.push(torch.zeros(1, 24, 5, 2, 3))
    assert stream._latents is not None
    assert stream._overlap is not None
    assert stream._latents.shape[2] == 5
    assert stream._overlap.shape[2] == 5
    for held in (stream._latents, stream._overlap):
        assert held.untyped_storage().nbytes() == held.nbytes  # not a view of something larger
