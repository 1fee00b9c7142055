"""DitService.RefineAudio over a real server on a unix socket."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from core.latents_file import latent_shapes
from h3stream.codec import clip_spec_to_proto, refine_spec_from_proto, refine_spec_to_proto
from h3stream.errors import GenerationError, InvalidRequestError, UnsupportedError
from h3stream.refine import FrozenCacheSpec, RefineSpec
from h3stream.request import ClipSpec
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.process import WorkerProcess
from services.common.rpc import connect
from services.common.tensors import TensorAssembler, to_parts
from services.dit.config import DitConfig

REQUEST = workers_pb2.DitServiceRefineAudioRequest
SPEC = RefineSpec(steps=3, cache=FrozenCacheSpec(backend="ram"))
F32 = (torch.float32,)


class Dit:
    """A client of one worker."""

    def __init__(self, channel: Any, process: WorkerProcess) -> None:
        self.process = process
        self.stub = workers_pb2_grpc.DitServiceStub(channel)
        self.shell = workers_pb2_grpc.WorkerServiceStub(channel)

    async def refine(
        self, clip: ClipSpec, spec: RefineSpec, tensors: dict[str, torch.Tensor]
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """What is told, in order, and the tensors."""
        shapes = latent_shapes(clip)
        made = {"audio": shapes["audio"], "video": shapes["video"], "exact_audio": shapes["audio"]}
        assembler = TensorAssembler({name: (F32, shape) for name, shape in made.items()}, optional=made)
        told: list[Any] = []
        async for response in self.stub.RefineAudio(iter(messages(clip, spec, tensors))):
            name = response.WhichOneof("payload")
            if name == "tensor":
                assembler.add(response.tensor)
            else:
                assert not assembler._incoming, "tensors come last"
                told.append(getattr(response, name))
        return told, assembler.finish()


def messages(clip: ClipSpec, spec: RefineSpec, tensors: dict[str, torch.Tensor]) -> list[REQUEST]:
    header = workers_pb2.DitRefineHeader(clip=clip_spec_to_proto(clip), spec=refine_spec_to_proto(spec))
    parts = [part for name, tensor in tensors.items() for part in to_parts(name, tensor)]
    return [REQUEST(header=header), *(REQUEST(tensor=part) for part in parts)]


@pytest.fixture
async def dit(model_directory: Path, tmp_path: Path) -> AsyncIterator[Dit]:
    grad = torch.is_grad_enabled()
    process = WorkerProcess("services.dit", DitConfig(model_directory, device="cpu", frozen_caches=tmp_path / "caches"))
    torch.set_grad_enabled(grad)
    address = await process.start(f"unix:{tmp_path}/dit.sock")
    async with connect(address) as channel:
        client = Dit(channel, process)
        await client.shell.EnterPhase(workers_pb2.EnterPhaseRequest())
        yield client
    await process.stop()


@pytest.fixture
def clip(clip: ClipSpec) -> ClipSpec:
    return dataclasses.replace(clip, num_frames=22)


@pytest.fixture
def tensors(clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    latents = {name: torch.randn(shape, generator=generator) for name, shape in latent_shapes(clip).items()}
    return latents | {"context": context.bfloat16(), "token_tags": token_tags}


async def test_a_sound_is_refined_in_one_call(dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor]) -> None:
    (started, *steps, summary), made = await dit.refine(clip, SPEC, tensors)
    assert isinstance(started, types_pb2.RefineStarted)
    assert refine_spec_from_proto(started.spec, "") == dataclasses.replace(SPEC, seed=clip.seed)
    assert (started.num_rows, started.num_live_rows, started.num_blocks) == (93, 79, 3)
    assert (started.has_cache, started.backend) == (True, types_pb2.CACHE_BACKEND_RAM)
    assert started.cache_bytes == 3 * 14 * 66
    assert "ram was asked for" in started.reason
    assert [(p.step, p.num_steps, p.mode, p.reason) for p in steps] == [
        (1, 3, "build", "no cache yet"),
        (2, 3, "cached", ""),
        (3, 3, "cached", ""),
    ]
    assert [(p.num_blocks_built, p.num_blocks_cached, p.num_blocks_exact) for p in steps] == [(3, 0, 0)] + [
        (0, 3, 0)
    ] * 2
    assert [(p.num_query_rows, p.num_key_rows, p.num_fed_rows) for p in steps[1:]] == [(3 * 79, 3 * 93, 3 * 79)] * 2
    assert {p.cache_bytes for p in steps} == {started.cache_bytes}
    assert summary.sampling_s == pytest.approx(sum(p.block_s + p.outside_s for p in steps))
    assert summary.change > 0
    assert made.keys() == {"audio"}
    assert torch.isfinite(made["audio"]).all()
    again, _ = await dit.refine(clip, SPEC, tensors)
    assert not again[-1].is_warm


async def test_video_and_the_exact_sound_come_where_they_are_asked_for(
    dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor]
) -> None:
    spec = dataclasses.replace(SPEC, video_denoise=0.3)
    (started, *_), made = await dit.refine(clip, spec, tensors)
    assert (started.has_cache, started.backend) == (False, types_pb2.CACHE_BACKEND_UNSPECIFIED)
    assert "the video may move" in started.reason
    assert made.keys() == {"audio", "video"}
    assert not torch.equal(made["video"], tensors["video"])
    (*_, summary), made = await dit.refine(clip, dataclasses.replace(SPEC, compare=True), tensors)
    assert made.keys() == {"audio", "exact_audio"}
    assert summary.against_exact > 0
    assert summary.exact_sampling_s > 0


async def test_guidance_takes_the_text_that_it_leads_away_from(
    dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor]
) -> None:
    spec = dataclasses.replace(SPEC, cfg=3.0, negative_prompt="noise")
    with pytest.raises(grpc.RpcError) as raised:
        await dit.refine(clip, spec, tensors)
    assert "tensor 'negative_context' is missing" in from_rpc_error(raised.value).message
    negative = {"negative_context": tensors["context"][:3], "negative_token_tags": tensors["token_tags"][:3]}
    (_, *steps, _), _ = await dit.refine(clip, spec, tensors | negative)
    assert [p.num_forwards for p in steps] == [2] * 3
    with pytest.raises(grpc.RpcError) as raised:
        await dit.refine(clip, SPEC, tensors | negative)
    assert "tensor 'negative_context' is not expected" in from_rpc_error(raised.value).message


async def refusal(dit: Dit, sent: list[REQUEST]) -> GenerationError:
    with pytest.raises(grpc.RpcError) as raised:
        async for _ in dit.stub.RefineAudio(iter(sent)):
            pass
    return from_rpc_error(raised.value)


async def test_what_is_no_refinement_is_refused(dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor]) -> None:
    header, *parts = messages(clip, SPEC, tensors)
    nan = tensors | {"audio": torch.full_like(tensors["audio"], torch.nan)}
    short = tensors | {"video": tensors["video"][:, :, :5]}
    disk = dataclasses.replace(SPEC, cache=FrozenCacheSpec(backend="disk"))
    for sent, message in (
        ([], "the stream was empty"),
        (parts, "takes one header, first"),
        ([header, header], "takes one header, first"),
        ([header, *parts[:-1]], "tensor 'token_tags' is missing"),
        (messages(clip, SPEC, nan), "tensor 'audio' holds 2368 values that are not finite"),
        (messages(clip, SPEC, short), "tensor 'video' is torch.float32 [1, 24, 5, 2, 4]"),
        (messages(clip, disk, tensors), "spec.cache.backend is disk, which is not used unless"),
        (messages(dataclasses.replace(clip, num_frames=23), SPEC, tensors), "num_frames"),
    ):
        error = await refusal(dit, sent)
        assert isinstance(error, InvalidRequestError), error
        assert message in error.message
    await dit.shell.LeavePhase(workers_pb2.LeavePhaseRequest())
    error = await refusal(dit, messages(clip, SPEC, tensors))
    assert isinstance(error, UnsupportedError)


async def test_a_cancelled_call_stops_within_one_forward_and_leaves_nothing(
    dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    spec = dataclasses.replace(SPEC, steps=100, cache=FrozenCacheSpec(backend="disk", allow_disk=True))
    _, untouched = await dit.refine(clip, SPEC, tensors)
    call = dit.stub.RefineAudio(iter(messages(clip, spec, tensors)))
    async for response in call:
        if response.HasField("progress"):
            break
    assert list((tmp_path / "caches").iterdir()) != []
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    _, again = await dit.refine(clip, SPEC, tensors)
    assert torch.equal(again["audio"], untouched["audio"])
    assert list((tmp_path / "caches").iterdir()) == []


async def test_shared_caches_are_freed_when_the_worker_stops(
    dit: Dit, clip: ClipSpec, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    spec = dataclasses.replace(SPEC, cache=FrozenCacheSpec(backend="disk", allow_disk=True, shared=True))
    for is_warm in (False, True):
        (*_, summary), _ = await dit.refine(clip, spec, tensors)
        assert summary.is_warm == is_warm
    assert len(list((tmp_path / "caches").iterdir())) == 1
    dit.process._served.close()
    assert list((tmp_path / "caches").iterdir()) == []
