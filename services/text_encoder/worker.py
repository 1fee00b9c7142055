"""The verbs of the text encoder on plain tensors. They run one at a time, on one thread."""

from __future__ import annotations

import torch

from core.request import Violation, prompt_violations
from h3stream.errors import DeviceMemoryError
from services.checkpoints.components import part_path
from services.common.ledger import ResidencyLedger
from services.common.refusal import refuse
from services.common.residency import DeviceWeights, resolve_device
from services.common.verbs import Cancelled, VerbCancelled
from services.text_encoder.config import TextEncoderConfig
from services.text_encoder.embedding_cache import Embedding, EmbeddingCache, content_key
from services.text_encoder.encoder import hidden_states
from services.text_encoder.prompt import PromptTokenizer, token_tags
from services.text_encoder.weights import load_language_model


class TextEncoderWorker:
    """Prompt to hidden states; needs its weights on the device only for prompts that it has not seen."""

    name = "text_encoder"

    def __init__(self, config: TextEncoderConfig) -> None:
        """Loads weights and tokenizer into host memory. Raises CheckpointError if their files are at fault."""
        device = resolve_device(config.device)  # first: a wrong name should not cost minutes of reading
        path = part_path(config.model_directory, "text_encoder", config.text_encoder)
        model = load_language_model(path, config.dtype)
        tokenizer = part_path(config.model_directory, "tokenizer", config.tokenizer)
        self._module = model.module
        self._max_tokens = model.max_tokens
        self._tokenizer = PromptTokenizer(tokenizer, model.vocab_size)
        self._cache = EmbeddingCache(config.embedding_cache_bytes)
        self._dtype = model.dtype
        ledger = None if config.ledger is None else ResidencyLedger(config.ledger, self.name)
        self.weights = DeviceWeights([model.module], device, ledger)
        self.weight_digests = model.digests
        self.parts = (model.part,)

    def session_ids(self) -> list[str]:
        """None: a prompt is one call."""
        return []

    def lookup(self, prompt: str) -> Embedding | None:
        """The embedding of a prompt encoded before, or None. Needs no phase.

        Raises InvalidRequestError for a prompt that cannot be encoded.
        """
        refuse(prompt_violations(prompt))
        return self._cache.get(self._key(prompt))

    def encode(self, prompt: str, cancelled: Cancelled) -> tuple[Embedding, bool]:
        """The embedding of a prompt and whether it was known already.

        Raises InvalidRequestError for a prompt that cannot be encoded, UnsupportedError outside a phase,
        DeviceMemoryError if the forward does not fit, VerbCancelled if the caller has gone before it.
        """
        found = self.lookup(prompt)
        self.weights.require()
        if found is not None:
            return found, True
        if cancelled():
            raise VerbCancelled
        ids = self._tokenizer.ids(prompt)
        refuse(_token_violations(len(ids), self._max_tokens))
        try:
            states = hidden_states(self._module, ids, self.weights.device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the device ran out of memory while encoding {len(ids)} tokens: {error}"
            ) from error
        embedding = Embedding(states, token_tags(len(ids)))
        self._cache.put(self._key(prompt), embedding)
        return embedding, False

    def _key(self, prompt: str) -> str:
        return content_key(prompt, self.weight_digests, self._dtype)


def _token_violations(num_tokens: int, max_tokens: int) -> list[Violation]:
    if num_tokens <= max_tokens:
        return []
    found = f"the prompt has {num_tokens} tokens; the text encoder was made for at most {max_tokens}"
    return [Violation("prompt", found, "PROMPT_TOO_LONG")]
