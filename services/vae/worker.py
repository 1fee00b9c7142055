"""The verbs of the VAE worker: sessions, the order of their calls, repeated calls. No Ray, no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.artifacts import REFINED, REFINED_ARTIFACTS, REFINED_LATENTS, WORKER_ARTIFACTS
from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    Chunk,
    chunk_latent_shapes,
    chunk_table,
    num_audio_latents,
)
from core.request import clip_violations
from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.ledger import ResidencyLedger
from services.common.refusal import refuse
from services.common.residency import DeviceWeights, resolve_device
from services.common.sessions import check_new_session
from services.common.verbs import Cancelled, VerbCancelled
from services.vae.artifacts.artifact_set import ArtifactFailure
from services.vae.artifacts.base import ArtifactFile
from services.vae.audio_stream import SoundReport
from services.vae.clip import ClipDecoder
from services.vae.config import VaeConfig
from services.vae.media.muxer import MediaFragment
from services.vae.media_lane import StreamStart
from services.vae.preview_map import find_preview_map
from services.vae.refined import DecodedSound, RefinedDecoder, RefinedSound
from services.vae.weights import load_models


@dataclass(frozen=True)
class ChunkFragment:
    """A fragment and the chunk whose latents completed it."""

    chunk_index: int
    """From 0; -1 where sound alone is decoded."""
    media: MediaFragment
    """The fragment."""


@dataclass(frozen=True)
class StreamFailure:
    """The media stream has ended before the clip."""

    reason: str


Media = StreamStart | ChunkFragment | StreamFailure
"""What decoding gives: the start of the stream once, then fragments, and its early end if it comes to one."""


@dataclass(frozen=True)
class FinishedClip:
    """What a session made."""

    artifacts: list[ArtifactFile]
    """Complete files, in the session's artifact directory."""
    failures: list[ArtifactFailure]
    """Artifacts that could not be written."""
    sound: SoundReport
    """Measurements of the soundtrack."""


@dataclass
class VaeSession:
    """One clip in progress."""

    clip: ClipSpec
    """What is made."""
    artifact_directory: Path | None
    """Where artifacts go; None: none are written."""
    artifacts: frozenset[str]
    """Names of the artifacts to write."""
    decoder: ClipDecoder
    """Its decoders, encoders and muxer."""
    chunks: tuple[Chunk, ...]
    """All chunks of the clip."""
    opening_failure: str
    """Why there is no media stream; empty if there is."""
    num_decoded: int = 0
    """Chunks decoded."""
    last_answer: list[Media] = field(default_factory=list)
    """What the last chunk gave, for a caller that asks again."""
    is_broken: bool = False
    """Whether a call ended half-way, so that the decoders no longer agree with the count."""
    finished: FinishedClip | None = None
    """What the session made, once finished."""


