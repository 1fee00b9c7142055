"""The DiT worker's verbs on plain tensors; no Ray, no gRPC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from core.budget import memory_budget
from core.request import clip_violations
from h3stream.errors import DeviceMemoryError, InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.checkpoint import header_digest, shard_files
from services.common.ledger import ResidencyLedger
from services.common.refusal import refuse
from services.common.residency import DeviceWeights, resolve_device
from services.common.verbs import Cancelled, VerbCancelled
from services.dit.adaln import NUM_TAGS
from services.dit.adapters import AdapterBank, AdapterMix, find_adapter, load_raven_adapter
from services.dit.config import DitConfig
from services.dit.kv_cache import KvStats
from services.dit.model import CausalDit
from services.dit.rollout import Rollout
from services.dit.rows import ChunkLatents
from services.dit.weights import load_transformer

log = logging.getLogger(__name__)

RAVEN = "raven"
STREAMING_MIX: AdapterMix = ((RAVEN, 1.0),)
"""Streaming was distilled into the RAVEN adapter: it is always on, at full strength."""


@dataclass(frozen=True)
class SessionStats:
    """What a session did."""

    num_noise_forwards: int
    num_clean_forwards: int
    kv: KvStats
    """Its cache."""


class DitWorker:
    """Sessions of the streaming rollout over one set of weights."""

    name = "dit"

    def __init__(self, config: DitConfig) -> None:
        """Loads the weights into host memory. Raises CheckpointError if they are not what they should be."""
        directory = config.model_directory / "transformer"
        adapter_path = config.adapter or find_adapter(config.model_directory)
        transformer = load_transformer(directory, config.compute_dtype)
        self._adapters = AdapterBank(transformer, {RAVEN: load_raven_adapter(adapter_path, transformer)})
        self._model = CausalDit(transformer)
        self._device = resolve_device(config.device)
        ledger = ResidencyLedger(config.ledger, self.name) if config.ledger else None
        self.weights = DeviceWeights([transformer, self._adapters], self._device, ledger)
        self.weight_digests = {
            f"{path.parent.name}/{path.name}": header_digest(path) for path in (*shard_files(directory), adapter_path)
        }
        self._sessions: dict[str, Rollout] = {}

    @property
    def text_dim(self) -> int:
        """Width of the hidden states that the model reads."""
        return self._model.text_dim

    def session_ids(self) -> list[str]:
        """Open sessions."""
        return sorted(self._sessions)

    def open_session(
        self, session_id: str, clip: ClipSpec, context: Tensor, token_tags: Tensor, cancelled: Cancelled
    ) -> KvStats:
        """Starts a clip and puts its text into the KV cache. Opening it again with the same clip changes nothing.

        context: `[E, text_dim]` float32 or bfloat16.  token_tags: `[E]` int64, 0 video, 1 text, 2 audio.
        """
        opened = self._sessions.get(session_id)
        if opened is None:
            if not session_id:
                raise InvalidRequestError("session_id is empty")
            refuse(clip_violations(clip))
            _check_text(context, token_tags)
            self.weights.require()
            if cancelled():
                raise VerbCancelled
            budget = memory_budget(clip, len(context), self._model.size, decode_bytes=0)
            log.info("session %s needs about %d bytes beside the weights: %s", session_id, budget.device_total, budget)
            with _out_of_memory(f"opening a session of about {budget.device_total} bytes"):
                opened = Rollout(self._model, self._adapters, STREAMING_MIX, clip, len(context), self._device)
                opened.prefill(context, token_tags)
            self._sessions[session_id] = opened
        elif opened.clip != clip:
            raise InvalidRequestError(f"session {session_id!r} is open with another clip: {opened.clip}")
        return opened.cache.stats()

    def sample_chunk(
        self, session_id: str, index: int, on_step: Callable[[int, int], None], cancelled: Cancelled
    ) -> ChunkLatents:
        """Samples the next chunk; its final latents, float32 on the host. Repeating the last call samples nothing.

        on_step: told the forwards done and their number, after each.
        """
        rollout = self._session(session_id)
        latents = rollout.sampled(index)
        if latents is None:
            self.weights.require()
            with _out_of_memory(f"sampling chunk {index}"):
                latents = rollout.sample(index, lambda done: on_step(done, rollout.clip.steps), cancelled)
        return ChunkLatents(latents.video.cpu(), latents.audio.cpu())

    def commit_chunk(self, session_id: str, index: int, cancelled: Cancelled) -> KvStats:
        """Runs the clean forward of the chunk sampled last and commits it. Repeating the last call changes nothing."""
        rollout = self._session(session_id)
        if not rollout.is_committed(index):
            self.weights.require()
            if cancelled():
                raise VerbCancelled
            with _out_of_memory(f"committing chunk {index}"):
                rollout.commit(index)
        return rollout.cache.stats()

    def close_session(self, session_id: str) -> SessionStats | None:
        """Frees a session and returns what it did; None if there is no such session."""
        rollout = self._sessions.pop(session_id, None)
        if rollout is None:
            return None
        stats = SessionStats(rollout.num_noise_forwards, rollout.num_clean_forwards, rollout.cache.stats())
        del rollout
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the KV cache is worth more to the other workers than to this allocator
        return stats

    def _session(self, session_id: str) -> Rollout:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise UnsupportedError(f"there is no session {session_id!r}: open it first") from None


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
