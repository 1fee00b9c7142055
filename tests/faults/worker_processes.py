"""Workers as processes of their own on the golden vectors' small models, for tests that do them harm."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from core.geometry import chunk_latent_shapes, chunk_table
from core.latents_file import latent_shapes
from h3stream.codec import clip_spec_to_proto, refine_spec_to_proto
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec
from h3stream.v1 import workers_pb2
from services.common.tensors import to_parts
from services.common.token import TOKEN_VARIABLE
from tests import raven_vectors, vae_model

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef-of-the-tests"
CLIP = ClipSpec(22, 64, 32, 2, 12.0, 3.0, 1, 1, "gpu", 7)
DENSE = dataclasses.replace(CLIP, mode="dense", sink=0, window=None)
TEXT = {
    "context": torch.randn((5, 64), generator=torch.Generator().manual_seed(5)),
    "token_tags": torch.ones(5, dtype=torch.int64),
}
CHUNKS = chunk_table(CLIP.num_frames)


class WorkerAtWork:
    """One worker, asked with bytes."""

    def __init__(self, name: str, directory: Path, *flags: str) -> None:
        """name: "text_encoder", "dit" or "vae".  directory: for its socket and its log."""
        self.name = name
        self.log = directory / f"{name}.log"
        self.address = f"unix:{directory}/{name}.sock"
        command = [
            sys.executable,
            "-m",
            f"services.{name}",
            "--listen",
            self.address,
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                cwd=ROOT,
                env=os.environ | {TOKEN_VARIABLE: TOKEN},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._channel = grpc.insecure_channel(self.address)

    def wait(self) -> None:
        """Returns once it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"listening on "), self.log.read_text()

    def stop(self) -> int:
        """Ends it in peace; returns its exit status."""
        self._channel.close()
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        """Ends it at once; calls in progress fail."""
        self.process.kill()
        self.process.wait(60)

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def raw(self, method: str, requests: Iterable[bytes], timeout_s: float = 60.0) -> list[bytes]:
        """The answers to a method of its own service, of whatever kind, as bytes. Raises grpc.RpcError."""
        call = self._channel.stream_stream(f"/{service_of(self.name)}/{method}")
        return list(call(iter(requests), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=timeout_s))

    def ask(self, method: str, *requests: Any, service: str = "") -> list[Any]:
        """The answers to messages."""
        descriptor = methods(service or service_of(self.name))[method]
        call = self._channel.stream_stream(
            f"/{descriptor.containing_service.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(workers_pb2, descriptor.output_type.name).FromString,
        )
        return list(call(iter(requests), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60.0))

    def enter(self) -> None:
        self.ask("EnterPhase", workers_pb2.EnterPhaseRequest(), service="h3stream.v1.WorkerService")

    def session_ids(self) -> set[str]:
        """Open sessions."""
        (described,) = self.ask("Describe", workers_pb2.DescribeRequest(), service="h3stream.v1.WorkerService")
        return set(described.session_ids)


def service_of(worker: str) -> str:
    return {
        "text_encoder": "h3stream.v1.TextEncoderService",
        "dit": "h3stream.v1.DitService",
        "vae": "h3stream.v1.VaeService",
    }[worker]


def methods(service: str) -> dict[str, Any]:
    """Descriptors of a service's methods by name."""
    descriptor = workers_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    return {method.name: method for method in descriptor.methods}


def start_dit(model: Path, directory: Path) -> WorkerAtWork:
    return WorkerAtWork("dit", directory, "--model", str(model))


def start_vae(model: Path, directory: Path, artifacts: Path) -> WorkerAtWork:
    return WorkerAtWork("vae", directory, "--model", str(model), "--artifact-root", str(artifacts))


def write_models(directory: Path) -> None:
    """A model directory for the DiT worker and the VAE worker."""
    raven_vectors.write_model_directory(directory)
    vae_model.write_model_directory(directory)


