"""What a worker still computes for a caller who has gone: the forward that was running, and nothing else.

The forward is held until the worker knows that its caller has gone, so the count of those that follow is exact however
slow the machine is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.geometry import chunk_latent_shapes, chunk_table
from core.latents_file import latent_shapes
from h3stream.codec import clip_spec_to_proto, refine_spec_to_proto
from h3stream.refine import FrozenCacheSpec, RefineSpec
from h3stream.request import ClipSpec
from h3stream.v1 import workers_pb2, workers_pb2_grpc
from services.common.process import WorkerProcess
from services.common.rpc import connect
from services.common.tensors import to_parts
from services.common.verbs import Cancelled, VerbRunner
from services.dit.config import DitConfig
from services.text_encoder.config import TextEncoderConfig
from services.vae.config import VaeConfig
from services.vae.media.encoders import H264Encoder
from tests import raven_vectors, vae_model

CLIP = ClipSpec(39, 64, 32, 6, 12.0, 3.0, 1, 1, "gpu", 7)
SHORT = dataclasses.replace(CLIP, num_frames=22)
DENSE = dataclasses.replace(CLIP, mode="dense", sink=0, window=None)
HOLD_S = 30.0
"""After this a forward goes on although its caller is still there: the test then fails."""


class Gate:
    """Counts forwards, and holds one of them until the caller of its verb has gone."""

    def __init__(self) -> None:
        self.num_forwards = 0
        self.is_held = threading.Event()
        self._hold_at = 0
        self._cancelled: Cancelled = lambda: False

    def hold(self, number: int) -> None:
        """Holds the forward of that number, counted from now."""
        self.num_forwards, self._hold_at = 0, number
        self.is_held.clear()

    def forward(self, *_: object) -> None:
        """What a forward begins with."""
        self.num_forwards += 1
        if self.num_forwards == self._hold_at:
            self.is_held.set()
            end = time.monotonic() + HOLD_S
            while not self._cancelled() and time.monotonic() < end:
                time.sleep(0.001)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Learns from each verb whether its caller has gone."""
        run, stream = VerbRunner.run, VerbRunner.stream

        async def watched_run(runner: VerbRunner, verb: Callable[[Cancelled], Any]) -> Any:
            def watched(cancelled: Cancelled) -> Any:
                self._cancelled = cancelled
                return verb(cancelled)

            return await run(runner, watched)

        async def watched_stream(runner: VerbRunner, verb: Any) -> AsyncIterator[Any]:
            def watched(emit: Any, cancelled: Cancelled) -> Any:
                self._cancelled = cancelled
                return verb(emit, cancelled)

            async with aclosing(stream(runner, watched)) as items:
                async for item in items:
                    yield item

        patch.setattr(VerbRunner, "run", watched_run)
        patch.setattr(VerbRunner, "stream", watched_stream)


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    gate.watch(monkeypatch)
    return gate


@pytest.fixture(scope="module")
def dit_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raven_vectors.write_model_directory(tmp_path_factory.mktemp("dit") / "model")


@pytest.fixture(scope="module")
def vae_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vae_model.write_model_directory(tmp_path_factory.mktemp("vae"))


