"""The whole service against the same work done plainly in one process, on the same model and the same clip.

    python bench/service.py MODEL [--frames 192] [--width 256] [--height 160]

The plain run calls the workers' verbs one after the other with all weights on the device: no Ray, no gRPC, no hand-over
of the device. Prints ratios measured in one run, with their conditions.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from core.geometry import chunk_table
from h3stream import Client, Completed, Fragment
from h3stream.request import ClipSpec
from orchestrator.model_info import read_model_info
from services.common.verbs import Cancelled
from services.dit.config import DitConfig
from services.dit.worker import DitWorker
from services.text_encoder.config import TextEncoderConfig
from services.text_encoder.worker import TextEncoderWorker
from services.vae.config import VaeConfig
from services.vae.worker import ChunkFragment, Media, VaeWorker

PROMPT = "a red fox trots through fresh snow"


@dataclasses.dataclass
class Run:
    total_s: float
    first_fragment_s: float
    digest: str


def never() -> bool:
    return False


def warm_up(clip: ClipSpec) -> ClipSpec:
    """A short clip of the same canvas, made first so that neither side pays for first calls."""
    return dataclasses.replace(clip, num_frames=22)


def run_plainly(model: Path, clip: ClipSpec, cancelled: Cancelled = never) -> Run:
    torch.set_grad_enabled(False)
    text = TextEncoderWorker(TextEncoderConfig(model))
    dit = DitWorker(DitConfig(model))
    vae = VaeWorker(VaeConfig(model))
    for worker in (text, dit, vae):
        worker.weights.enter()
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as artifacts:
        started_s = time.perf_counter()
        first_fragment_s = 0.0
        embedding, _ = text.encode(PROMPT, cancelled)
        dit.open_session("s", clip, embedding.context, embedding.token_tags, cancelled)
        vae.open_session("s", clip, Path(artifacts))
        chunks = chunk_table(clip.num_frames)
        for chunk in chunks:
            latents = dit.sample_chunk("s", chunk.index, lambda *_: None, cancelled)
            media: list[Media] = []
            vae.decode_chunk("s", chunk.index, latents.video, latents.audio, media.append, cancelled)
            for part in media:
                if isinstance(part, ChunkFragment) and not first_fragment_s:
                    first_fragment_s = time.perf_counter() - started_s
                digest.update(part.media.data if isinstance(part, ChunkFragment) else part.data)
            if not chunk.is_tail:
                dit.commit_chunk("s", chunk.index, cancelled)
        vae.finish("s")
        return Run(time.perf_counter() - started_s, first_fragment_s, digest.hexdigest())


def run_service(model: Path, clip: ClipSpec) -> Run:
    command = [sys.executable, "-m", "orchestrator", "--model", str(model), "--listen", "127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as data:
        server = subprocess.Popen(
            [*command, "--data", data], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert server.stdout is not None
        try:
            address = next(line for line in server.stdout if line.startswith("listening on ")).split()[-1]
            digest = hashlib.sha256()
            first_fragment_s = 0.0
            with Client(address) as client:
                for _ in client.generate(PROMPT, **dataclasses.asdict(warm_up(clip))):
                    pass
                started_s = time.perf_counter()
                for event in client.generate(PROMPT, **dataclasses.asdict(clip)):
                    if isinstance(event, Fragment) and not first_fragment_s:
                        first_fragment_s = time.perf_counter() - started_s
                    digest.update(event.media)
                assert isinstance(event, Completed)
                return Run(time.perf_counter() - started_s, first_fragment_s, digest.hexdigest())
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--frames", type=int, default=192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--height", type=int, default=160)
    flags = parser.parse_args()
    clip = dataclasses.replace(
        read_model_info(flags.model).default_clip, num_frames=flags.frames, width=flags.width, height=flags.height
    )
    run_plainly(flags.model, warm_up(clip))
    plain = run_plainly(flags.model, clip)
    service = run_service(flags.model, clip)
    print(f"{flags.frames} frames {flags.width}x{flags.height}, {clip.steps} steps, {os.cpu_count()} cores, "
          f"{platform.machine()}, torch {torch.__version__}")  # fmt: skip
    print(f"same bytes:                       {plain.digest == service.digest}")
    print(f"service / plain, whole clip:      {service.total_s / plain.total_s:.2f}")
    print(f"service / plain, first fragment:  {service.first_fragment_s / plain.first_fragment_s:.2f}")
    print(f"first fragment / whole clip:      {service.first_fragment_s / service.total_s:.2f}")
    print(f"({plain.total_s:.1f} s plain, {service.total_s:.1f} s service, {flags.frames / 24:.1f} s of clip)")


if __name__ == "__main__":
    main()
