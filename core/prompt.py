"""Which prompts are accepted, decided without a tokenizer.

Source: docs/reference/h3-model.md §6.1-§6.2.
"""

from __future__ import annotations

MAX_PROMPT_BYTES = 16_384
"""Longest prompt in UTF-8. It bounds the text rows too: a byte-level tokenizer makes no more tokens than there are
bytes once the text is in Unicode's NFC form, which is at most three times as long.
"""
MAX_PROMPT_TOKENS = 3 * MAX_PROMPT_BYTES

ALLOWED_SPECIAL_TOKENS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
"""Tokens of the H3 tokenizer that a prompt may contain."""

REFUSED_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Control tokens that stand for pictures or chat turns: in a prompt they would break the encoder or change its
meaning.
"""

REFUSED_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Tokens that the tokenizer takes for one sign each although it does not mark them special: of tool calls, source code
and thinking aloud. Like the special ones they would not be read as the text that they look like.
"""


def refused_token(prompt: str) -> str | None:
    """The first control token in a prompt, or None."""
    refused = (*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS)
    found = [(prompt.find(token), token) for token in refused if token in prompt]
    return min(found)[1] if found else None


def control_character(prompt: str) -> int | None:
    """Index of the first control character other than tab, line feed and carriage return, or None."""
    return next((i for i, c in enumerate(prompt) if (c < " " and c not in "\t\n\r") or c == "\x7f"), None)