class VaeWorker:
    """Latents to media, for one session or several."""

    name = "vae"

    def __init__(self, config: VaeConfig) -> None:
        """Loads the weights to the host. Raises CheckpointError if they are not what they should be."""
        device = resolve_device(config.device)
        self._config = config
        self._models = load_models(
            config.model_directory,
            _video_dtype(config.video_dtype, device),
            video_path=config.video_vae,
            audio_path=config.audio_vae,
        )
        self.parts = self._models.parts
        self.weight_digests = self._models.digests
        ledger = ResidencyLedger(config.ledger, self.name) if config.ledger is not None else None
        self.weights = DeviceWeights((self._models.video, self._models.audio), device, ledger)
        self.preview_map = find_preview_map(self._models, self.weights, config.preview_map_cache)
        self._sessions: dict[str, VaeSession] = {}

    def session_ids(self) -> list[str]:
        """Open sessions."""
        return list(self._sessions)

    def open_session(
        self,
        session_id: str,
        clip: ClipSpec,
        artifact_directory: Path | None,
        artifacts: Collection[str] = tuple(WORKER_ARTIFACTS),
    ) -> str:
        """Starts a clip; needs no phase. Opening it again with the same arguments changes nothing, unless a call ended
        half-way through a chunk of it: then it starts anew.

        Returns why there will be no media stream; empty if there will be.

        artifacts: names of those to write; others than the worker's own are passed over. Those of a refined clip are
        made as those of a clip are.
        Raises InvalidRequestError for a clip that cannot be or a session that is open with another one. Artifacts that
        cannot be opened are told by `finish`.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.is_broken:
            self.close_session(session_id)
            session = None
        if session is not None:
            asked = clip, artifact_directory, frozenset(artifacts)
            if (session.clip, session.artifact_directory, session.artifacts) != asked:
                raise InvalidRequestError(f"session {session_id!r} is open with another clip, directory or artifacts")
            return session.opening_failure
        check_new_session(session_id, self._sessions)
        refuse(clip_violations(clip))
        self._check_place("artifact_directory", artifact_directory)
        decoder = ClipDecoder(
            self._models,
            self.weights.device,
            clip,
            artifact_directory,
            artifacts,
            video_bit_rate=self._config.video_bit_rate,
            video_encoder=self._config.video_encoder,
        )
        self._sessions[session_id] = VaeSession(
            clip,
            artifact_directory,
            frozenset(artifacts),
            decoder,
            chunk_table(clip.num_frames),
            decoder.stream_failure,
        )
        return decoder.stream_failure

    def num_decoded_chunks(self, session_id: str) -> int:
        """Chunks of a session that are decoded. Raises UnsupportedError for an unknown one."""
        return self._session(session_id).num_decoded

    def latent_shapes(self, session_id: str, chunk_index: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a chunk's "video" `[1, 24, t, H, W]` and "audio" `[1, 32, 2, a]` latents.

        Raises UnsupportedError for an unknown session, InvalidRequestError for a chunk that the clip does not have.
        """
        session = self._session(session_id)
        if not 0 <= chunk_index < len(session.chunks):
            raise InvalidRequestError(
                f"chunk_index is {chunk_index}; the clip has chunks 0 to {len(session.chunks) - 1}"
            )
        return chunk_latent_shapes(session.chunks[chunk_index], session.clip.width, session.clip.height)

    def decode_chunk(
        self,
        session_id: str,
        chunk_index: int,
        video: torch.Tensor,
        audio: torch.Tensor,
        emit: Callable[[Media], None],
        cancelled: Cancelled,
    ) -> None:
        """Decodes a chunk and emits the start of the stream (with chunk 0) and every fragment that has become final.

        The tail chunk completes the stream. Repeating the last chunk emits the same again and needs no phase.
        Raises UnsupportedError out of order or out of phase, and what `ClipDecoder.decode` raises; after one of those,
        or a cancellation half-way, the session is of no more use.
        """
        session = self._session(session_id)
        found = {"video": tuple(video.shape), "audio": tuple(audio.shape)}
        expected = self.latent_shapes(session_id, chunk_index)
        if found != expected:
            raise InvalidRequestError(f"the latents of chunk {chunk_index} have shapes {found}, expected {expected}")
        if session.is_broken:
            raise UnsupportedError(f"session {session_id!r} ended half-way through a chunk; open a new one")
        if chunk_index == session.num_decoded - 1:
            for media in session.last_answer:
                emit(media)
            return
        if chunk_index != session.num_decoded:
            raise UnsupportedError(
                f"chunk {chunk_index} of {session_id!r} is out of order: next is {session.num_decoded}"
            )
        self.weights.require()
        if cancelled():
            raise VerbCancelled  # nothing has been touched, so the session stays good

        answer: list[Media] = []

        def answer_with(media: Media) -> None:
            answer.append(media)
            emit(media)

        failed_before = bool(session.decoder.stream_failure)
        session.is_broken = True  # until the chunk is through
        if chunk_index == 0 and session.decoder.start is not None:
            answer_with(session.decoder.start)
        session.decoder.decode(
            session.chunks[chunk_index],
            video,
            audio,
            lambda fragment: answer_with(ChunkFragment(chunk_index, fragment)),
            cancelled,
        )
        if session.decoder.stream_failure and not failed_before:
            answer_with(StreamFailure(session.decoder.stream_failure))
        session.last_answer = answer
        session.num_decoded += 1
        session.is_broken = False

    def finish(self, session_id: str) -> FinishedClip:
        """Completes the artifacts; needs no phase. Finishing again gives the same answer.

        Raises UnsupportedError before every chunk has been decoded.
        """
        session = self._session(session_id)
        if session.finished is None:
            if session.is_broken or session.num_decoded < len(session.chunks):
                raise UnsupportedError(
                    f"session {session_id!r} has decoded {session.num_decoded} of {len(session.chunks)} chunks"
                )
            decoder = session.decoder
            artifacts = decoder.finish()
            session.finished = FinishedClip(artifacts, decoder.failures, decoder.sound_report())
        return session.finished

    def close_session(self, session_id: str) -> bool:
        """Frees a session and removes its incomplete artifacts; returns whether there was one."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.decoder.close()
        return True

    def decode_audio(self, order: RefinedSound, emit: Callable[[Media], None], cancelled: Cancelled) -> DecodedSound:
        """Decodes a refined sound at once: emits a stream without pictures, its start first, then completes the
        artifacts and returns what was made and measured. Needs no session; a repetition does it all again.

        Raises InvalidRequestError for an order that cannot be, UnsupportedError out of phase, and what
        `RefinedDecoder.decode` raises; then no artifact of this call remains.
        """
        _check_order(order)
        for name in ("artifact_directory", "video_file", "latents_file"):
            self._check_place(name, getattr(order, name))
        self.weights.require()
        decoder = RefinedDecoder(self._models, self.weights.device, order)
        try:
            if decoder.start is not None:
                emit(decoder.start)
            return decoder.decode(lambda fragment: emit(ChunkFragment(-1, fragment)), cancelled)
        finally:
            decoder.close()

    def _check_place(self, name: str, path: Path | None) -> None:
        """Raises InvalidRequestError for a path that is none, or leads out of where artifacts may lie.

        It tells nothing of what is there: a caller must not learn that, nor how the path goes on behind a link.
        """
        if path is None:
            return
        if "\0" in str(path):
            raise InvalidRequestError(f"{name} holds a NUL, which no path does")
        if (root := self._config.artifact_root) is None:
            return
        try:
            is_below = path.resolve().is_relative_to(root.resolve())
        except (OSError, RuntimeError):  # too long, or a circle of links
            is_below = False
        if not is_below:
            raise InvalidRequestError(f"{name} lies outside of the folder that this worker may read and write")

    def _session(self, session_id: str) -> VaeSession:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise UnsupportedError(f"session {session_id!r} is not open") from None


def sound_shape(clip: ClipSpec) -> tuple[int, ...]:
    """Shape of the audio latents of a whole clip, `[1, 32, 2, A]`. Raises InvalidRequestError if it cannot be."""
    refuse(clip_violations(clip))
    return 1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, num_audio_latents(clip.num_frames)


def _check_order(order: RefinedSound) -> None:
    expected = sound_shape(order.clip)
    for name in sorted(order.artifacts - REFINED_ARTIFACTS.keys()):
        raise InvalidRequestError(f"{name!r} is no artifact of a refined sound: {', '.join(REFINED_ARTIFACTS)} are")
    for name, needed, path in (
        (REFINED, "video_file", order.video_file),
        (REFINED_LATENTS, "latents_file", order.latents_file),
    ):
        if name in order.artifacts and path is None:
            raise InvalidRequestError(f"{needed} is empty; {name} needs it")
    sounds = {"audio": order.audio, "audio_before": order.audio_before, "exact_audio": order.exact_audio}
    for name, latents in sounds.items():
        if latents is None:
            continue
        if tuple(latents.shape) != expected:
            raise InvalidRequestError(f"{name} has the shape {tuple(latents.shape)}, expected {expected}")
        if not torch.isfinite(latents).all():
            raise InvalidRequestError(f"{name} holds values that are not finite numbers")


def _video_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "float16": torch.float16}[name]
