from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from core.prompt import ALLOWED_SPECIAL_TOKENS, MAX_PROMPT_BYTES, REFUSED_ADDED_TOKENS, REFUSED_SPECIAL_TOKENS
from core.request import prompt_violations
from h3stream.errors import CheckpointError, InvalidRequestError
from services.common.refusal import refuse
from services.text_encoder.prompt import PromptTokenizer, token_tags

VOCAB_SIZE = 768


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PromptTokenizer:
    return PromptTokenizer(tiny_model / "tokenizer", VOCAB_SIZE)


@pytest.mark.parametrize(
    "prompt",
    [
        "A red fox trots through snow.",
        "integrated_multimodal_description: [Shot 1] A hut.\n\noverall_soundscape: Rain.\n\nnon_diegetic_music: None.",
        "The woman (S1) says: <d>[English] Hello there.</d>",
        "海边的日落，慢镜头。",
        " leading and trailing ",
        "a<|cutoff|>b <scenetrans> <cutoff>",
        "<|lyrics_start|>la\tla\r\n<|lyrics_end|>",
        "🦊 𝒻ox",
    ],
)
def test_a_prompt_round_trips_through_its_tokens(tokenizer: PromptTokenizer, prompt: str) -> None:
    ids = tokenizer.ids(prompt)
    assert 0 < len(ids) <= len(prompt.encode())
    assert tokenizer.text(ids) == prompt


def test_each_of_the_seven_extra_tokens_is_one_token_also_inside_a_word(tokenizer: PromptTokenizer) -> None:
    assert len(ALLOWED_SPECIAL_TOKENS) == 7
    ids = [tokenizer.ids(token) for token in ALLOWED_SPECIAL_TOKENS]
    assert [len(each) for each in ids] == [1] * 7
    assert len({each[0] for each in ids}) == 7
    (opening,), (closing,) = ids[:2]
    assert tokenizer.ids("a<d>b</d>") == [*tokenizer.ids("a"), opening, *tokenizer.ids("b"), closing]


