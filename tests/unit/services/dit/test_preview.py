"""Stills: what they show, when they come, and that a clip is the same without them."""

from __future__ import annotations

import dataclasses
import io

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch

from h3stream.errors import InvalidRequestError
from h3stream.request import ClipSpec, PreviewSpec
from services.common.preview_map import PreviewMap
from services.dit import preview
from services.dit.dense import DenseSession
from services.dit.preview import Still, StillMaker, make_still, still_size
from services.dit.worker import DitWorker

CPU = torch.device("cpu")


def first_channels() -> PreviewMap:
    """Red, green and blue are latent channels 0, 1 and 2, around mid-grey."""
    weights = torch.zeros(3, 24)
    weights[range(3), range(3)] = 0.25
    return PreviewMap(tuple(weights.flatten().tolist()), (0.5, 0.5, 0.5))


def decoded(still: Still) -> npt.NDArray[np.uint8]:
    with av.open(io.BytesIO(still.data)) as container:
        (frame,) = container.decode(video=0)
    return frame.to_ndarray(format="rgb24")


def still_of(latent: torch.Tensor, max_side: int) -> Still:
    colours = first_channels()
    weights, bias = torch.tensor(colours.weights).view(3, 24), torch.tensor(colours.bias).view(3, 1, 1)
    return make_still(latent, weights, bias, max_side)


@pytest.mark.parametrize(
    ("latent_height", "latent_width", "max_side", "size"),
    [
        (48, 84, 256, (146, 256)),
        (84, 48, 256, (256, 146)),
        (2, 4, 256, (32, 64)),
        (48, 84, 16, (9, 16)),
        (2, 2064, 256, (1, 256)),
    ],
)
def test_a_still_has_the_canvas_shape_and_never_more_pixels(
    latent_height: int, latent_width: int, max_side: int, size: tuple[int, int]
) -> None:
    assert still_size(latent_height, latent_width, max_side) == size
    still = still_of(torch.zeros(24, latent_height, latent_width), max_side)
    assert (still.height, still.width) == size
    assert decoded(still).shape == (*size, 3)


def test_a_still_shows_the_mapped_colours_where_the_latents_have_them() -> None:
    latent = torch.zeros(24, 4, 4)
    latent[0, :, :2] = 2.0  # left half red at full, right half at none
    latent[0, :, 2:] = -9.0  # clamped
    latent[2, :2] = 1.0
    picture = decoded(still_of(latent, 64)).astype(float)
    assert abs(picture[56:, :8] - (255, 128, 128)).max() < 12
    assert abs(picture[56:, 56:] - (0, 128, 128)).max() < 12
    assert abs(picture[:8, :8] - (255, 128, 191)).max() < 12


def test_latents_are_not_touched_and_what_is_no_number_is_shown_too() -> None:
    latent = torch.randn(24, 3, 5, generator=torch.Generator().manual_seed(0))
    before = latent.clone()
    still = still_of(latent, 64)
    assert torch.equal(latent, before)
    assert still_of(latent, 64) == still
    assert decoded(still_of(torch.full((24, 2, 2), torch.nan), 32)).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("every_steps", "num_steps", "shown"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (9, 4, [4])]
)
def test_stills_come_at_every_so_many_steps_and_at_the_last(every_steps: int, num_steps: int, shown: list[int]) -> None:
    maker = StillMaker(PreviewSpec(16, every_steps), first_channels(), CPU)
    steps = range(1, num_steps + 1)
    assert [step for step in steps if maker.after(step, num_steps, lambda: torch.zeros(24, 1, 1))] == shown


def test_an_encoder_that_is_missing_is_told_once_and_never_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(picture: npt.NDArray[np.uint8]) -> bytes:
        asked.append(picture)
        raise av.codec.codec.UnknownCodecError("mjpeg")

    monkeypatch.setattr(preview, "encode_jpeg", missing)
    maker = StillMaker(PreviewSpec(16, 1), first_channels(), CPU)
    maker.probe()
    assert "mjpeg" in maker.unavailable_reason
    assert maker.after(1, 1, lambda: torch.zeros(24, 1, 1)) is None
    assert len(asked) == 1


