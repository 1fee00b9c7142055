"""The worker's services on a real grpc.aio server, reached through a unix socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from h3stream.errors import FieldViolation, InvalidRequestError
from h3stream.status import from_rpc_error
from h3stream.v1 import workers_pb2, workers_pb2_grpc
from services.common.process import WorkerProcess
from services.common.rpc import connect
from services.common.tensors import TensorAssembler
from services.text_encoder.config import TextEncoderConfig

PROMPT = "A paper boat drifts along a small stream."


class Client:
    """The calls of a lane."""

    def __init__(self, channel: Any) -> None:
        self.worker = workers_pb2_grpc.WorkerServiceStub(channel)
        self.encoder = workers_pb2_grpc.TextEncoderServiceStub(channel)

    async def encode(self, prompt: str) -> tuple[workers_pb2.EmbeddingHeader, dict[str, torch.Tensor]]:
        return await received(self.encoder.Encode(workers_pb2.EncodeRequest(prompt=prompt)))

    async def look_up(self, prompt: str) -> tuple[workers_pb2.EmbeddingHeader, dict[str, torch.Tensor]]:
        return await received(self.encoder.LookupEmbedding(workers_pb2.LookupEmbeddingRequest(prompt=prompt)))


async def received(call: Any) -> tuple[workers_pb2.EmbeddingHeader, dict[str, torch.Tensor]]:
    """The header, which must come first, and the tensors, checked against the shape that it announces."""
    responses = [response async for response in call]
    header = responses[0].header
    assert responses[0].WhichOneof("payload") == "header"
    if header.num_tokens == 0:
        assert len(responses) == 1
        return header, {}
    assembler = TensorAssembler(
        {
            "context": ((torch.bfloat16,), (header.num_tokens, 128)),
            "token_tags": ((torch.int64,), (header.num_tokens,)),
        }
    )
    for response in responses[1:]:
        assembler.add(response.tensor)
    return header, assembler.finish()


@pytest.fixture
async def client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    config = TextEncoderConfig(model_directory=tiny_model, device="cpu", threads=1)
    process = WorkerProcess("services.text_encoder", config)
    address = await process.start(f"unix:{tmp_path}/encoder.sock")
    async with connect(address) as channel:
        yield Client(channel)
    await process.stop()


async def test_the_worker_describes_itself_and_its_residency(client: Client) -> None:
    before = await client.worker.Describe(workers_pb2.DescribeRequest())
    assert (before.worker, before.device, before.device_weight_bytes) == ("text_encoder", "cpu", 0)
    assert before.weight_bytes > 1_000_000
    assert set(before.library_versions) == {"torch", "transformers", "tokenizers"}
    assert list(before.weight_digests) == ["text_encoder/model.safetensors"]
    entered = await client.worker.EnterPhase(workers_pb2.EnterPhaseRequest())
    assert entered.device_weight_bytes == before.weight_bytes
    left = await client.worker.LeavePhase(workers_pb2.LeavePhaseRequest())
    assert left.device_weight_bytes == 0


async def test_encoding_outside_the_phase_fails_as_a_precondition(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.encode(PROMPT)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_prompt_seen_before_is_found_without_a_phase_and_with_the_same_bits(client: Client) -> None:
    header, tensors = await client.look_up(PROMPT)
    assert (header.is_cached, header.num_tokens, tensors) == (False, 0, {})
    await client.worker.EnterPhase(workers_pb2.EnterPhaseRequest())
    header, fresh = await client.encode(PROMPT)
    assert not header.is_cached
    assert header.num_tokens > 1
    await client.worker.LeavePhase(workers_pb2.LeavePhaseRequest())
    found_header, found = await client.look_up(PROMPT)
    assert (found_header.is_cached, found_header.num_tokens) == (True, header.num_tokens)
    assert torch.equal(found["context"], fresh["context"])
    assert torch.equal(found["token_tags"], fresh["token_tags"])
    assert (await client.look_up(PROMPT + " "))[0].num_tokens == 0


async def test_an_embedding_larger_than_a_message_arrives_whole(client: Client) -> None:
    await client.worker.EnterPhase(workers_pb2.EnterPhaseRequest())
    prompt = "0123456789" * 500  # 5000 tokens of 256 bytes: 1.3 MB
    header, tensors = await client.encode(prompt)
    assert header.num_tokens == 5000
    assert tensors["context"].nbytes > 1 << 20
    assert tensors["context"].isfinite().all()


async def test_a_refused_prompt_names_its_field_and_rule(client: Client) -> None:
    for call in (client.encode, client.look_up):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call("show <|image_pad|>")
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        (violation,) = error.violations
        assert isinstance(violation, FieldViolation)
        assert (violation.field, violation.reason) == ("prompt", "PROMPT_CONTROL_TOKEN")
        assert "<|image_pad|>" in violation.description


def test_the_settings_can_be_read_without_torch_and_transformers() -> None:
    code = "import sys, services.text_encoder.config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
