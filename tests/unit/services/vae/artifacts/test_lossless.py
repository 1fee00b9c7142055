"""What comes back from the lossless files is what went in, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from core.geometry import chunk_table, latent_size
from services.vae.artifacts.base import Artifact, ArtifactFile
from services.vae.artifacts.latents_file import LatentsFile
from services.vae.artifacts.lossless import FramesFile, SoundFile
from services.vae.artifacts.stream_file import StreamFile
from tests.unit.services.vae.harness import make_clip

CLIP = make_clip(39, 96, 64)


def pictures() -> npt.NDArray[np.uint8]:
    """Noise of every level, `[F, height, width, 3]`."""
    shape = (CLIP.num_frames, CLIP.height, CLIP.width, 3)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def fill_frames(directory: Path) -> Artifact:
    made = FramesFile(directory, CLIP.width, CLIP.height)
    for picture in pictures():
        made.add_picture(picture)
    return made


SOUND = np.random.default_rng(1).normal(0, 0.4, (2, 5000)).astype(np.float32)
SOUND[:, :6] = [1.0, -1.0, 2.0, -2.0, 2.0**-24, 3 * 2.0**-24]


def fill_sound(directory: Path) -> Artifact:
    made = SoundFile(directory)
    for start, stop in ((0, 0), (0, 800), (800, 4000), (4000, 5000)):
        made.add_sound(SOUND[:, start:stop])
    return made


def fill_latents(directory: Path) -> Artifact:
    made = LatentsFile(directory, dataclasses.replace(CLIP, video_shift=0.1 + 0.2))
    for chunk in chunk_table(CLIP.num_frames):
        made.add_latents(*latents(chunk.video_start, chunk.video_stop, chunk.audio_start, chunk.audio_stop))
    return made


def latents(
    video_start: int, video_stop: int, audio_start: int, audio_stop: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A part of latents in which every number says where it belongs."""
    video = np.arange(24 * 12 * latent_size(CLIP.height) * latent_size(CLIP.width), dtype=np.float32)
    audio = np.arange(32 * 2 * 65, dtype=np.float32)
    shape = (1, 24, 12, latent_size(CLIP.height), latent_size(CLIP.width))
    return video.reshape(shape)[:, :, video_start:video_stop], audio.reshape(1, 32, 2, 65)[..., audio_start:audio_stop]


def fill_stream(directory: Path) -> Artifact:
    made = StreamFile(directory)
    for data in (b"init", b"fragment", b"another"):
        made.add_media(data)
    return made


FILLERS = (fill_frames, fill_sound, fill_latents, fill_stream)


def test_frames_are_the_decoded_ones(tmp_path: Path) -> None:
    fill_frames(tmp_path).finish(1.0)
    with av.open(tmp_path / "frames.mkv") as container:
        (stream,) = container.streams
        assert (stream.codec_context.name, stream.average_rate) == ("ffv1", 24)
        frames = list(container.decode(stream))
        assert [round(frame.time * 24) for frame in frames] == list(range(CLIP.num_frames))
        assert all(frame.key_frame for frame in frames), "every frame can be sought"
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    np.testing.assert_array_equal(found, pictures())


def test_sound_is_rounded_to_24_bits_and_not_normalised(tmp_path: Path) -> None:
    fill_sound(tmp_path).finish(4.0)
    with av.open(tmp_path / "audio.flac") as container:
        (stream,) = container.streams
        assert (stream.rate, stream.channels, stream.codec_context.format.name) == (32_000, 2, "s32")
        found = np.concatenate([frame.to_ndarray().reshape(-1, 2) for frame in container.decode(stream)]).T
    assert found.shape == SOUND.shape
    assert not (found & 0xFF).any(), "24 bits hold it all"
    levels = found >> 8
    assert list(levels[0, :6]) == [2**23 - 1, -(2**23), 2**23 - 1, -(2**23), 0, 2]  # halves go to the even level
    np.testing.assert_array_equal(levels, np.clip(np.rint(SOUND.astype(float) * 2**23), -(2**23), 2**23 - 1))


def test_latents_are_each_in_their_place(tmp_path: Path) -> None:
    fill_latents(tmp_path).finish(1.0)
    video, audio = latents(0, 12, 0, 65)
    with safe_open(tmp_path / "latents.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("video"), video)
        np.testing.assert_array_equal(file.get_tensor("audio"), audio)
        assert file.metadata() == {
            "format": "h3stream-latents-1", "num_frames": "39", "width": "96", "height": "64", "seed": "0",
            "video_shift": "0.30000000000000004", "audio_shift": "3.0",
        }  # fmt: skip


def test_the_stream_is_what_was_sent(tmp_path: Path) -> None:
    fill_stream(tmp_path).finish(1.0)
    assert (tmp_path / "stream.mp4").read_bytes() == b"initfragmentanother"


@pytest.mark.parametrize("fill", FILLERS)
def test_a_file_appears_only_when_it_is_complete(fill: Callable[[Path], Artifact], tmp_path: Path) -> None:
    made = fill(tmp_path / "new" / "directory")
    assert all(path.name.startswith(".") for path in (tmp_path / "new" / "directory").iterdir())
    file = made.finish(1.0)
    assert [path.name for path in (tmp_path / "new" / "directory").iterdir()] == [file.name]
    data = (tmp_path / "new" / "directory" / file.name).read_bytes()
    assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("fill", FILLERS)
def test_discarding_leaves_nothing(fill: Callable[[Path], Artifact], tmp_path: Path) -> None:
    made = fill(tmp_path)
    made.discard()
    made.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fill", FILLERS)
def test_the_same_clip_gives_the_same_file(fill: Callable[[Path], Artifact], tmp_path: Path) -> None:
    files: list[ArtifactFile] = [fill(tmp_path / name).finish(1.0) for name in "ab"]
    assert files[0] == files[1]
