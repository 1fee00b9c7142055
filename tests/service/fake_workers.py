"""Three small workers that behave: real gRPC servers on unix sockets, real residency, made-up latents and media.

Each can be told to fail, to wait or to die at a named point, so that tests decide what happens and when.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc import aio
from safetensors.torch import save
from torch import nn

from core.artifacts import COMPARISON, LATENTS, REFINED_ARTIFACTS, SOUND, WORKER_ARTIFACTS
from core.clock import TICKS_PER_FRAME, emission_table
from core.geometry import chunk_table, num_samples
from core.latents_file import FORMAT, SHIFTS, latent_shapes
from core.phases import Worker
from h3stream.codec import clip_spec_from_proto
from h3stream.errors import PhaseError, StartupError, UnsupportedError
from h3stream.job import AdapterInfo, ModelPart
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.authentication import TokenInterceptor
from services.common.ledger import ResidencyLedger
from services.common.preview_map import PreviewMap
from services.common.residency import DeviceWeights
from services.common.rpc import RpcServer
from services.common.tensors import to_parts
from services.common.verbs import VerbRunner
from services.common.worker import ServedWorker, WorkerServicer

ADAPTERS = tuple(
    AdapterInfo(
        name=name, file_name=f"{name}.safetensors", sha256="cd" * 32, format="raven", min_rank=8, max_rank=8,
        min_alpha=8.0, max_alpha=8.0, num_bound_modules=2, num_modules=2, num_parameters=32,
        default_strength=strength, is_streaming=name == "raven", partition="", trained_steps=steps,
        trained_video_shift=12.0, trained_audio_shift=3.0,
    )
    for name, steps, strength in (("turbo", 4, 0.5), ("raven", None, 1.0), ("style", None, 1.0))
)  # fmt: skip
"""What the DiT worker has, the streaming adapter among them."""


@dataclass
class Script:
    """What the workers are told to do at a point named "VERB" or "VERB:INDEX"."""

    errors: dict[str, Exception] = field(default_factory=dict)
    """Points that raise, once each."""
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """Points that wait for their event."""
    full: tuple[str, ...] = ()
    """Artifacts that cannot be written."""
    stream_end: int | None = None
    """Frame beyond which no fragment is made."""
    stream_failure: str = ""
    """Why."""
    encoder: bytes = b""
    """What fragments are marked with: another one makes others."""
    no_encoder: str = ""
    """Why the DiT worker cannot make stills; empty if it can."""
    no_stills_from: int = 99
    """First chunk of which stills fail."""
    refined_stream_failure: str = ""
    """Why the refined rendition ended early."""
    refine_headers: list[workers_pb2.DitRefineHeader] = field(default_factory=list)
    """What was to be refined, in order."""
    refine_inputs: list[dict[str, bytes]] = field(default_factory=list)
    """And the tensors that came with it."""
    decode_headers: list[workers_pb2.DecodeAudioHeader] = field(default_factory=list)
    """Which sounds were to be decoded, in order."""
    decode_inputs: list[dict[str, bytes]] = field(default_factory=list)
    """And the tensors that came with it."""
    calls: list[str] = field(default_factory=list)
    """Points passed, in order."""
    deaths: set[str] = field(default_factory=set)
    """Points at which the worker dies without a word, once each: of the above, or "WORKER.METHOD#N", the arrival of a
    call."""
    arrivals: list[str] = field(default_factory=list)
    """Calls that arrived, in order, by the worker and the method."""
    work: list[str] = field(default_factory=list)
    """What was really done, in order: "sampled:INDEX" (and its latents sent), "cleaned:INDEX" (a clean forward),
    "decoded:INDEX" and so on."""

    async def reach(self, point: str) -> None:
        self.calls.append(point)
        if point in self.errors:
            raise self.errors.pop(point)
        if point in self.gates:
            await self.gates[point].wait()


class FakeWorker:
    def __init__(self, worker: Worker, ledger: Path, script: Script, die: Callable[[], None]) -> None:
        """die: ends this worker as the kernel would, soon."""
        self.name = worker.value
        self.weights = DeviceWeights([nn.Linear(8, 8)], torch.device("cpu"), ResidencyLedger(ledger, worker.value))
        self.weight_digests = {f"{worker.value}/model.safetensors": "00" * 32}
        self.sessions: set[str] = set()
        self.parts = (ModelPart(worker.value, "diffusers", "model.safetensors", "F32", 72, 288),)
        self.adapters = ADAPTERS if worker is Worker.DIT else ()
        self.script = script
        self._die = die

    async def reach(self, point: str) -> None:
        await self.script.reach(point)
        if point in self.script.deaths:
            self.script.deaths.remove(point)
            await self.die()

    async def die(self) -> None:
        self._die()
        await asyncio.Event().wait()

    def session_ids(self) -> list[str]:
        return sorted(self.sessions)


class Arrivals(aio.ServerInterceptor):
    """Notes the calls to a worker, one of which may be its death."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def intercept_service(self, continuation, handler_call_details):
        script = self.worker.script
        name = f"{self.worker.name}.{handler_call_details.method.rpartition('/')[2]}"
        point = f"{name}#{script.arrivals.count(name)}"
        script.arrivals.append(name)
        if point not in script.deaths:
            return await continuation(handler_call_details)
        script.deaths.remove(point)

        async def die(requests, context):
            await self.worker.die()

        return grpc.stream_stream_rpc_method_handler(die)