def test_a_map_is_whole_and_survives_the_wire() -> None:
    colours = first_channels()
    assert PreviewMap.from_proto(colours.to_proto()) == colours
    with pytest.raises(InvalidRequestError, match=r"\(72, 2\)"):
        PreviewMap(colours.weights, (0.0, 0.0))
    with pytest.raises(InvalidRequestError, match="not finite"):
        PreviewMap(colours.weights, (0.0, float("inf"), 0.0))


Told = list[tuple[int, int, bytes | None]]


def make_clip(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor, spec: PreviewSpec | None
) -> tuple[Told, list[torch.Tensor]]:
    """What was told of steps and stills, in order, and all latents of three chunks."""
    told: Told = []

    def on_step(step: int, num_steps: int) -> None:
        told.append((step, num_steps, None))

    def on_still(still: Still, step: int, num_steps: int) -> None:
        told.append((step, num_steps, still.data))

    worker.open_session("s", clip, context, token_tags, lambda: False)
    if spec is not None:
        assert worker.preview("s", spec, first_channels()) == ""
    latents = []
    if clip.mode == "dense":
        worker.sample_dense("s", on_step, lambda: False, on_still)
    for index in range(3):
        chunk = worker.sample_chunk("s", index, on_step, lambda: False, on_still)
        latents += [chunk.video, chunk.audio]
        if clip.mode != "dense":
            worker.commit_chunk("s", index, lambda: False)
    worker.close_session("s")
    return told, latents


@pytest.mark.parametrize("mode", ["streaming", "dense"])
def test_latents_are_the_same_bits_with_and_without_stills(
    mode: str, worker: DitWorker, clip: ClipSpec, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    chosen = dense_clip if mode == "dense" else dataclasses.replace(clip, steps=3)
    _, without = make_clip(worker, chosen, context, token_tags, None)
    for spec in (PreviewSpec(0, 1), PreviewSpec(256, 1), PreviewSpec(16, 2)):
        told, latents = make_clip(worker, chosen, context, token_tags, spec)
        assert all(torch.equal(one, other) for one, other in zip(latents, without, strict=True))
        stills = [step for step, _, data in told if data is not None]
        expected = [] if spec.max_side == 0 else [1, 2, 3] if spec.every_steps == 1 else [2, 3]
        assert stills == (expected if mode == "dense" else expected * 3)
        behind = [told[i - 1][0] for i, (_, _, data) in enumerate(told) if data is not None]
        assert behind == stills


def test_the_last_still_of_a_chunk_shows_its_final_latents(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    told, latents = make_clip(worker, clip, context, token_tags, PreviewSpec(64, 1))
    last = [data for step, num_steps, data in told if data is not None and step == num_steps]
    assert last == [still_of(video[0, :, 2], 64).data for video in latents[::2]]
    assert told[1][2] is not None  # the first still is there after the first forward of chunk 0


def test_a_dense_estimate_is_the_clean_clip_of_the_velocity(
    worker: DitWorker, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    """Of one step `x0` is the clip itself; of the first of several it is that of the velocity at the same noise."""
    clips = [dataclasses.replace(dense_clip, steps=steps) for steps in (1, 3)]
    estimates: list[torch.Tensor] = []
    for clip in clips:
        worker.open_session("d", clip, context, token_tags, lambda: False)
        session = worker._session("d")
        assert isinstance(session, DenseSession)
        found: list[torch.Tensor] = []
        session.sample(lambda done, s=session, f=found: f.append(s.middle_estimate()), lambda: False)  # type: ignore[misc]
        estimates.append(found[0])
        final = torch.cat([session.chunk(index).video for index in range(5)], 2)
        torch.testing.assert_close(found[-1], final[0, :, final.shape[2] // 2])
        worker.close_session("d")
    torch.testing.assert_close(estimates[0], estimates[1], rtol=1e-3, atol=1e-3)
