"""The text encoder's gRPC service: decode the call, run the verb, encode the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from grpc import aio

from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.tensors import to_parts
from services.common.verbs import VerbRunner
from services.common.worker import ServedWorker
from services.text_encoder.config import TextEncoderConfig
from services.text_encoder.embedding_cache import Embedding
from services.text_encoder.worker import TextEncoderWorker

SERVICE_NAME = "h3stream.v1.TextEncoderService"


class TextEncoderServicer(workers_pb2_grpc.TextEncoderServiceServicer):
    """TextEncoderService over the worker."""

    def __init__(self, worker: TextEncoderWorker, runner: VerbRunner) -> None:
        self._worker = worker
        self._runner = runner

    async def LookupEmbedding(
        self, request: workers_pb2.LookupEmbeddingRequest, context: Any
    ) -> AsyncIterator[workers_pb2.LookupEmbeddingResponse]:
        embedding = await self._runner.run(lambda _: self._worker.lookup(request.prompt))
        yield workers_pb2.LookupEmbeddingResponse(header=_header(embedding, is_cached=embedding is not None))
        if embedding is not None:
            for part in _parts(embedding):
                yield workers_pb2.LookupEmbeddingResponse(tensor=part)

    async def Encode(
        self, request: workers_pb2.EncodeRequest, context: Any
    ) -> AsyncIterator[workers_pb2.EncodeResponse]:
        embedding, is_cached = await self._runner.run(lambda cancelled: self._worker.encode(request.prompt, cancelled))
        yield workers_pb2.EncodeResponse(header=_header(embedding, is_cached))
        for part in _parts(embedding):
            yield workers_pb2.EncodeResponse(tensor=part)


def _header(embedding: Embedding | None, is_cached: bool) -> workers_pb2.EmbeddingHeader:
    num_tokens = 0 if embedding is None else len(embedding.token_tags)
    return workers_pb2.EmbeddingHeader(is_cached=is_cached, num_tokens=num_tokens)


def _parts(embedding: Embedding) -> Iterator[types_pb2.TensorPart]:
    yield from to_parts("context", embedding.context)
    yield from to_parts("token_tags", embedding.token_tags)


def build(config: TextEncoderConfig) -> ServedWorker:
    """Loads the worker and puts its service around it. Raises CheckpointError if the model directory is at fault."""
    worker = TextEncoderWorker(config)
    runner = VerbRunner(worker.name)

    def register(server: aio.Server) -> None:
        workers_pb2_grpc.add_TextEncoderServiceServicer_to_server(TextEncoderServicer(worker, runner), server)

    return ServedWorker(worker, runner, SERVICE_NAME, register, libraries=("torch", "transformers", "tokenizers"))