class FakeTextEncoder(workers_pb2_grpc.TextEncoderServiceServicer):
    def __init__(self, worker: FakeWorker, script: Script) -> None:
        self.worker, self.script = worker, script
        self.cache: set[str] = set()

    async def LookupEmbedding(self, request, context):
        found = request.prompt in self.cache
        yield workers_pb2.LookupEmbeddingResponse(
            header=workers_pb2.EmbeddingHeader(is_cached=found, num_tokens=3 if found else 0)
        )
        if found:
            for part in to_parts("context", torch.ones(3, 4)):
                yield workers_pb2.LookupEmbeddingResponse(tensor=part)

    async def Encode(self, request, context):
        self.worker.weights.require()
        await self.worker.reach("encode")
        self.cache.add(request.prompt)
        self.script.work.append("encoded")
        yield workers_pb2.EncodeResponse(header=workers_pb2.EmbeddingHeader(num_tokens=3))
        for part in to_parts("context", torch.ones(3, 4)):
            yield workers_pb2.EncodeResponse(tensor=part)


@dataclass
class DitSession:
    """A clip in progress."""

    clip: ClipSpec
    noise: tuple[tuple[int, int], ...]
    """Seeds by the first chunk of each."""
    values: list[float] = field(default_factory=list)
    """Of the chunks committed, which the next one's latents depend on."""
    standing: float | None = None
    """Of the chunk sampled last, which has yet to be committed."""
    is_sampled: bool = False
    """Whether a dense clip is there."""

    def value(self, index: int) -> float:
        """What the latents of the next chunk are full of."""
        seed = [seed for first, seed in self.noise if first <= index][-1]
        return float((3 * (self.values[-1] if self.values else 0) + index + seed % 97) % 1009)


