"""A refined sound takes as much memory for the longest clip on the largest canvas as for the shortest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.peak_memory import SLACK_BYTES

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from core.latents_file import latent_shapes
from services.vae.artifacts.latents_file import LatentsFile
from services.vae.refined import RefinedDecoder, RefinedSound
from tests.peak_memory import peak_of
from tests.unit.services.vae.harness import make_clip

directory, num_frames = Path(sys.argv[1]), int(sys.argv[2])
clip = make_clip(num_frames, 1376, 768)
source = LatentsFile(directory, clip)  # zeros where nothing is written
source._write(b"\\0", source._audio_start + int(np.prod(latent_shapes(clip)["audio"])) * 4 - 1)


def play(z):
    return SimpleNamespace(sample=z[:, :1].repeat_interleave(800, dim=2))


scale = SimpleNamespace(mean=[0.0] * 32, std=[0.1] * 32)
models = SimpleNamespace(audio=SimpleNamespace(decode=play), audio_statistics=scale)
sounds = [torch.zeros(latent_shapes(clip)["audio"]) for _ in range(3)]
names = {"refined.flac", "refined-latents.safetensors", "refine-compare.png"}
order = RefinedSound(clip, directory, names, None, directory / ".latents.safetensors.part", *sounds)


def decode():
    decoder = RefinedDecoder(models, torch.device("cpu"), order)
    sizes = []
    made = decoder.decode(lambda fragment: sizes.append(len(fragment.data)), lambda: False)
    decoder.close()
    return made, sizes


peak, (made, sizes) = peak_of(decode)
assert (len(made.artifacts), made.failures, made.stream_failure) == (3, [], ""), made
assert len(sizes) == (num_frames - 5) // 17 + 1
print(peak)
"""


def peak(directory: Path, num_frames: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(directory), str(num_frames)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4])
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_memory_does_not_grow_with_the_clip(tmp_path: Path) -> None:
    peaks = {num_frames: peak(tmp_path / str(num_frames), num_frames) for num_frames in (22, 362)}
    assert peaks[362] < peaks[22] + SLACK_BYTES, peaks
    print({num_frames: f"{num_bytes >> 20} MiB" for num_frames, num_bytes in peaks.items()})
