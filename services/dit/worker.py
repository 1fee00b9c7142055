"""The DiT worker's verbs on plain tensors; no Ray, no gRPC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from core.budget import memory_budget
from core.geometry import chunk_latent_shapes, chunk_table
from core.request import STREAMING_STRENGTH, clip_violations, preview_violations
from h3stream.errors import DeviceMemoryError, InvalidRequestError, UnsupportedError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec, PreviewSpec
from services.checkpoints.adapter_registry import STREAMING_NAME, read_registry
from services.checkpoints.components import part_path
from services.checkpoints.dit import partition_of
from services.checkpoints.header import read_header, sampled_digest
from services.common.ledger import ResidencyLedger
from services.common.parts import weight_digests
from services.common.preview_map import PreviewMap
from services.common.refusal import refuse
from services.common.residency import DeviceWeights, resolve_device
from services.common.sessions import check_new_session
from services.common.verbs import Cancelled, poll
from services.dit.adaln import NUM_TAGS
from services.dit.adapters import AdapterMix, fit_adapters, load_adapters
from services.dit.config import DitConfig
from services.dit.dense import DenseSampler, DenseSession
from services.dit.kv_cache import KvStats
from services.dit.model import H3Dit
from services.dit.noise import NoiseSegment
from services.dit.preview import Still, StillMaker
from services.dit.refine.refiner import Branch
from services.dit.refine.request import check_adapter_names, check_finite, filled_refinement
from services.dit.refine.room import CacheRooms
from services.dit.refine.verb import AudioRefinement, Refined, RefineInputs, RefineListener
from services.dit.rollout import Rollout
from services.dit.rows import ChunkLatents
from services.dit.weights import open_transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionStats:
    """What a session did."""

    num_noise_forwards: int
    num_clean_forwards: int
    kv: KvStats | None
    """Its cache; a dense session has none."""


class DitWorker:
    """Sessions of the streaming rollout and of the dense sampler over one set of weights."""

    name = "dit"

    def __init__(self, config: DitConfig) -> None:
        """Loads the weights into host memory. Raises CheckpointError if they are not what they should be."""
        self._device = resolve_device(config.device)  # first: a wrong name should not cost minutes of reading
        path = part_path(config.model_directory, "dit", config.dit)
        files = open_transformer(path, config.dit_layout)
        registry = read_registry(config.adapters, config.model_directory)
        fitted = fit_adapters(
            registry,
            files.contents.architecture,
            partition_of(path),
            allow_partial=config.allow_partial_adapters,
        )
        transformer = files.load(config.compute_dtype)
        self._adapters, self.adapters = load_adapters(transformer, fitted)
        self._model = H3Dit(transformer)
        ledger = ResidencyLedger(config.ledger, self.name) if config.ledger else None
        self.weights = DeviceWeights([transformer, self._adapters], self._device, ledger)
        self.parts = (files.part,)
        self.weight_digests = weight_digests("dit", files.checkpoint) | {
            f"adapters/{header.name}": sampled_digest(read_header(header.path)) for header in registry
        }
        self._rooms = CacheRooms(
            self._device,
            directory=config.frozen_caches,
            pinned=not config.no_pinned_caches,
            max_shared_bytes=config.shared_cache_bytes,
        )
        self._refinement = AudioRefinement(self._model, self._adapters, self._device, self._rooms, self.weight_digests)
        self._sessions: dict[str, Rollout | DenseSession] = {}
        self._still_makers: dict[str, StillMaker] = {}

    @property
    def text_dim(self) -> int:
        """Width of the hidden states that the model reads."""
        return self._model.text_dim

    def session_ids(self) -> list[str]:
        """Open sessions."""
        return sorted(self._sessions)

    def open_session(
        self,
        session_id: str,
        clip: ClipSpec,
        context: Tensor,
        token_tags: Tensor,
        cancelled: Cancelled,
        noise: Sequence[NoiseSegment] = (),
    ) -> KvStats | None:
        """Starts a clip and puts its text into the KV cache, whose state it returns; a dense clip has none.

        Opening it again with the same clip and noise changes nothing.
        context: `[E, text_dim]` float32 or bfloat16.  token_tags: `[E]` int64, 0 video, 1 text, 2 audio.
        noise: seeds of a streamed clip's noise; none: the clip's own throughout.
        """
        noise = tuple(noise) or (NoiseSegment(0, clip.seed),)
        opened = self._sessions.get(session_id)
        if opened is None:
            check_new_session(session_id, self._sessions)
            refuse(clip_violations(clip))
            _check_noise(clip, noise)
            _check_text(context, token_tags)
            check_finite(context=context)
            mix = self._mix(clip)
            self.weights.require()
            poll(cancelled)
            budget = memory_budget(clip, len(context), self._model.size, decode_bytes=0)
            log.info("session %s needs %s", session_id, budget)
            with _out_of_memory(f"opening a session of about {budget.device_total} bytes"):
                opened = self._start(clip, noise, mix, context, token_tags)
            self._sessions[session_id] = opened
        elif opened.clip != clip:
            raise InvalidRequestError(f"session {session_id!r} is open with another clip: {opened.clip}")
        elif isinstance(opened, Rollout) and opened.noise != noise:
            raise InvalidRequestError(f"session {session_id!r} is open with another noise: {opened.noise}")
        return _kv_stats(opened)

    def preview(self, session_id: str, spec: PreviewSpec, preview_map: PreviewMap | None) -> str:
        """Has stills made of an open session from now on; returns why there will be none, empty if there will.

        Raises InvalidRequestError for a spec that cannot be, or without a map where there are to be stills.
        """
        self._session(session_id)
        refuse(preview_violations(spec))
        if not spec.max_side:
            self._still_makers.pop(session_id, None)
            return ""
        if preview_map is None:
            raise InvalidRequestError(f"stills of {spec.max_side} pixels need a preview_map, and there is none")
        maker = StillMaker(spec, preview_map, self._device)
        maker.probe()
        self._still_makers[session_id] = maker
        return maker.unavailable_reason

    def sample_chunk(
        self,
        session_id: str,
        index: int,
        on_step: Callable[[int, int], None],
        cancelled: Cancelled,
        on_still: Callable[[Still, int, int], None] | None = None,
    ) -> ChunkLatents:
        """Samples the next chunk; its final latents, float32 on the host. Repeating the last call samples nothing.

        on_step: told the forwards done and their number, after each.  on_still: given the stills that `preview` asked
        for, with the same numbers, behind the step that each shows.
        Of a dense clip that is sampled: any chunk, without a forward.
        """
        rollout = self._session(session_id)
        if isinstance(rollout, DenseSession):
            return rollout.chunk(index)
        latents = rollout.sampled(index)
        if latents is None:
            self.weights.require()
            with _out_of_memory(f"sampling chunk {index}"):
                latents = rollout.sample(index, self._stepped(session_id, rollout, on_step, on_still), cancelled)
        return ChunkLatents(latents.video.cpu(), latents.audio.cpu())

    def latent_shapes(self, session_id: str, index: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the latents of a chunk to restore, by name. Raises UnsupportedError, InvalidRequestError."""
        rollout = self._rollout(session_id)
        return chunk_latent_shapes(rollout.chunk(index), rollout.clip.width, rollout.clip.height)

    def restore_chunk(self, session_id: str, index: int, latents: ChunkLatents) -> None:
        """Takes the next chunk's latents as if it had been sampled here. Repeating the last call changes nothing.

        latents: float32 on the host, of `latent_shapes`.
        Raises InvalidRequestError for what is not finite or not the latents that the chunk stands with already,
        UnsupportedError out of order.
        """
        found = {"video": tuple(latents.video.shape), "audio": tuple(latents.audio.shape)}
        if found != (expected := self.latent_shapes(session_id, index)):
            raise InvalidRequestError(f"the latents of chunk {index} have shapes {found}, expected {expected}")
        check_finite(video=latents.video, audio=latents.audio)
        self._rollout(session_id).restore(index, latents)

    def sample_dense(
        self,
        session_id: str,
        on_step: Callable[[int, int], None],
        cancelled: Cancelled,
        on_still: Callable[[Still, int, int], None] | None = None,
    ) -> None:
        """Samples the whole clip of a dense session. Repeating it samples nothing.

        on_step, on_still: as in `sample_chunk`.
        """
        session = self._session(session_id)
        if not isinstance(session, DenseSession):
            raise UnsupportedError(f"session {session_id!r} streams its clip: sample it chunk by chunk")
        if not session.is_sampled:
            self.weights.require()
            with _out_of_memory("sampling a dense clip"):
                session.sample(self._stepped(session_id, session, on_step, on_still), cancelled)

    def commit_chunk(self, session_id: str, index: int, cancelled: Cancelled) -> KvStats:
        """Runs the clean forward of the chunk sampled last and commits it. Repeating the last call changes nothing."""
        rollout = self._rollout(session_id)
        if not rollout.is_committed(index):
            self.weights.require()
            poll(cancelled)
            with _out_of_memory(f"committing chunk {index}"):
                rollout.commit(index)
        return rollout.cache.stats()

    def filled_refinement(self, clip: ClipSpec, spec: RefineSpec) -> RefineSpec:
        """A refinement with every default filled in. Raises InvalidRequestError for one that cannot be."""
        return filled_refinement(clip, spec, {info.name: info.default_strength for info in self.adapters})

    def refine_audio(
        self,
        clip: ClipSpec,
        spec: RefineSpec,
        latents: ChunkLatents,
        branches: Sequence[Branch],
        listener: RefineListener,
    ) -> Refined:
        """Refines the sound of a finished clip in one call, which needs no session and leaves none.

        latents: float32 on the host.  branches: of the prompt and, where `cfg` is not 1, of the negative prompt.
        Raises InvalidRequestError for what `filled_refinement` refuses and for what is not finite, DeviceMemoryError,
        UnsupportedError, PhaseError, VerbCancelled.
        """
        spec = self.filled_refinement(clip, spec)
        check_finite(video=latents.video, audio=latents.audio)
        for branch in branches:
            _check_text(branch.context, branch.token_tags)
            check_finite(context=branch.context)
        self.weights.require()
        return self._refinement.run(RefineInputs(clip, spec, latents, tuple(branches)), listener)

    def close(self) -> None:
        """Frees what is kept between refinements."""
        self._rooms.clear("the worker ends")

    def close_session(self, session_id: str) -> SessionStats | None:
        """Frees a session and returns what it did; None if there is no such session."""
        session = self._sessions.pop(session_id, None)
        self._still_makers.pop(session_id, None)
        if session is None:
            return None
        num_clean_forwards = session.num_clean_forwards if isinstance(session, Rollout) else 0
        stats = SessionStats(session.num_noise_forwards, num_clean_forwards, _kv_stats(session))
        del session
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the KV cache is worth more to the other workers than to this allocator
        return stats

    def _stepped(
        self,
        session_id: str,
        session: Rollout | DenseSession,
        on_step: Callable[[int, int], None],
        on_still: Callable[[Still, int, int], None] | None,
    ) -> Callable[[int], None]:
        """What a session calls after each forward: tells the step first, then shows it."""
        maker = self._still_makers.get(session_id)
        num_steps = session.clip.steps

        def stepped(done: int) -> None:
            on_step(done, num_steps)
            if maker is None or on_still is None:
                return
            still = maker.after(done, num_steps, session.middle_estimate)
            if still is not None:
                on_still(still, done, num_steps)

        return stepped

    def _start(
        self,
        clip: ClipSpec,
        noise: tuple[NoiseSegment, ...],
        mix: AdapterMix,
        context: Tensor,
        token_tags: Tensor,
    ) -> Rollout | DenseSession:
        if clip.mode == "dense":
            return DenseSession(DenseSampler(self._model, self._adapters, mix, clip, context, token_tags, self._device))
        rollout = Rollout(self._model, self._adapters, mix, clip, len(context), self._device, noise)
        rollout.prefill(context, token_tags)
        return rollout

    def _mix(self, clip: ClipSpec) -> AdapterMix:
        """The adapters of all forwards of a clip.

        Raises InvalidRequestError for names that are not in the registry, UnsupportedError for a streaming clip without
        the streaming adapter.
        """
        named = tuple((adapter.name, adapter.strength) for adapter in clip.adapters)
        check_adapter_names((name for name, _ in named), [adapter.name for adapter in self.adapters])
        if clip.mode == "dense":
            return named
        streaming = next((adapter.name for adapter in self.adapters if adapter.is_streaming), None)
        if streaming is None:
            raise UnsupportedError(
                f"there is no streaming adapter, so only dense clips can be made: give one as {STREAMING_NAME}=PATH"
            )
        if streaming in dict(named):
            raise InvalidRequestError(f"{streaming} is always on in a streaming clip and must not be listed")
        return ((streaming, STREAMING_STRENGTH), *named)

    def _session(self, session_id: str) -> Rollout | DenseSession:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise UnsupportedError(f"there is no session {session_id!r}: open it first") from None

    def _rollout(self, session_id: str) -> Rollout:
        session = self._session(session_id)
        if isinstance(session, DenseSession):
            raise UnsupportedError(
                f"session {session_id!r} has a dense clip, which has no KV cache: nothing to restore or commit"
            )
        return session