class FakeDit(workers_pb2_grpc.DitServiceServicer):
    def __init__(self, worker: FakeWorker, script: Script) -> None:
        self.worker, self.script = worker, script
        self.clips: dict[str, DitSession] = {}
        self.previews: dict[str, types_pb2.PreviewSpec] = {}

    async def OpenSession(self, request_iterator, context):
        await self.worker.reach("open")
        header, tensors = await received(request_iterator)
        assert tensors.keys() == {"context"}
        clip = clip_spec_from_proto(header.clip)
        noise = tuple((segment.first_chunk, segment.seed) for segment in header.noise) or ((0, clip.seed),)
        session = self.clips.get(header.session_id)
        if session is None:
            self.worker.weights.require()
            session = self.clips[header.session_id] = DitSession(clip, noise)
            self.worker.sessions.add(header.session_id)
            self.script.work.append("prefilled")
        assert (session.clip, session.noise) == (clip, noise)
        response = workers_pb2.DitServiceOpenSessionResponse(
            kv_storage=header.clip.kv_storage, num_committed_chunks=len(session.values)
        )
        if header.HasField("preview"):
            assert len(header.preview_map.weights) == 72
            response.preview_unavailable_reason = self.script.no_encoder
            if not self.script.no_encoder:
                self.previews[header.session_id] = header.preview
        return response

    def stills(self, session_id: str, chunk_index: int, step: int, num_steps: int) -> list[types_pb2.Preview]:
        """The still behind a step, if there is one."""
        spec = self.previews.get(session_id)
        if spec is None or chunk_index >= self.script.no_stills_from or (step % spec.every_steps and step < num_steps):
            return []
        return [
            types_pb2.Preview(
                data=b"still", media_type="image/jpeg", width=spec.max_side, height=1, chunk_index=chunk_index,
                step=step, num_steps=num_steps,
            )
        ]  # fmt: skip

    async def SampleChunk(self, request, context):
        session, index = self.clips[request.session_id], request.chunk_index
        if session.clip.mode == "dense":
            await self.worker.reach(f"slice:{index}")
            if not session.is_sampled:
                raise UnsupportedError("sample the clip first")
            value = dense_values(session)[index]
        else:
            if index != len(session.values):
                raise UnsupportedError(f"chunk {index} cannot be sampled: the next one is {len(session.values)}")
            is_new = session.standing is None
            if is_new:
                async for response in self.sample(request.session_id, index):
                    yield response
                session.standing = session.value(index)
            value = session.standing
        await self.worker.reach(f"latents:{index}")
        parts = latent_parts(value)
        yield workers_pb2.SampleChunkResponse(tensor=parts[0])
        await self.worker.reach(f"half:{index}")
        yield workers_pb2.SampleChunkResponse(tensor=parts[1])
        if session.clip.mode != "dense" and is_new:
            self.script.work.append(f"sampled:{index}")

    async def sample(self, session_id: str, index: int):
        """The forwards of a chunk."""
        self.worker.weights.require()
        steps = self.clips[session_id].clip.steps
        for step in range(1, steps + 1):
            await self.worker.reach(f"sample:{index}.{step}")
            yield workers_pb2.SampleChunkResponse(step=workers_pb2.StepDone(step=step, num_steps=steps))
            for still in self.stills(session_id, index, step, steps):
                yield workers_pb2.SampleChunkResponse(preview=still)

    async def RestoreChunk(self, request_iterator, context):
        header, tensors = await received(request_iterator)
        session, index = self.clips[header.session_id], header.chunk_index
        await self.worker.reach(f"restore:{index}")
        if index != len(session.values):
            raise UnsupportedError(f"chunk {index} cannot be restored: the next one is {len(session.values)}")
        value = torch.frombuffer(bytearray(tensors["video"]), dtype=torch.float32)[0].item()
        assert b"".join(part.data for part in latent_parts(value)) == tensors["video"] + tensors["audio"]
        assert session.standing in (None, value)
        session.standing = value
        self.script.work.append(f"restored:{index}")
        return workers_pb2.RestoreChunkResponse()

    async def SampleDense(self, request, context):
        session = self.clips[request.session_id]
        if session.is_sampled:
            return
        self.worker.weights.require()
        steps = session.clip.steps
        for step in range(1, steps + 1):
            await self.worker.reach(f"dense:{step}")
            yield workers_pb2.SampleDenseResponse(step=workers_pb2.StepDone(step=step, num_steps=steps))
            for still in self.stills(request.session_id, -1, step, steps):
                yield workers_pb2.SampleDenseResponse(preview=still)
        session.is_sampled = True
        self.script.work.append("sampled")

    async def CommitChunk(self, request, context):
        self.worker.weights.require()
        session, index = self.clips[request.session_id], request.chunk_index
        await self.worker.reach(f"commit:{index}")
        if session.standing is None or index != len(session.values):
            raise UnsupportedError(f"chunk {index} cannot be committed: {len(session.values)} are")
        session.values.append(session.standing)
        session.standing = None
        self.script.work.append(f"cleaned:{index}")
        return workers_pb2.CommitChunkResponse(num_committed=index + 2)

    async def RefineAudio(self, request_iterator, context):
        self.worker.weights.require()
        header, tensors = await received(request_iterator)
        self.script.refine_headers.append(header)
        self.script.refine_inputs.append(tensors)
        assert not self.worker.sessions, "the clip's session is still there"
        clip, spec = clip_spec_from_proto(header.clip), header.spec
        shapes = latent_shapes(clip)
        assert tensors.keys() == {*shapes, "context", *(["negative_context"] if spec.cfg != 1 else [])}
        for name, shape in shapes.items():
            assert len(tensors[name]) == math.prod(shape) * 4
        await self.worker.reach("refine:0")
        message = workers_pb2.DitServiceRefineAudioResponse
        yield message(
            started=types_pb2.RefineStarted(
                spec=spec, num_rows=111, num_live_rows=83, num_blocks=3, has_cache=True, reason="there is room",
                backend=types_pb2.CACHE_BACKEND_RAM, cache_bytes=1000, transient_bytes=2000,
            )
        )  # fmt: skip
        for step in range(1, spec.steps + 1):
            await self.worker.reach(f"refine:{step}")
            mode = "build" if step == 1 else "cached"
            self.script.work.append(f"refined:{step}")
            yield message(progress=types_pb2.RefineProgress(step=step, num_steps=spec.steps, mode=mode))
        yield message(
            summary=workers_pb2.RefineSummary(change=0.25, against_exact=0.125, sampling_s=2, exact_sampling_s=6)
        )
        await self.worker.reach("refined")
        for name, like, is_wanted in (
            ("audio", "audio", True),
            ("video", "video", spec.video_denoise > 0),
            ("exact_audio", "audio", spec.compare),
        ):
            if is_wanted:
                made = refined_values(tensors[like], shapes[like], spec.seed)
                for part in to_parts(name, made):
                    yield message(tensor=part)

    async def CloseSession(self, request, context):
        await self.worker.reach("close")
        was_open = request.session_id in self.worker.sessions
        self.worker.sessions.discard(request.session_id)
        self.clips.pop(request.session_id, None)
        return workers_pb2.DitServiceCloseSessionResponse(was_open=was_open)