@asynccontextmanager
async def serving(package: str, config: Any, directory: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A worker in its phase, and a channel to it."""
    process = WorkerProcess(package, config)
    async with connect(await process.start(f"unix:{directory}/worker.sock")) as channel:
        await workers_pb2_grpc.WorkerServiceStub(channel).EnterPhase(workers_pb2.EnterPhaseRequest())
        yield process._served.worker, channel
    await process.stop()


async def leave(gate: Gate, call: Any) -> None:
    """Cancels a call once the forward that is to be held is held."""
    ending = asyncio.create_task(ended(call))
    assert await asyncio.to_thread(gate.is_held.wait, HOLD_S)
    call.cancel()
    await ending


async def ended(call: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        await (read(call) if hasattr(call, "read") else call)


async def read(call: Any) -> None:
    async for _ in call:
        pass


async def tensors(call: Any) -> bytes:
    return b"".join([r.tensor.data async for r in call if r.WhichOneof("payload") == "tensor"])


def messages(cls: Any, header: Any, parts: dict[str, torch.Tensor]) -> Iterator[Any]:
    yield cls(header=header)
    for name, tensor in parts.items():
        for part in to_parts(name, tensor):
            yield cls(tensor=part)


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


TEXT = {"context": random({"context": (5, 64)})["context"], "token_tags": torch.ones(5, dtype=torch.int64)}


class Dit:
    """Calls of a DiT worker."""

    def __init__(self, channel: Any) -> None:
        self.stub: Any = workers_pb2_grpc.DitServiceStub(channel)

    async def open(self, session_id: str, clip: ClipSpec) -> None:
        header = workers_pb2.DitSessionHeader(session_id=session_id, clip=clip_spec_to_proto(clip))
        await self.stub.OpenSession(messages(workers_pb2.DitServiceOpenSessionRequest, header, TEXT))

    def sample(self, session_id: str) -> Any:
        return self.stub.SampleChunk(workers_pb2.SampleChunkRequest(session_id=session_id))

    def sample_dense(self, session_id: str) -> Any:
        return self.stub.SampleDense(workers_pb2.SampleDenseRequest(session_id=session_id))

    async def close(self, session_id: str) -> Any:
        return await self.stub.CloseSession(workers_pb2.DitServiceCloseSessionRequest(session_id=session_id))


@pytest.fixture
async def dit(gate: Gate, dit_directory: Path, tmp_path: Path) -> AsyncIterator[Dit]:
    config = DitConfig(dit_directory, device="cpu", threads=1)
    async with serving("services.dit", config, tmp_path) as (worker, channel):
        worker._model.transformer.norm_out.norm.register_forward_pre_hook(gate.forward)
        yield Dit(channel)


@pytest.mark.parametrize("hold_at", [1, 2, CLIP.steps])
async def test_a_chunk(dit: Dit, gate: Gate, hold_at: int) -> None:
    await dit.open("untouched", CLIP)
    expected = await tensors(dit.sample("untouched"))
    await dit.open("s", CLIP)
    gate.hold(hold_at)
    await leave(gate, dit.sample("s"))
    await dit.open("next", CLIP)  # waits for the lane
    assert gate.num_forwards == hold_at
    assert await tensors(dit.sample("s")) == expected
    assert (await dit.close("s")).num_noise_forwards == hold_at + CLIP.steps
    assert await tensors(dit.sample("next")) == expected


@pytest.mark.parametrize("hold_at", [1, 2, CLIP.steps])
async def test_a_dense_clip(dit: Dit, gate: Gate, hold_at: int) -> None:
    await dit.open("untouched", DENSE)
    await tensors(dit.sample_dense("untouched"))
    await dit.open("s", DENSE)
    gate.hold(hold_at)
    await leave(gate, dit.sample_dense("s"))
    await dit.open("next", DENSE)
    assert gate.num_forwards == hold_at
    await tensors(dit.sample_dense("s"))
    assert await tensors(dit.sample("s")) == await tensors(dit.sample("untouched"))
    assert (await dit.close("s")).num_noise_forwards == DENSE.steps  # none of them twice


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("hold_at", [1, 3])
async def test_a_refinement(dit: Dit, gate: Gate, hold_at: int, is_cached: bool, cfg: float) -> None:
    spec = RefineSpec(
        steps=4,
        cfg=cfg,
        negative_prompt="" if cfg == 1 else "hum",
        seed=3,
        cache=FrozenCacheSpec(enabled=is_cached, backend="ram"),
    )
    header = workers_pb2.DitRefineHeader(clip=clip_spec_to_proto(DENSE), spec=refine_spec_to_proto(spec))
    negative = {} if cfg == 1 else {f"negative_{name}": tensor for name, tensor in TEXT.items()}
    parts = random(latent_shapes(DENSE)) | TEXT | negative

    def refine() -> Any:
        return dit.stub.RefineAudio(messages(workers_pb2.DitServiceRefineAudioRequest, header, parts))

    expected = await tensors(refine())
    gate.hold(hold_at)
    await leave(gate, refine())
    await dit.close("nothing")  # waits for the lane
    assert gate.num_forwards == hold_at
    assert await tensors(refine()) == expected


async def test_a_commit_and_an_opening_end_with_the_forward_that_they_are(dit: Dit, gate: Gate) -> None:
    await dit.open("s", CLIP)
    await tensors(dit.sample("s"))
    gate.hold(1)
    request = workers_pb2.CommitChunkRequest(session_id="s")
    await leave(gate, dit.stub.CommitChunk(request))
    # The commit that nobody waits for is done, as its repetition finds.
    assert (await dit.stub.CommitChunk(request)).num_committed == 2
    assert gate.num_forwards == 1


async def test_a_call_that_is_cancelled_while_it_waits_computes_nothing(dit: Dit, gate: Gate) -> None:
    for name in ("first", "second"):
        await dit.open(name, CLIP)
    gate.hold(1)
    running, waiting = dit.sample("first"), dit.sample("second")
    ending = [asyncio.create_task(ended(call)) for call in (running, waiting)]
    assert await asyncio.to_thread(gate.is_held.wait, HOLD_S)
    waiting.cancel()
    await ending[1]
    running.cancel()
    await ending[0]
    assert (await dit.close("second")).num_noise_forwards == 0
    assert (await dit.close("first")).num_noise_forwards == 1


@pytest.fixture
async def vae(gate: Gate, vae_directory: Path, tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    config = VaeConfig(vae_directory, device="cpu", threads=1)
    async with serving("services.vae", config, tmp_path) as (worker, channel):
        yield worker, workers_pb2_grpc.VaeServiceStub(channel)


def decoding(session_id: str, index: int) -> Iterator[Any]:
    header = workers_pb2.DecodeChunkHeader(session_id=session_id, chunk_index=index)
    shapes = chunk_latent_shapes(chunk_table(SHORT.num_frames)[index], SHORT.width, SHORT.height)
    yield from messages(workers_pb2.DecodeChunkRequest, header, random(shapes))


async def decoded(stub: Any, session_id: str, indices: range) -> bytes:
    return b"".join(
        [
            getattr(response, response.WhichOneof("payload")).data
            for index in indices
            async for response in stub.DecodeChunk(decoding(session_id, index))
        ]
    )


async def open_vae(stub: Any, session_id: str, directory: Path) -> None:
    await stub.OpenSession(
        workers_pb2.VaeServiceOpenSessionRequest(
            session_id=session_id,
            clip=clip_spec_to_proto(SHORT),
            artifact_directory=str(directory),
            artifacts=["final.mp4", "frames.mkv"],
        )
    )


@pytest.mark.parametrize("what", ["picture decoder", "sound decoder", "encoder"])
async def test_a_decode(
    vae: tuple[Any, Any], gate: Gate, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, stub = vae
    chunks = range(len(chunk_table(SHORT.num_frames)))
    await open_vae(stub, "untouched", tmp_path / "untouched")
    expected = await decoded(stub, "untouched", chunks)
    after: list[str] = []
    steps: dict[str, tuple[Any, str]] = {
        "picture decoder": (worker._models.video, "decode"),
        "sound decoder": (worker._models.audio, "decode"),
        "encoder": (H264Encoder, "encode"),
    }
    for name, (owner, method) in steps.items():
        original = getattr(owner, method)

        def watched(*args: Any, _original: Any = original, _name: str = name, **options: Any) -> Any:
            if gate.is_held.is_set():
                after.append(_name)
            elif _name == what:
                gate.forward()
            return _original(*args, **options)

        monkeypatch.setattr(owner, method, watched)
    await open_vae(stub, "s", tmp_path / "s")
    await decoded(stub, "s", chunks[:1])
    gate.hold(1)
    await leave(gate, stub.DecodeChunk(decoding("s", 1)))
    # Waits for the lane, and finds the session broken, which starts it anew.
    await open_vae(stub, "s", tmp_path / "s")
    assert after == {"picture decoder": [], "sound decoder": [], "encoder": []}[what]
    gate.is_held.clear()
    assert await decoded(stub, "s", chunks) == expected
    for session_id in ("untouched", "s"):
        await stub.Finish(workers_pb2.FinishRequest(session_id=session_id))
    for name in ("final.mp4", "frames.mkv"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "untouched" / name).read_bytes()


async def test_a_sound(vae: tuple[Any, Any], gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, stub = vae
    sound = latent_shapes(SHORT)["audio"]
    header = workers_pb2.DecodeAudioHeader(
        clip=clip_spec_to_proto(SHORT), artifact_directory=str(tmp_path / "job"), artifacts=["refined.flac"]
    )
    parts = random({"audio": sound, "audio_before": sound})
    decode = worker._models.audio.decode

    def watched(*args: Any, **options: Any) -> Any:
        gate.forward()
        return decode(*args, **options)

    monkeypatch.setattr(worker._models.audio, "decode", watched)
    for hold_at in (1, 3):
        gate.hold(hold_at)
        await leave(gate, stub.DecodeAudio(messages(workers_pb2.DecodeAudioRequest, header, parts)))
        await stub.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(session_id="nothing"))
        assert gate.num_forwards == hold_at
        assert list((tmp_path / "job").iterdir()) == []


async def test_a_prompt(gate: Gate, tiny_model: Path, tmp_path: Path) -> None:
    """Its encoding is one forward: it ends with that one, and one that has not begun never does."""
    config = TextEncoderConfig(tiny_model, device="cpu", threads=1)
    async with serving("services.text_encoder", config, tmp_path) as (worker, channel):
        worker._module.register_forward_pre_hook(gate.forward)
        stub: Any = workers_pb2_grpc.TextEncoderServiceStub(channel)
        gate.hold(1)
        running, waiting = (stub.Encode(workers_pb2.EncodeRequest(prompt=prompt)) for prompt in ("a fox", "a hen"))
        ending = [asyncio.create_task(ended(call)) for call in (running, waiting)]
        assert await asyncio.to_thread(gate.is_held.wait, HOLD_S)
        waiting.cancel()
        await ending[1]
        running.cancel()
        await ending[0]
        lookup = stub.LookupEmbedding(workers_pb2.LookupEmbeddingRequest(prompt="a hen"))
        assert not (await lookup.read()).header.is_cached
        assert gate.num_forwards == 1