def _kv_stats(session: Rollout | DenseSession) -> KvStats | None:
    return session.cache.stats() if isinstance(session, Rollout) else None


def _check_noise(clip: ClipSpec, noise: Sequence[NoiseSegment]) -> None:
    """Raises InvalidRequestError for seeds that cannot be the clip's."""
    if clip.mode == "dense" and noise != (NoiseSegment(0, clip.seed),):
        raise InvalidRequestError("noise names seeds by chunk, but a dense clip is sampled at once, from its own seed")
    num_chunks = len(chunk_table(clip.num_frames))
    first_chunks = [segment.first_chunk for segment in noise]
    if first_chunks[0] != 0:
        raise InvalidRequestError(f"noise begins with chunk {first_chunks[0]}; its first segment must be from chunk 0")
    for before, after in pairwise(first_chunks):
        if not before < after < num_chunks:
            raise InvalidRequestError(
                f"noise has a segment from chunk {after} behind one from chunk {before}; they must ascend up to the "
                f"last chunk, {num_chunks - 1}"
            )


def _check_text(context: Tensor, token_tags: Tensor) -> None:
    if len(context) != len(token_tags):
        raise InvalidRequestError(f"context has {len(context)} tokens and token_tags {len(token_tags)}")
    wrong = sorted(set(token_tags.tolist()) - set(range(NUM_TAGS)))
    if wrong:
        raise InvalidRequestError(f"token_tags holds {wrong}; allowed are {list(range(NUM_TAGS))}")


@contextmanager
def _out_of_memory(doing: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(f"the device ran out of memory while {doing}: {error}") from error