@dataclass
class VaeSession:
    """A clip in progress."""

    clip: ClipSpec
    directory: Path
    """Where artifacts go."""
    artifacts: Sequence[str]
    """Which."""
    num_decoded: int = 0
    num_fragments: int = 0
    last_answer: list[workers_pb2.DecodeChunkResponse] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)
    """Of all latents, which every fragment and the sound depend on."""


class FakeVae(workers_pb2_grpc.VaeServiceServicer):
    def __init__(self, worker: FakeWorker, script: Script) -> None:
        self.worker, self.script = worker, script
        self.clips: dict[str, VaeSession] = {}

    async def OpenSession(self, request, context):
        await self.worker.reach("open_vae")
        asked = clip_spec_from_proto(request.clip), Path(request.artifact_directory), list(request.artifacts)
        session = self.clips.setdefault(request.session_id, VaeSession(*asked))
        assert (session.clip, session.directory, session.artifacts) == asked
        self.worker.sessions.add(request.session_id)
        failure = self.script.stream_failure if self.script.stream_end == 0 else ""
        return workers_pb2.VaeServiceOpenSessionResponse(stream_failure=failure, num_decoded_chunks=session.num_decoded)

    async def DecodeChunk(self, request_iterator, context):
        requests = [r async for r in request_iterator]
        header = requests[0].header
        session, index = self.clips[header.session_id], header.chunk_index
        if index != session.num_decoded - 1:
            if index != session.num_decoded:
                raise UnsupportedError(f"chunk {index} is out of order: next is {session.num_decoded}")
            self.worker.weights.require()
            await self.worker.reach(f"decode:{index}")
            if REFINED_ARTIFACTS.keys() & set(session.artifacts):
                self.check_chunk(session.clip, index, requests[1:])
            session.last_answer = self.decoded(session, index, b"".join(r.tensor.data for r in requests[1:]))
            session.num_decoded += 1
            self.script.work.append(f"decoded:{index}")
        for place, response in enumerate(session.last_answer):
            await self.worker.reach(f"media:{index}.{place}")
            yield response
        await self.worker.reach(f"decoded:{index}")

    def decoded(self, session: VaeSession, index: int, latents: bytes) -> list[workers_pb2.DecodeChunkResponse]:
        """What a chunk completes."""
        session.digest.update(latents)
        clip = session.clip
        emitted = (0, *emission_table(clip.num_frames))
        first, stop = emitted[index], emitted[index + 1]
        end = self.script.stream_end
        if stop == first or (end is not None and stop > end):
            if end is not None and 0 < end == first:
                return [workers_pb2.DecodeChunkResponse(stream_failure=self.script.stream_failure)]
            return []
        answer = []
        if first == 0:
            init = types_pb2.InitSegment(data=b"init", mime_type='video/mp4; codecs="avc1.64000a"')
            answer.append(workers_pb2.DecodeChunkResponse(init_segment=init))
        fragment = types_pb2.Fragment(
            data=b"fragment" + self.script.encoder + latents + session.digest.digest(),
            fragment_index=session.num_fragments,
            chunk_index=index,
            start_ticks=first * TICKS_PER_FRAME,
            duration_ticks=(stop - first) * TICKS_PER_FRAME,
            first_frame=first,
            num_frames=stop - first,
            num_samples_total=num_samples(clip.num_frames) * stop // clip.num_frames,
            is_keyframe=True,
        )
        session.num_fragments += 1
        return [*answer, workers_pb2.DecodeChunkResponse(fragment=fragment)]

    def check_chunk(self, clip, chunk_index, requests):
        """The chunks of a refined clip are cut from whole tensors by the orchestrator."""
        chunk = chunk_table(clip.num_frames)[chunk_index]
        shapes = {r.tensor.name: tuple(r.tensor.shape) for r in requests}
        whole = latent_shapes(clip)
        assert shapes["video"] == (*whole["video"][:2], chunk.num_video_latents, *whole["video"][3:])
        assert shapes["audio"] == (*whole["audio"][:3], chunk.num_audio_latents)

    async def Finish(self, request, context):
        await self.worker.reach("finish")
        session = self.clips[request.session_id]
        clip, directory, names = session.clip, session.directory, session.artifacts
        if session.num_decoded < len(chunk_table(clip.num_frames)):
            raise UnsupportedError(f"{session.num_decoded} chunks are decoded")
        full = [name for name in self.script.full if name in names]
        response = workers_pb2.FinishResponse(
            artifacts=[
                write_artifact(directory, name, clip, session.digest.digest() if name == SOUND else b"")
                for name in names
                if name in MADE and name not in full
            ],
            audio_health=types_pb2.AudioHealth(std=0.1, peak=0.5, normalisation_divisor=1),
            failures=[workers_pb2.ArtifactFailure(name=name, message="the disk is full") for name in full],
        )
        await self.worker.reach("finished")
        return response

    async def DecodeAudio(self, request_iterator, context):
        self.worker.weights.require()
        header, tensors = await received(request_iterator)
        self.script.decode_headers.append(header)
        self.script.decode_inputs.append(tensors)
        clip = clip_spec_from_proto(header.clip)
        await self.worker.reach("decode_audio:0")
        message = workers_pb2.DecodeAudioResponse
        yield message(init_segment=types_pb2.InitSegment(data=b"refined init", mime_type='audio/mp4; codecs="mp4a"'))
        for index in range(2):
            await self.worker.reach(f"decode_audio:{index + 1}")
            half = num_samples(clip.num_frames) // 2
            yield message(
                fragment=types_pb2.Fragment(
                    data=b"sound" + tensors["audio"], fragment_index=index, chunk_index=-1,
                    start_ticks=index * half * 3, duration_ticks=half * 3, num_samples_total=(index + 1) * half,
                    is_keyframe=True,
                )
            )  # fmt: skip
        directory = Path(header.artifact_directory)
        finished = workers_pb2.DecodeAudioFinished(
            stream_failure=self.script.refined_stream_failure,
            audio_health=types_pb2.AudioHealth(std=0.3, peak=0.9, normalisation_divisor=1.5),
            audio_health_before=types_pb2.AudioHealth(std=0.1, peak=0.5, normalisation_divisor=1),
            change=types_pb2.AudioDistance(log_mel_db=3, rms_ratio=1.1),
        )
        if "exact_audio" in tensors:
            finished.against_exact.CopyFrom(types_pb2.AudioDistance(log_mel_db=0.5, rms_ratio=1.01))
        for name in header.artifacts:
            if name in self.script.full:
                finished.failures.add(name=name, message="the disk is full")
            elif name == COMPARISON:
                finished.artifacts.append(write_artifact(directory, name, clip, b""))
            else:
                source = Path(header.latents_file if name == "refined-latents.safetensors" else header.video_file)
                data = source.read_bytes() + tensors["audio"]
                finished.artifacts.append(write_artifact(directory, name, clip, data))
        self.script.work.append("decoded")
        await self.worker.reach("decode_audio:3")
        yield message(finished=finished)

    async def CloseSession(self, request, context):
        await self.worker.reach("close_vae")
        self.clips.pop(request.session_id, None)
        was_open = request.session_id in self.worker.sessions
        self.worker.sessions.discard(request.session_id)
        return workers_pb2.VaeServiceCloseSessionResponse(was_open=was_open)


