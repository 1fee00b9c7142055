"""VaeService over gRPC: decode the call, run the verb, encode the answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from h3stream.codec import clip_spec_from_proto
from h3stream.errors import ConfigError, InvalidRequestError, MuxError
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.tensors import TensorAssembler
from services.common.verbs import Cancelled, VerbRunner
from services.common.worker import ServedWorker
from services.vae.config import VaeConfig
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media_lane import StreamStart
from services.vae.worker import Media, VaeWorker

log = logging.getLogger(__name__)

SERVICE_NAME = "h3stream.v1.VaeService"
_PROBE_SIZE = 256


class VaeServicer(workers_pb2_grpc.VaeServiceServicer):
    """VaeService over one worker."""

    def __init__(self, worker: VaeWorker, runner: VerbRunner) -> None:
        self._worker = worker
        self._runner = runner

    async def OpenSession(
        self, request: workers_pb2.VaeServiceOpenSessionRequest, context: Any
    ) -> workers_pb2.VaeServiceOpenSessionResponse:
        clip = clip_spec_from_proto(request.clip)
        directory = Path(request.artifact_directory) if request.artifact_directory else None
        names = tuple(request.artifacts)
        await self._runner.run(lambda _: self._worker.open_session(request.session_id, clip, directory, names))
        return workers_pb2.VaeServiceOpenSessionResponse()

    async def DecodeChunk(
        self, request_iterator: AsyncIterator[workers_pb2.DecodeChunkRequest], context: Any
    ) -> AsyncIterator[workers_pb2.DecodeChunkResponse]:
        session_id, chunk_index, latents = await self._receive(request_iterator)

        def decode(emit: Callable[[Media], None], cancelled: Cancelled) -> None:
            video, audio = latents["video"], latents["audio"]
            self._worker.decode_chunk(session_id, chunk_index, video, audio, emit, cancelled)

        async for media in self._runner.stream(decode):
            yield _to_response(media)

    async def _receive(
        self, request_iterator: AsyncIterator[workers_pb2.DecodeChunkRequest]
    ) -> tuple[str, int, dict[str, torch.Tensor]]:
        """Session, chunk index and latents of a DecodeChunk call."""
        header: workers_pb2.DecodeChunkHeader | None = None
        assembler: TensorAssembler | None = None
        async for request in request_iterator:
            if assembler is None:
                if request.WhichOneof("payload") != "header":
                    raise InvalidRequestError("the first message of DecodeChunk must be a header")
                header = request.header
                video_shape, audio_shape = self._worker.latent_shapes(header.session_id, header.chunk_index)
                assembler = TensorAssembler(
                    {"video": ((torch.float32,), video_shape), "audio": ((torch.float32,), audio_shape)}
                )
            elif request.WhichOneof("payload") == "tensor":
                assembler.add(request.tensor)
            else:
                raise InvalidRequestError("every message of DecodeChunk but the first must be a tensor part")
        if header is None or assembler is None:
            raise InvalidRequestError('DecodeChunk needs a header and the parts of "video" and "audio"')
        return header.session_id, header.chunk_index, assembler.finish()

    async def Finish(self, request: workers_pb2.FinishRequest, context: Any) -> workers_pb2.FinishResponse:
        finished = await self._runner.run(lambda _: self._worker.finish(request.session_id))
        return workers_pb2.FinishResponse(
            artifacts=[types_pb2.Artifact(**asdict(file), relative_path=file.name) for file in finished.artifacts],
            audio_health=types_pb2.AudioHealth(**asdict(finished.sound)),
            failures=[workers_pb2.ArtifactFailure(**asdict(failure)) for failure in finished.failures],
            stream_failure=finished.stream_failure,
        )

    async def CloseSession(
        self, request: workers_pb2.VaeServiceCloseSessionRequest, context: Any
    ) -> workers_pb2.VaeServiceCloseSessionResponse:
        was_open = await self._runner.run(lambda _: self._worker.close_session(request.session_id))
        return workers_pb2.VaeServiceCloseSessionResponse(was_open=was_open)


def build(config: VaeConfig) -> ServedWorker:
    """The worker with its service.

    Raises ConfigError if the encoder that the settings name does not work here, CheckpointError for bad weights.
    """
    _try_encoders(config)
    worker = VaeWorker(config)
    runner = VerbRunner("vae")
    return ServedWorker(
        worker=worker,
        runner=runner,
        service_name=SERVICE_NAME,
        register=lambda server: workers_pb2_grpc.add_VaeServiceServicer_to_server(VaeServicer(worker, runner), server),
        libraries=("torch", "diffusers", "av", "safetensors"),
        preview_map=worker.preview_map,
    )


def _try_encoders(config: VaeConfig) -> None:
    """Says at the start what will work. Raises ConfigError if an encoder is named that does not."""
    try:
        name = open_h264_encoder(_PROBE_SIZE, _PROBE_SIZE, config.video_bit_rate, config.video_encoder).name
        AacEncoder()
    except MuxError as error:
        if config.video_encoder is not None:
            raise ConfigError(str(error)) from error
        log.warning("clips have no media stream here, only their lossless artifacts: %s", error)
    else:
        log.info("pictures are encoded by %s", name)


def _to_response(media: Media) -> workers_pb2.DecodeChunkResponse:
    if isinstance(media, StreamStart):
        return workers_pb2.DecodeChunkResponse(init_segment=types_pb2.InitSegment(**asdict(media)))
    made = media.media
    return workers_pb2.DecodeChunkResponse(
        fragment=types_pb2.Fragment(
            data=made.data,
            fragment_index=made.fragment_index,
            chunk_index=media.chunk_index,
            start_ticks=made.start_ticks,
            duration_ticks=made.duration_ticks,
            first_frame=made.first_frame,
            num_frames=made.num_frames,
            num_samples_total=made.num_samples_total,
            is_keyframe=made.is_keyframe,
        )
    )
