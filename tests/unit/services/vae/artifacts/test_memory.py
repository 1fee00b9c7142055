"""Artifacts take as much memory for the longest clip as for the shortest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.peak_memory import SLACK_BYTES

PROGRAM = """
import sys
from pathlib import Path

import numpy as np

from core.geometry import chunk_table, latent_size
from services.vae.artifacts.artifact_set import ArtifactSet
from services.vae.artifacts.final_file import FinalFile
from services.vae.artifacts.latents_file import LatentsFile
from services.vae.artifacts.lossless import FramesFile, SoundFile
from services.vae.artifacts.stream_file import StreamFile
from services.vae.media.boxes import Packet, VideoTrack
from tests.peak_memory import peak_of
from tests.unit.services.vae.harness import make_clip

SIZE = 256
directory, num_frames = Path(sys.argv[1]), int(sys.argv[2])
clip = make_clip(num_frames, SIZE, SIZE)
picture = np.zeros((SIZE, SIZE, 3), np.uint8)
picture[:64] = np.random.default_rng(0).integers(0, 256, (64, SIZE, 3), np.uint8)  # noise alone takes long to encode


def write():
    made = ArtifactSet(directory, {
        "stream.mp4": StreamFile,
        "final.mp4": lambda path: FinalFile(path, VideoTrack(SIZE, SIZE, b"", num_frames)),
        "frames.mkv": lambda path: FramesFile(path, SIZE, SIZE),
        "audio.flac": SoundFile,
        "latents.safetensors": lambda path: LatentsFile(path, clip),
    })
    side = latent_size(SIZE)
    for chunk in chunk_table(num_frames):
        video = np.zeros((1, 24, chunk.num_video_latents, side, side), np.float32)
        made.add_latents(video, np.zeros((1, 32, 2, chunk.num_audio_latents), np.float32))
        made.add_sound(np.zeros((2, chunk.num_audio_latents * 800), np.float32))
        made.add_media(bytes(200_000))
        for _ in range(17):
            made.add_picture(picture)
            made.add_packet(Packet(bytes(100_000), 4000, True))
    return made.finish(1.0), made.failures


peak, (files, failures) = peak_of(write)
assert (len(files), failures) == (5, []), failures
print(peak)
"""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    def peak(num_frames: int) -> int:
        directory = tmp_path_factory.mktemp("artifacts")
        command = [sys.executable, "-c", PROGRAM, str(directory), str(num_frames)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[5])
        assert ended.returncode == 0, ended.stderr
        return int(ended.stdout)

    return {num_frames: peak(num_frames) for num_frames in (22, 362)}


def test_memory_does_not_grow_with_the_clip(peaks: dict[int, int]) -> None:
    assert peaks[362] < peaks[22] + SLACK_BYTES, peaks
    print(f"22 frames: {peaks[22] >> 20} MiB, 362 frames: {peaks[362] >> 20} MiB")