MADE = WORKER_ARTIFACTS | REFINED_ARTIFACTS


async def received(request_iterator):
    """The header of a call and the bytes of its tensors by their names."""
    requests = [request async for request in request_iterator]
    tensors: dict[str, bytes] = {}
    for request in requests[1:]:
        part = request.tensor
        assert part.offset_bytes == len(tensors.get(part.name, b""))
        tensors[part.name] = tensors.get(part.name, b"") + part.data
    return requests[0].header, tensors


def refined_values(data: bytes, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """What the fake DiT worker makes of a tensor: other values, the same for the same seed."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape) + (seed % 97 + 1)


@cache
def latents_file(clip, seed: int | None = None) -> bytes:
    """A file of latents of a clip, whose values count. The order in its header is another each time it is made."""
    shapes = latent_shapes(clip)
    about = {name: str(getattr(clip, name)) for name in ("num_frames", "width", "height", *SHIFTS)}
    seed = clip.seed if seed is None else seed
    values = {name: torch.arange(math.prod(shape)).reshape(shape) + seed % 97 for name, shape in shapes.items()}
    return save(
        {name: value.to(torch.float32) for name, value in values.items()},
        {"format": FORMAT, **about, "seed": str(seed)},
    )


def latent_parts(value: float) -> list[types_pb2.TensorPart]:
    """The latents of a chunk on the wire, one part each of its video and its audio."""
    shapes = {"video": (1, 24, 2, 2, 2), "audio": (1, 32, 2, 3)}
    return [part for name, shape in shapes.items() for part in to_parts(name, torch.full(shape, value))]


def dense_values(session: DitSession) -> list[float]:
    """What the latents of the chunks of a dense clip are full of: those of a streamed clip of its seed."""
    streamed = DitSession(session.clip, session.noise)
    for chunk in chunk_table(session.clip.num_frames):
        streamed.values.append(streamed.value(chunk.index))
    return streamed.values


def write_artifact(directory: Path, name: str, clip, data: bytes) -> types_pb2.Artifact:
    """Writes a file of some hundred kilobytes, which ends with some data; latents are those of a clip."""
    data = latents_file(clip) if name == LATENTS else name.encode() * 40_000 + data
    (directory / name).write_bytes(data)
    return types_pb2.Artifact(
        name=name,
        relative_path=name,
        media_type=MADE[name],
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


_REGISTER = {
    Worker.TEXT_ENCODER: (FakeTextEncoder, workers_pb2_grpc.add_TextEncoderServiceServicer_to_server),
    Worker.DIT: (FakeDit, workers_pb2_grpc.add_DitServiceServicer_to_server),
    Worker.VAE: (FakeVae, workers_pb2_grpc.add_VaeServiceServicer_to_server),
}


class FakeLaneHost:
    """Hosts the three in this process; `kill` ends one without a word."""

    token = "a-token-of-the-workers"

    def __init__(self, directory: Path, script: Script) -> None:
        self.directory = directory
        self.ledger = directory / "residency.jsonl"
        self.script = script
        self.workers: dict[Worker, FakeWorker] = {}
        self.num_starts = 0
        """Of all three at once."""
        self.restarts: list[Worker] = []
        """Those that were started anew by themselves, in order."""
        self.refusals: list[StartupError] = []
        """What the next starts end with, of one worker or of all."""
        self.preview_map: PreviewMap | None = PreviewMap((0.0,) * 72, (0.5,) * 3)
        """Of the VAE worker, from its next start on."""
        self._servers: dict[Worker, RpcServer] = {}
        self._runners: list[VerbRunner] = []
        self._dying: set[asyncio.Task[None]] = set()

    async def start(self) -> Mapping[Worker, str]:
        if self.refusals:
            raise self.refusals.pop()
        self.num_starts += 1
        return {worker: await self._start(worker) for worker in _REGISTER}

    async def restart(self, worker: Worker) -> str:
        await self.kill(worker)
        if self.refusals:
            raise self.refusals.pop()
        self.restarts.append(worker)
        return await self._start(worker)

    async def _start(self, worker: Worker) -> str:
        service, register = _REGISTER[worker]
        fake = FakeWorker(worker, self.ledger, self.script, lambda: self._dies(worker))
        runner = VerbRunner(worker.value)
        server = RpcServer((), [TokenInterceptor(self.token), Arrivals(fake)])
        preview_map = self.preview_map if worker is Worker.VAE else None
        served = ServedWorker(fake, runner, "", lambda _: None, adapters=fake.adapters, preview_map=preview_map)
        workers_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(served), server.server)
        register(service(fake, self.script), server.server)
        # Known before it starts: who is cancelled in the middle of a start stops what there is.
        self.workers[worker], self._servers[worker] = fake, server
        self._runners.append(runner)
        return await server.start(f"unix:{self.directory}/{len(self._runners)}-{worker.value}.sock")

    def _dies(self, worker: Worker) -> None:
        dying = asyncio.create_task(self.kill(worker))
        self._dying.add(dying)
        dying.add_done_callback(self._dying.discard)

    async def kill(self, worker: Worker) -> None:
        await self._servers[worker].stop(grace_s=0)
        self.workers[worker].weights.leave()  # as the kernel frees the memory and the lock of a dead process

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.stop(grace_s=0)
        for fake in self.workers.values():
            fake.weights.leave()
        for runner in self._runners:
            runner.close()
        self._servers = {}


def broken(message: str = "the kernel is out of order") -> Exception:
    return PhaseError(message)