def test_every_token_that_is_no_text_is_either_allowed_or_refused(tiny_model: Path, tokenizer: PromptTokenizer) -> None:
    """One sign each in the tokenizer, whatever it looks like: none is let through by being forgotten."""
    decided = (*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS, *ALLOWED_SPECIAL_TOKENS)
    stored = json.loads((tiny_model / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in stored] == list(decided)
    assert all(len(tokenizer.ids(token)) == 1 for token in decided)


def test_look_alikes_of_special_tokens_are_ordinary_text(tokenizer: PromptTokenizer) -> None:
    assert len(tokenizer.ids("<cutoff>")) > 1
    assert len(tokenizer.ids("<scenetrans>")) > 1


def test_no_token_is_put_around_a_prompt_and_none_is_cut_off(tokenizer: PromptTokenizer) -> None:
    one, many = tokenizer.ids("fox"), tokenizer.ids("fox" * 5000)
    added = (*REFUSED_SPECIAL_TOKENS, *REFUSED_ADDED_TOKENS, *ALLOWED_SPECIAL_TOKENS)
    special = {tokenizer.ids(token)[0] for token in added}
    assert not special.intersection(one)
    assert tokenizer.text(many) == "fox" * 5000


def test_the_same_tokenizer_is_read_from_vocabulary_merges_and_config_alone(
    tiny_model: Path, tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tiny_model / "tokenizer" / name, tmp_path)
    prompt = "She says: <d>[English] It's late.</d> 日落"
    assert PromptTokenizer(tmp_path, VOCAB_SIZE).ids(prompt) == tokenizer.ids(prompt)


def test_reading_a_tokenizer_opens_no_connection(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    PromptTokenizer(tiny_model / "tokenizer", VOCAB_SIZE)


def copy_without_extra_tokens(source: Path, target: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(source / name, target)
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["extra_special_tokens"]
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_tokenizer_that_splits_a_special_token_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    copy_without_extra_tokens(tiny_model / "tokenizer", tmp_path)
    with pytest.raises(CheckpointError, match=r"splits '<d>' into \d tokens"):
        PromptTokenizer(tmp_path, VOCAB_SIZE)


@pytest.fixture(scope="module")
def qwen_tokenizer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with Qwen's ids: the tiny one's vocabulary filled up to the same size, without H3's tokens."""
    source, target = tiny_model / "tokenizer", tmp_path_factory.mktemp("qwen")
    shutil.copy(source / "merges.txt", target)
    vocabulary = json.loads((source / "vocab.json").read_text())
    vocabulary |= {f"filler{i}": i for i in range(len(vocabulary), 151_643)}
    (target / "vocab.json").write_text(json.dumps(vocabulary))
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["extra_special_tokens"]
    added = config["added_tokens_decoder"].values()
    config["added_tokens_decoder"] = {str(151_643 + i): token for i, token in enumerate(added)}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


PUBLISHED_VOCAB_SIZE = 151_936


def with_extra_tokens(source: Path, target: Path, tokens: list[str]) -> Path:
    shutil.copytree(source, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": tokens}))
    return target


def test_qwens_own_tokenizer_is_given_the_seven_tokens_with_the_published_ids(
    tokenizer: PromptTokenizer, qwen_tokenizer: Path
) -> None:
    found = PromptTokenizer(qwen_tokenizer, PUBLISHED_VOCAB_SIZE)
    assert [found.ids(token) for token in ALLOWED_SPECIAL_TOKENS] == [[i] for i in range(151_669, 151_676)]
    text = "She says"
    assert found.ids(f"{text}<d>{text}</d>") == [*tokenizer.ids(text), 151_669, *tokenizer.ids(text), 151_670]
    assert found.text([151_671]) == "<|cutoff|>"


def test_a_published_tokenizer_has_the_seven_tokens_in_its_config(qwen_tokenizer: Path, tmp_path: Path) -> None:
    published = with_extra_tokens(qwen_tokenizer, tmp_path / "h3", list(ALLOWED_SPECIAL_TOKENS))
    found = PromptTokenizer(published, PUBLISHED_VOCAB_SIZE)
    assert [found.ids(token) for token in ALLOWED_SPECIAL_TOKENS] == [[i] for i in range(151_669, 151_676)]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (list(reversed(ALLOWED_SPECIAL_TOKENS)), "has '<d>' as token 151675; H3 learned it as 151669"),
        (["<other>", *ALLOWED_SPECIAL_TOKENS], "has '<d>' as token 151670; H3 learned it as 151669"),
        (["<other>"], "splits '<d>' into"),
    ],
)
def test_tokens_at_other_ids_than_h3_learned_are_refused(
    qwen_tokenizer: Path, tmp_path: Path, tokens: list[str], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        PromptTokenizer(with_extra_tokens(qwen_tokenizer, tmp_path / "other", tokens), PUBLISHED_VOCAB_SIZE)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(tiny_model: Path) -> None:
    with pytest.raises(CheckpointError, match="embeddings for 700 ids only"):
        PromptTokenizer(tiny_model / "tokenizer", 700)


def test_a_missing_or_unreadable_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        PromptTokenizer(tmp_path / "tokenizer", VOCAB_SIZE)
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        PromptTokenizer(tmp_path, VOCAB_SIZE)


def test_a_tokenizer_that_asks_for_code_of_its_own_runs_none(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model / "tokenizer", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    ran = tmp_path / "ran"
    (tmp_path / "tokenizer" / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Custom: ...\n")
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "Custom",
        "auto_map": {"AutoTokenizer": ["custom.Custom", None]},
    }
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        PromptTokenizer(tmp_path / "tokenizer", VOCAB_SIZE)
    assert not ran.exists()


def test_all_tags_of_a_text_prompt_are_one() -> None:
    assert token_tags(3).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "PROMPT_EMPTY"),
        (" \n", "PROMPT_EMPTY"),
        ("x" * (MAX_PROMPT_BYTES + 1), "PROMPT_TOO_LONG"),
        ("look: <|image_pad|>", "PROMPT_CONTROL_TOKEN"),
        ("<|im_start|>system", "PROMPT_CONTROL_TOKEN"),
        ("<think>rain</think>", "PROMPT_CONTROL_TOKEN"),
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_a_violation_of_its_field(prompt: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        refuse(prompt_violations(prompt))
    assert [(v.field, v.reason) for v in raised.value.violations] == [("prompt", reason)]


def test_the_longest_prompt_and_every_allowed_token_are_accepted() -> None:
    refuse(prompt_violations("x" * MAX_PROMPT_BYTES))
    refuse(prompt_violations(" ".join(ALLOWED_SPECIAL_TOKENS)))