def stream(cls: Any, header: Any, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """A header and the parts of tensors, as the messages of a call."""
    parts = [part for name, tensor in tensors.items() for part in to_parts(name, tensor)]
    return [cls(header=header), *(cls(tensor=part) for part in parts)]


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def opening(session_id: str, clip: ClipSpec = CLIP) -> list[Any]:
    header = workers_pb2.DitSessionHeader(session_id=session_id, clip=clip_spec_to_proto(clip))
    return stream(workers_pb2.DitServiceOpenSessionRequest, header, TEXT)


def restoring(session_id: str, index: int) -> list[Any]:
    header = workers_pb2.RestoreChunkHeader(session_id=session_id, chunk_index=index)
    return stream(workers_pb2.RestoreChunkRequest, header, chunk(index))


def decoding(session_id: str, index: int) -> list[Any]:
    header = workers_pb2.DecodeChunkHeader(session_id=session_id, chunk_index=index)
    return stream(workers_pb2.DecodeChunkRequest, header, chunk(index))


def refining() -> list[Any]:
    spec = refine_spec_to_proto(RefineSpec(steps=1, seed=3))
    header = workers_pb2.DitRefineHeader(clip=clip_spec_to_proto(DENSE), spec=spec)
    return stream(workers_pb2.DitServiceRefineAudioRequest, header, random(latent_shapes(DENSE)) | TEXT)


def decoding_sound(directory: Path) -> list[Any]:
    header = workers_pb2.DecodeAudioHeader(
        clip=clip_spec_to_proto(CLIP), artifact_directory=str(directory), artifacts=["refined.flac"]
    )
    sound = latent_shapes(CLIP)["audio"]
    return stream(workers_pb2.DecodeAudioRequest, header, random({"audio": sound, "audio_before": sound}))


def chunk(index: int) -> dict[str, torch.Tensor]:
    """Latents of a chunk."""
    return random(chunk_latent_shapes(CHUNKS[index], CLIP.width, CLIP.height))


def vae_opening(session_id: str, directory: Path) -> Any:
    return workers_pb2.VaeServiceOpenSessionRequest(
        session_id=session_id,
        clip=clip_spec_to_proto(CLIP),
        artifact_directory=str(directory),
        artifacts=["stream.mp4", "final.mp4", "frames.mkv", "audio.flac", "latents.safetensors"],
    )


def sampled_clip(dit: WorkerAtWork, session_id: str) -> bytes:
    """The latents of a whole clip."""
    dit.enter()
    dit.ask("OpenSession", *opening(session_id))
    made = []
    for index in range(len(CHUNKS)):
        request = workers_pb2.SampleChunkRequest(session_id=session_id, chunk_index=index)
        made += [a.tensor.data for a in dit.ask("SampleChunk", request) if a.WhichOneof("payload") == "tensor"]
        if index < len(CHUNKS) - 1:
            dit.ask("CommitChunk", workers_pb2.CommitChunkRequest(session_id=session_id, chunk_index=index))
    dit.ask("CloseSession", workers_pb2.DitServiceCloseSessionRequest(session_id=session_id))
    return b"".join(made)


def decoded_chunks(vae: WorkerAtWork, session_id: str, indices: Iterable[int]) -> Iterator[bytes]:
    """The media that chunks give."""
    for index in indices:
        for answer in vae.ask("DecodeChunk", *decoding(session_id, index)):
            yield getattr(answer, answer.WhichOneof("payload")).data


def decoded_clip(vae: WorkerAtWork, session_id: str, directory: Path) -> dict[str, bytes]:
    """The stream of a whole clip and its artifacts, by name."""
    vae.enter()
    vae.ask("OpenSession", vae_opening(session_id, directory))
    media = b"".join(decoded_chunks(vae, session_id, range(len(CHUNKS))))
    (finished,) = vae.ask("Finish", workers_pb2.FinishRequest(session_id=session_id))
    assert (len(finished.artifacts), list(finished.failures)) == (5, [])
    vae.ask("CloseSession", workers_pb2.VaeServiceCloseSessionRequest(session_id=session_id))
    return {"": media} | {path.name: path.read_bytes() for path in directory.iterdir()}
