from __future__ import annotations

import pytest

from core.prompt import (
    ALLOWED_SPECIAL_TOKENS,
    REFUSED_ADDED_TOKENS,
    REFUSED_SPECIAL_TOKENS,
    control_character,
    refused_token,
)


def test_a_plain_prompt_holds_no_refused_token() -> None:
    assert refused_token("") is None
    assert refused_token("i think < so > of <thinking> and </THINK> and <|think|> and <tool>") is None
    assert refused_token("a <scenetrans> of rain <cutoff> on |a| tin roof <|") is None


@pytest.mark.parametrize("token", ALLOWED_SPECIAL_TOKENS)
def test_the_seven_tokens_of_h3_are_allowed(token: str) -> None:
    assert len(ALLOWED_SPECIAL_TOKENS) == 7
    assert refused_token(f"she says {token} hello") is None


@pytest.mark.parametrize("token", [*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS])
def test_tokens_of_other_uses_are_refused_anywhere(token: str) -> None:
    assert refused_token(token) == token
    assert refused_token(f"rain{token}roof") == token


def test_the_first_refused_token_is_named() -> None:
    assert refused_token("a <think> b <|im_start|> c") == "<think>"
    assert refused_token("a <|vision_end|> b <|im_start|> c <|vision_start|>") == "<|vision_end|>"


def test_control_characters_are_found_but_line_breaks_and_tabs_are_text() -> None:
    assert control_character("a\tb\r\nc é 漢") is None
    assert control_character("ab\x00c\x1b") == 2
    assert control_character("\x7f") == 0
