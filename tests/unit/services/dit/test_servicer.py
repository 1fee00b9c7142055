"""DitService over a real server on a unix socket."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from h3stream.codec import clip_spec_to_proto, preview_spec_to_proto
from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec, PreviewSpec
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.preview_map import PreviewMap
from services.common.process import WorkerProcess
from services.common.rpc import connect
from services.common.tensors import TensorAssembler, to_parts
from services.dit.config import DitConfig

OPEN = workers_pb2.DitServiceOpenSessionRequest
RESTORE = workers_pb2.RestoreChunkRequest
F32 = (torch.float32,)
MAP = PreviewMap((0.125,) * 72, (0.5,) * 3)


class Dit:
    """A client of one worker."""

    def __init__(self, channel: Any, process: WorkerProcess) -> None:
        self.process = process
        self.stub = workers_pb2_grpc.DitServiceStub(channel)
        self.shell = workers_pb2_grpc.WorkerServiceStub(channel)

    async def enter(self) -> None:
        await self.shell.EnterPhase(workers_pb2.EnterPhaseRequest())

    async def open(
        self, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor, session_id: str = "s", **preview: Any
    ) -> workers_pb2.DitServiceOpenSessionResponse:
        header = workers_pb2.DitSessionHeader(session_id=session_id, clip=clip_spec_to_proto(clip), **preview)
        return await self.send(
            [
                OPEN(header=header),
                *(OPEN(tensor=part) for part in to_parts("context", context)),
                *(OPEN(tensor=part) for part in to_parts("token_tags", token_tags)),
            ]
        )

    async def send(self, messages: list[OPEN]) -> workers_pb2.DitServiceOpenSessionResponse:
        return await self.stub.OpenSession(iter(messages))

    async def sample(self, index: int) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
        steps, tensors = [], None
        async for response in self.stub.SampleChunk(workers_pb2.SampleChunkRequest(session_id="s", chunk_index=index)):
            if response.HasField("step"):
                assert tensors is None, "latents came before the last step"
                steps.append((response.step.step, response.step.num_steps))
            else:
                tensors = tensors or TensorAssembler(
                    {"video": (F32, (1, 24, None, None, None)), "audio": (F32, (1, 32, 2, None))}
                )
                tensors.add(response.tensor)
        assert tensors is not None
        return steps, tensors.finish()

    async def sample_dense(self) -> list[tuple[int, int]]:
        call = self.stub.SampleDense(workers_pb2.SampleDenseRequest(session_id="s"))
        return [(response.step.step, response.step.num_steps) async for response in call]

    async def leave(self) -> None:
        await self.shell.LeavePhase(workers_pb2.LeavePhaseRequest())

    async def commit(self, index: int) -> workers_pb2.CommitChunkResponse:
        return await self.stub.CommitChunk(workers_pb2.CommitChunkRequest(session_id="s", chunk_index=index))

    async def restore(self, index: int, latents: dict[str, torch.Tensor]) -> None:
        header = workers_pb2.RestoreChunkHeader(session_id="s", chunk_index=index)
        parts = [part for name, tensor in latents.items() for part in to_parts(name, tensor)]
        await self.stub.RestoreChunk(iter([RESTORE(header=header), *(RESTORE(tensor=part) for part in parts)]))

    async def close(self) -> workers_pb2.DitServiceCloseSessionResponse:
        return await self.stub.CloseSession(workers_pb2.DitServiceCloseSessionRequest(session_id="s"))


@pytest.fixture
async def dit(model_directory: Path, tmp_path: Path) -> AsyncIterator[Dit]:
    grad = torch.is_grad_enabled()
    process = WorkerProcess("services.dit", DitConfig(model_directory, device="cpu"))
    torch.set_grad_enabled(grad)
    address = await process.start(f"unix:{tmp_path}/dit.sock")
    async with connect(address) as channel:
        yield Dit(channel, process)
    await process.stop()


async def test_a_clip_runs_from_its_text_to_its_last_chunk(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    opened = await dit.open(dataclasses.replace(clip, kv_storage="cpu"), context.bfloat16(), token_tags)
    assert opened.kv_storage == types_pb2.KV_STORAGE_CPU
    assert opened.kv_storage_fallback_reason == ""
    for index in range(5):
        steps, tensors = await dit.sample(index)
        assert steps == [(1, 2), (2, 2)]
        assert tensors["video"].shape == (1, 24, 2 if index == 4 else 5, 2, 4)
        assert (await dit.sample(index))[0] == []
        if index < 4:
            committed = await dit.commit(index)
            assert committed.num_committed == index + 2
            assert list(committed.retained_entries) == [0, index + 1]
            assert committed.retained_rows == 5 + 2 * tensors["audio"].shape[3] + 10
    described = await dit.shell.Describe(workers_pb2.DescribeRequest())
    assert list(described.session_ids) == ["s"]
    assert described.library_versions.keys() == {"torch", "diffusers", "safetensors"}
    closed = await dit.close()
    assert (closed.was_open, closed.num_noise_forwards, closed.num_clean_forwards) == (True, 10, 4)
    row_bytes = 3 * 2 * 2 * 128 * 2  # layers, K and V, heads, head dim, bfloat16
    assert closed.peak_kv_bytes == (5 + 68 + 68) * row_bytes - 2 * row_bytes  # the text, two chunks of 68 and 66 rows
    assert not (await dit.close()).was_open


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
async def test_a_storage_that_falls_back_says_so(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    opened = await dit.open(dataclasses.replace(clip, kv_storage="cpu_pinned"), context, token_tags)
    assert opened.kv_storage == types_pb2.KV_STORAGE_CPU
    assert "page-locked" in opened.kv_storage_fallback_reason


async def test_a_cancelled_call_stops_within_one_forward_and_the_session_goes_on(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    clip = dataclasses.replace(clip, steps=20)
    await dit.enter()
    await dit.open(clip, context, token_tags)
    _, untouched = await dit.sample(0)
    await dit.close()

    await dit.open(clip, context, token_tags)
    transformer = dit.process._served.worker._model.transformer
    slow = transformer.norm_out.norm.register_forward_pre_hook(lambda module, args: time.sleep(0.2))
    call = dit.stub.SampleChunk(workers_pb2.SampleChunkRequest(session_id="s", chunk_index=0))
    response = await call.read()
    assert response.step.step == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    slow.remove()

    steps, again = await dit.sample(0)
    assert len(steps) == 20
    assert torch.equal(again["video"], untouched["video"])
    assert torch.equal(again["audio"], untouched["audio"])
    closed = await dit.close()
    assert closed.was_open
    # The one reported, at most one that was under way, and the chunk sampled again.
    assert closed.num_noise_forwards in (1 + 20, 2 + 20)


async def test_calls_outside_the_phase_or_out_of_order_fail_their_precondition(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        await dit.open(clip, context, token_tags)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    await dit.enter()
    await dit.open(clip, context, token_tags)
    with pytest.raises(grpc.RpcError) as raised:
        await dit.sample(1)
    assert isinstance(from_rpc_error(raised.value), UnsupportedError)
    with pytest.raises(grpc.RpcError) as raised:
        await dit.commit(0)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_stream_that_is_not_a_header_and_its_tensors_is_refused(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    header = OPEN(header=workers_pb2.DitSessionHeader(session_id="s", clip=clip_spec_to_proto(clip)))
    text = [OPEN(tensor=part) for part in to_parts("context", context)]
    tags = [OPEN(tensor=part) for part in to_parts("token_tags", token_tags)]
    narrow = [OPEN(tensor=part) for part in to_parts("context", context[:, :32])]
    for messages, message in (
        ([], "the stream was empty"),
        ([*text, header], "one header, first"),
        ([header, header], "one header, first"),
        ([header, *text], "'token_tags' is missing"),
        ([header, *narrow, *tags], "expected"),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            await dit.send(messages)
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert message in error.message


async def test_a_dense_clip_is_sampled_as_a_whole_and_sent_in_chunks(
    dit: Dit, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    opened = await dit.open(dense_clip, context, token_tags)
    assert opened.kv_storage == types_pb2.KV_STORAGE_UNSPECIFIED
    assert opened.kv_storage_fallback_reason == ""
    with pytest.raises(grpc.RpcError) as raised:
        await dit.sample(0)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert await dit.sample_dense() == [(1, 3), (2, 3), (3, 3)]
    await dit.leave()
    assert await dit.sample_dense() == []
    audio_latents = []
    for index in (4, 0, 1, 2, 3, 0):
        steps, tensors = await dit.sample(index)
        assert steps == []
        assert tensors["video"].shape == (1, 24, 2 if index == 4 else 5, 2, 4)
        audio_latents.append(tensors["audio"].shape[3])
    assert audio_latents == [8, 29, 28, 28, 29, 29]
    with pytest.raises(grpc.RpcError) as raised:
        await dit.commit(0)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    closed = await dit.close()
    assert (closed.was_open, closed.num_noise_forwards, closed.num_clean_forwards) == (True, 3, 0)
    assert closed.peak_kv_bytes == 0


async def test_a_cancelled_dense_call_stops_within_one_forward_and_goes_on_to_the_same_clip(
    dit: Dit, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    clip = dataclasses.replace(dense_clip, num_frames=22, steps=20)
    await dit.enter()
    await dit.open(clip, context, token_tags)
    await dit.sample_dense()
    _, untouched = await dit.sample(1)
    await dit.close()

    await dit.open(clip, context, token_tags)
    transformer = dit.process._served.worker._model.transformer
    slow = transformer.norm_out.norm.register_forward_pre_hook(lambda module, args: time.sleep(0.2))
    call = dit.stub.SampleDense(workers_pb2.SampleDenseRequest(session_id="s"))
    response = await call.read()
    assert (response.step.step, response.step.num_steps) == (1, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    slow.remove()

    steps = await dit.sample_dense()
    assert steps[0][0] in (2, 3)  # at most one forward was under way
    assert steps == [(step, 20) for step in range(steps[0][0], 21)]
    _, again = await dit.sample(1)
    assert torch.equal(again["video"], untouched["video"])
    assert torch.equal(again["audio"], untouched["audio"])
    assert (await dit.close()).num_noise_forwards == 20


async def test_a_session_is_taken_up_where_it_was_lost(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    noise = [workers_pb2.NoiseSegment(seed=3), workers_pb2.NoiseSegment(first_chunk=1, seed=2**63)]
    await dit.enter()
    assert (await dit.open(clip, context, token_tags, noise=noise)).num_committed_chunks == 0
    sampled = []
    for index in range(5):
        sampled.append((await dit.sample(index))[1])
        if index < 4:
            await dit.commit(index)
        assert (await dit.open(clip, context, token_tags, noise=noise)).num_committed_chunks == min(index + 1, 4)
    with pytest.raises(grpc.RpcError) as raised:
        await dit.open(clip, context, token_tags)
    assert "open with another noise" in from_rpc_error(raised.value).message
    await dit.close()
    await dit.open(clip, context, token_tags, noise=noise)
    for index in range(2):
        await dit.restore(index, sampled[index])
        await dit.commit(index)
    for index in range(2, 5):
        steps, latents = await dit.sample(index)
        assert len(steps) == 2
        assert torch.equal(latents["video"], sampled[index]["video"])
        assert torch.equal(latents["audio"], sampled[index]["audio"])
        if index < 4:
            await dit.commit(index)


async def test_what_cannot_be_restored_is_refused_with_the_reason(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        await dit.restore(0, {})
    assert isinstance(from_rpc_error(raised.value), UnsupportedError)
    await dit.enter()
    await dit.open(clip, context, token_tags)
    _, latents = await dit.sample(0)
    await dit.close()
    await dit.open(clip, context, token_tags)
    for index, sent, cls, message in (
        (5, latents, InvalidRequestError, "chunk 5 does not exist; the clip has chunks 0 to 4"),
        (0, {"video": latents["video"]}, InvalidRequestError, "tensor 'audio' is missing"),
        (0, latents | {"audio": latents["audio"][..., :-1]}, InvalidRequestError, "expected torch.float32"),
        (0, latents | {"audio": latents["audio"] * torch.nan}, InvalidRequestError, "1856 values that are not finite"),
        (3, latents, UnsupportedError, "the next one is chunk 0"),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            await dit.restore(index, sent)
        error = from_rpc_error(raised.value)
        assert isinstance(error, cls)
        assert message in error.message
    await dit.restore(0, latents)


async def test_a_streaming_session_is_not_sampled_as_a_whole(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    await dit.open(clip, context, token_tags)
    with pytest.raises(grpc.RpcError) as raised:
        await dit.sample_dense()
    error = from_rpc_error(raised.value)
    assert isinstance(error, UnsupportedError)
    assert "sample it chunk by chunk" in error.message


def shown(spec: PreviewSpec) -> dict[str, Any]:
    """Fields of a session that has stills made."""
    return {"preview": preview_spec_to_proto(spec), "preview_map": MAP.to_proto()}


async def test_a_still_follows_each_step_that_it_shows(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    opened = await dit.open(clip, context, token_tags, **shown(PreviewSpec(32, 1)))
    assert opened.preview_unavailable_reason == ""
    call = dit.stub.SampleChunk(workers_pb2.SampleChunkRequest(session_id="s", chunk_index=0))
    payloads, previews = [], []
    async for response in call:
        payloads.append(response.WhichOneof("payload"))
        if response.HasField("preview"):
            previews.append(response.preview)
    assert payloads == ["step", "preview"] * 2 + ["tensor"] * 2
    told = [(p.chunk_index, p.step, p.num_steps, p.width, p.height, p.media_type) for p in previews]
    assert told == [(0, step, 2, 32, 16, "image/jpeg") for step in (1, 2)]


async def test_stills_of_a_dense_clip_belong_to_no_chunk(
    dit: Dit, dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    await dit.open(dense_clip, context, token_tags, **shown(PreviewSpec(512, 2)))
    call = dit.stub.SampleDense(workers_pb2.SampleDenseRequest(session_id="s"))
    previews = [response.preview async for response in call if response.HasField("preview")]
    assert [(p.chunk_index, p.step, p.num_steps, p.width, p.height) for p in previews] == [
        (-1, 2, 3, 64, 32),
        (-1, 3, 3, 64, 32),
    ]


async def test_stills_without_a_whole_map_are_refused(
    dit: Dit, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    await dit.enter()
    fields = shown(PreviewSpec(32, 1))
    for preview_map, message in (
        (None, "need a preview_map"),
        (types_pb2.PreviewMap(weights=[1.0] * 71, bias=[0.0] * 3), "(71, 3) weights and biases"),
        (types_pb2.PreviewMap(weights=[float("nan")] * 72, bias=[0.0] * 3), "not finite"),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            await dit.open(clip, context, token_tags, **{**fields, "preview_map": preview_map})
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert message in error.message
    fields = shown(PreviewSpec(513, 0))
    with pytest.raises(grpc.RpcError) as raised:
        await dit.open(clip, context, token_tags, **fields)
    assert "preview.max_side" in from_rpc_error(raised.value).message
    opened = await dit.open(clip, context, token_tags, preview=preview_spec_to_proto(PreviewSpec(0, 1)))
    assert opened.preview_unavailable_reason == ""
    assert len((await dit.sample(0))[0]) == 2
