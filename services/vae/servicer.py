"""VaeService over gRPC: decode the call, run the verb, encode the answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h3stream.codec import clip_spec_from_proto
from h3stream.errors import ConfigError, MuxError
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.incoming import receive_header, receive_tensors
from services.common.tensors import TensorAssembler
from services.common.verbs import Cancelled, VerbRunner
from services.common.worker import ServedWorker
from services.vae.artifacts.artifact_set import ArtifactFailure
from services.vae.artifacts.base import ArtifactFile
from services.vae.config import VaeConfig
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media_lane import StreamStart
from services.vae.refined import DecodedSound, RefinedSound
from services.vae.worker import Media, StreamFailure, VaeWorker, sound_shape

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
        directory = _path(request.artifact_directory)
        names = tuple(request.artifacts)

        def verb(cancelled: Cancelled) -> workers_pb2.VaeServiceOpenSessionResponse:
            failure = self._worker.open_session(request.session_id, clip, directory, names)
            num_decoded = self._worker.num_decoded_chunks(request.session_id)
            return workers_pb2.VaeServiceOpenSessionResponse(stream_failure=failure, num_decoded_chunks=num_decoded)

        return await self._runner.run(verb)

    async def DecodeChunk(
        self, request_iterator: AsyncIterator[workers_pb2.DecodeChunkRequest], context: Any
    ) -> AsyncIterator[workers_pb2.DecodeChunkResponse]:
        header = await receive_header("DecodeChunk", request_iterator)
        shapes = self._worker.latent_shapes(header.session_id, header.chunk_index)
        latents = await receive_tensors("DecodeChunk", request_iterator, TensorAssembler.of_floats(shapes))

        def decode(emit: Callable[[Media], None], cancelled: Cancelled) -> None:
            video, audio = latents["video"], latents["audio"]
            self._worker.decode_chunk(header.session_id, header.chunk_index, video, audio, emit, cancelled)

        async for media in self._runner.stream(decode):
            yield workers_pb2.DecodeChunkResponse(**_payload(media))

    async def DecodeAudio(
        self, request_iterator: AsyncIterator[workers_pb2.DecodeAudioRequest], context: Any
    ) -> AsyncIterator[workers_pb2.DecodeAudioResponse]:
        header = await receive_header("DecodeAudio", request_iterator)
        clip = clip_spec_from_proto(header.clip)
        shapes = dict.fromkeys(("audio", "audio_before", "exact_audio"), sound_shape(clip))
        expected = TensorAssembler.of_floats(shapes, optional=("exact_audio",))
        latents = await receive_tensors("DecodeAudio", request_iterator, expected)
        order = RefinedSound(
            clip=clip,
            artifact_directory=_path(header.artifact_directory),
            artifacts=frozenset(header.artifacts),
            video_file=_path(header.video_file),
            latents_file=_path(header.latents_file),
            audio=latents["audio"],
            audio_before=latents["audio_before"],
            exact_audio=latents.get("exact_audio"),
        )

        def decode(emit: Callable[[Media | DecodedSound], None], cancelled: Cancelled) -> None:
            emit(self._worker.decode_audio(order, emit, cancelled))

        async for made in self._runner.stream(decode):
            if isinstance(made, DecodedSound):
                yield workers_pb2.DecodeAudioResponse(finished=_to_finished(made))
            else:
                yield workers_pb2.DecodeAudioResponse(**_payload(made))

    async def Finish(self, request: workers_pb2.FinishRequest, context: Any) -> workers_pb2.FinishResponse:
        finished = await self._runner.run(lambda _: self._worker.finish(request.session_id))
        return workers_pb2.FinishResponse(
            artifacts=_to_artifacts(finished.artifacts),
            audio_health=types_pb2.AudioHealth(**asdict(finished.sound)),
            failures=_to_failures(finished.failures),
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


def _path(path: str) -> Path | None:
    return Path(path) if path else None


def _payload(media: Media) -> dict[str, Any]:
    """The payload of a response, by the name of its field."""
    if isinstance(media, StreamStart):
        return {"init_segment": types_pb2.InitSegment(**asdict(media))}
    if isinstance(media, StreamFailure):
        return {"stream_failure": media.reason}
    return {"fragment": types_pb2.Fragment(**asdict(media.media), chunk_index=media.chunk_index)}


def _to_artifacts(files: Iterable[ArtifactFile]) -> list[types_pb2.Artifact]:
    return [types_pb2.Artifact(**asdict(file), relative_path=file.name) for file in files]


def _to_failures(failures: Iterable[ArtifactFailure]) -> list[workers_pb2.ArtifactFailure]:
    return [workers_pb2.ArtifactFailure(**asdict(failure)) for failure in failures]


def _to_finished(made: DecodedSound) -> workers_pb2.DecodeAudioFinished:
    exact = made.against_exact
    return workers_pb2.DecodeAudioFinished(
        artifacts=_to_artifacts(made.artifacts),
        failures=_to_failures(made.failures),
        stream_failure=made.stream_failure,
        audio_health=types_pb2.AudioHealth(**asdict(made.sound)),
        audio_health_before=types_pb2.AudioHealth(**asdict(made.sound_before)),
        change=types_pb2.AudioDistance(**asdict(made.change)),
        against_exact=None if exact is None else types_pb2.AudioDistance(**asdict(exact)),
    )
