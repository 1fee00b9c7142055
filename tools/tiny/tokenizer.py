"""`tokenizer/`: a byte-level BPE tokenizer of the Qwen2 form with H3's seven extra tokens.

The vocabulary is small because the merges are learned from a few lines; any text still encodes, byte by byte at worst,
and no published vocabulary is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from core.prompt import ALLOWED_SPECIAL_TOKENS, REFUSED_ADDED_TOKENS, REFUSED_SPECIAL_TOKENS

_MAX_MERGED_TOKENS = 1024
"""Bytes and merges together, before the added tokens."""

_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 cuts text before it merges: contractions, words, single digits, punctuation, line ends, spaces."""

ADDED_TOKENS = (*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS, *ALLOWED_SPECIAL_TOKENS)
"""Every added token in the published order; ids follow the merged vocabulary without a gap."""

TEXT = (
    "integrated_multimodal_description: [Shot 1] Live-action, a medium shot of a kitchen at dawn.",
    "[Shot 2] At 00:03.500, the camera cuts to a close-up of a woman (S1) who says: [English] Hello there.",
    "overall_soundscape: Rain on a window, distant traffic, soft footsteps, the wind in the trees.",
    "non_diegetic_music: A slow piano piece in a minor key, with quiet strings that rise towards the end.",
    "A red fox trots through snow. The picture opens on a lighthouse above the sea while waves break on the rocks.",
    "A paper boat drifts along a small stream; the light is warm, the water is clear and the camera follows it slowly.",
    "An old man and a young girl walk along the beach at sunset, seen from behind, in a wide, steady shot.",
    "Two people talk at a table in a bright room. He laughs and she answers with a smile, then they both stand up.",
    "Cinematic, hand-held, shallow depth of field, natural light, high detail, slow motion, black and white.",
    "The train leaves the station, steam fills the frame, and the whistle sounds twice before the picture fades.",
    "Clouds of colour move across the screen: blue, green, yellow, orange, purple, white and grey.",
    "She doesn't know that it's late; they'll wait, we're here, I've seen it, he'd go and I'm sure you can't.",
)
"""What the merges are learned from where nothing else is given; it runs out of them before the most are made."""


def write_tokenizer(directory: Path, text: Iterable[str] = TEXT) -> dict[str, int]:
    """Writes the component and returns the ids of the added tokens. The same text, the same files: nothing is random.

    text: what the merges are learned from.
    """
    directory.mkdir(parents=True)
    tokenizer = _train(text)
    tokenizer.model.save(str(directory))  # vocab.json and merges.txt, without the added tokens
    first_id = tokenizer.get_vocab_size(with_added_tokens=False)
    for token in ADDED_TOKENS:
        added = AddedToken(token, special=token not in REFUSED_ADDED_TOKENS, normalized=False)
        if added.special:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: first_id + offset for offset, token in enumerate(ADDED_TOKENS)}
    config = json.dumps(_tokenizer_config(ids), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    return ids


def _train(text: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_MERGED_TOKENS,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def _tokenizer_config(ids: dict[str, int]) -> dict[str, object]:
    """As published: Qwen's added tokens with their ids, H3's seven in the list of extra special tokens alone."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[token]): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token not in REFUSED_ADDED_TOKENS,
            }
            for token in (*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": list(ALLOWED_SPECIAL_TOKENS),
        "model_max_length": 262_144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
