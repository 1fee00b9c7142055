from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.text_encoder.encoder import hidden_states
from services.text_encoder.prompt import PromptTokenizer
from services.text_encoder.weights import load_language_model
from tools.train_tiny import text_encoder, training
from tools.train_tiny.grammar import EXAMPLES, VOCABULARY, understand
from tools.train_tiny.text_encoder import (
    ATTRIBUTES,
    Heads,
    attributes,
    is_right,
    random_prompts,
    random_scenes,
    train_text_encoder,
)
from tools.train_tiny.world import Scene, Thing

NUM_PROMPTS, NUM_STEPS = 200, 4
"""Enough to see that learning begins, not that it ends: how well the model understands is measured in `bench/`."""


def train(directory: Path, work: Path) -> None:
    train_text_encoder(directory, work, 0, num_prompts=NUM_PROMPTS, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    train(directory / "model", directory / "work")
    return directory


@pytest.fixture(scope="module")
def model(made: Path) -> Path:
    return made / "model"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_stopped_run_ends_with_the_same_bytes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = text_encoder.generator

    def stopping(seed: int, *names: object) -> torch.Generator:
        if names[-1] == NUM_STEPS // 2:
            raise KeyboardInterrupt
        return seeded(seed, *names)

    with monkeypatch.context() as patched:
        patched.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
        patched.setattr(text_encoder, "generator", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "model", tmp_path / "work")
    assert torch.load(tmp_path / "work" / "text_encoder.pt", weights_only=True)["step"] == NUM_STEPS // 2
    train(tmp_path / "model", tmp_path / "work")
    assert contents(tmp_path / "model") == contents(model)


def test_the_product_loads_it_and_its_states_have_a_size_near_one(model: Path) -> None:
    language = load_language_model(model / "text_encoder", "auto")
    assert (language.dtype, language.hidden_size) == (torch.bfloat16, 128)
    tokenizer = PromptTokenizer(model / "tokenizer", language.vocab_size)
    last = [hidden_states(language.module, tokenizer.ids(text), torch.device("cpu"))[-1] for text in EXAMPLES]
    assert 0.3 < torch.stack(last).float().square().mean().sqrt() < 3.0


def test_it_is_small(model: Path) -> None:
    sizes = {name: len(content) for name, content in contents(model).items()}
    assert sum(size for name, size in sizes.items() if name.startswith("text_encoder/")) < 1.1e6
    assert sum(size for name, size in sizes.items() if name.startswith("tokenizer/")) < 1e5


def test_every_word_of_the_grammar_is_one_token(model: Path) -> None:
    tokenizer = PromptTokenizer(model / "tokenizer", 2048)
    assert [word for word in VOCABULARY if len(tokenizer.ids(f" {word}")) != 1] == []
    assert [text for text in EXAMPLES if tokenizer.text(tokenizer.ids(text)) != text] == []


def test_training_sees_no_scene_that_is_held_out() -> None:
    for held_out in (False, True):
        random = torch.Generator().manual_seed(2)
        assert {scene.is_held_out for scene in random_scenes(100, random, held_out=held_out)} == {held_out}


def test_each_token_is_asked_for_what_the_prompt_names_up_to_it(model: Path) -> None:
    tokenizer = PromptTokenizer(model / "tokenizer", 2048)
    random = torch.Generator().manual_seed(3)
    prompts = random_prompts(random_scenes(20, random, held_out=True), tokenizer, random)
    num_unasked = 0
    for row, asked, targets in zip(*(tensor.tolist() for tensor in prompts.batch(5, 15)), strict=True):
        for i, (index, target) in enumerate(zip(asked, targets, strict=True)):
            named = understand(tokenizer.text(row[: index + 1]))
            is_asked = i == 0 or not named.is_held_out
            assert target == (attributes(named) if is_asked else [-100] * len(ATTRIBUTES))
            num_unasked += not is_asked
        assert set(row[asked[0] + 1 :]) <= {0}
    assert 0 < num_unasked < 40


def test_what_a_scene_does_not_have_is_neither_asked_nor_wrong() -> None:
    target = attributes(Scene((Thing(2, 5, 1, 3),), background=4, pitch=0, rhythm=0))
    told = dict(zip(ATTRIBUTES, target, strict=True))
    assert [name for name, value in told.items() if value < 0] == [
        *("shape 2", "colour 2", "size 2", "motion 2"),
        "rhythm",
    ]
    assert (told["objects"], told["colour 1"], told["motion 1"], told["background"]) == (0, 5, 3, 4)
    each: list[Any] = list(Heads()(torch.randn(1, 128)))
    for k, value in enumerate(target):
        each[k] = torch.nn.functional.one_hot(torch.tensor([max(value, 0)]), each[k].shape[-1]).float()
    assert is_right(each, torch.tensor([target])).all()
    each[1] = each[1].roll(1, dims=-1)
    assert is_right(each, torch.tensor([target]))[0].tolist() == [True, False] + [True] * 10
