"""`tokenizer/` and `text_encoder/` of the trained tiny model: the last token's hidden state tells the prompt's scene.

A language model of the published class learns it through linear heads, one an attribute, which are thrown away: what a
linear map can read, the DiT can. A prompt may end anywhere, so other tokens are asked too: for the scene that the
prompt would name if it ended there. The vision tower is random, since a prompt is text alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLTextModel

from services.text_encoder.prompt import PromptTokenizer
from tools.tiny.fill import Normal, fan_in, fill
from tools.tiny.text_encoder import save, text_encoder_config
from tools.tiny.tokenizer import write_tokenizer
from tools.train_tiny.grammar import EXAMPLES, VOCABULARY, describe, plainer, understand
from tools.train_tiny.training import generator, run_steps
from tools.train_tiny.world import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    NUM_OBJECTS,
    PITCHES,
    RHYTHMS,
    SHAPES,
    SIZES,
    Scene,
    random_scene,
)

TEXT_WIDTH = 128
NUM_LAYERS = 3
"""All of them are read."""
NUM_PROMPTS = 60_000
NUM_STEPS = 900
_BATCH = 128
_WARM_UP = 50
_LEARNING_RATE = 3e-3
_PLAINER = 5
"""One scene in so many has much that goes without saying."""
_NUM_EARLIER = 4
"""Tokens of a prompt, at random, that are asked beside its last one."""
_SIZE_WEIGHT = 0.1
"""Of the loss that keeps the mean square of a state near 1."""

ATTRIBUTES = {
    "objects": NUM_OBJECTS,
    **{
        f"{name} {i + 1}": len(values)
        for i in range(NUM_OBJECTS)
        for name, values in (("shape", SHAPES), ("colour", COLOURS), ("size", SIZES), ("motion", MOTIONS))
    },
    "background": len(BACKGROUNDS),
    "pitch": len(PITCHES),
    "rhythm": len(RHYTHMS),
}
"""What a prompt tells, with the number of values of each."""
_UNTOLD = -100
"""Target of an attribute that a scene does not have, as cross entropy knows it."""


def attributes(scene: Scene) -> list[int]:
    """The value of every attribute in the order of `ATTRIBUTES`, -100 where the scene has none."""
    absent = (_UNTOLD,) * len(scene.things[0])
    things = [value for i in range(NUM_OBJECTS) for value in (*scene.things, absent)[i]]
    return [len(scene.things) - 1, *things, scene.background, scene.pitch, scene.rhythm if scene.pitch else _UNTOLD]


class Heads(nn.Module):
    """Linear maps from a hidden state to the attributes of the scene that was named."""

    def __init__(self, width: int = TEXT_WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, sum(ATTRIBUTES.values()))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> tuple[Tensor, ...]:
        """states: `[..., width]`. Returns the logits of each attribute, `[..., values]`."""
        normalised = functional.rms_norm(states.float(), (self.linear.in_features,))
        return tuple(self.linear(normalised).split(list(ATTRIBUTES.values()), dim=-1))


@dataclass(frozen=True)
class Prompts:
    """Tokens and meanings of many prompts, the shortest first."""

    ids: tuple[tuple[int, ...], ...]
    asked: Tensor
    """`[N, 5]` int64: indices of the tokens that are asked, the first of which is a prompt's last."""
    targets: Tensor
    """`[N, 5, 12]` int64: `attributes` of the scene that the prompt names up to there."""

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids `[B, E]`, filled up with 0 on the right, with `asked` and `targets` of the same prompts."""
        chosen = self.ids[start:stop]
        ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
        for row, tokens in zip(ids, chosen, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return ids, self.asked[start:stop], self.targets[start:stop]


def random_scenes(count: int, random: torch.Generator, *, held_out: bool) -> Iterator[Scene]:
    """Random scenes that are, or are not, kept from training; a part of them is plain."""
    while count:
        scene = random_scene(random)
        if int(torch.randint(_PLAINER, (), generator=random)) == 0:
            scene = plainer(scene, random)
        if scene.is_held_out == held_out:
            count -= 1
            yield scene


def random_prompts(scenes: Iterable[Scene], tokenizer: PromptTokenizer, random: torch.Generator) -> Prompts:
    """One prompt of each scene. Of what a part of a prompt names, a scene that is held out is not asked for."""
    found = []
    for scene in scenes:
        ids = tuple(tokenizer.ids(describe(scene, random)))
        asked = [len(ids) - 1, *torch.randint(len(ids), (_NUM_EARLIER,), generator=random).tolist()]
        named = [scene, *(understand(tokenizer.text(list(ids[: index + 1]))) for index in asked[1:])]
        known = [i == 0 or not part.is_held_out for i, part in enumerate(named)]
        targets = [
            attributes(part) if is_known else [_UNTOLD] * len(ATTRIBUTES)
            for part, is_known in zip(named, known, strict=True)
        ]
        found.append((ids, asked, targets))
    found.sort(key=lambda prompt: len(prompt[0]))
    ids_, asked_, targets_ = zip(*found, strict=True)
    return Prompts(ids_, torch.tensor(asked_), torch.tensor(targets_))


def train_text_encoder(
    directory: Path, work: Path, seed: int, *, num_prompts: int = NUM_PROMPTS, num_steps: int = NUM_STEPS
) -> None:
    """Writes `text_encoder/` and `tokenizer/` of a model directory, in place of what is there.

    work: keeps the checkpoint that a stopped run goes on from, `text_encoder.pt`.
    """
    for name in ("tokenizer", "text_encoder"):
        shutil.rmtree(directory / name, ignore_errors=True)
    added_token_ids = write_tokenizer(directory / "tokenizer", _merge_text(seed))
    config = text_encoder_config(
        added_token_ids,
        text={"hidden_size": TEXT_WIDTH, "intermediate_size": 192, "num_hidden_layers": NUM_LAYERS},
        vision={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 1,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    _initialise(model, seed)
    language: Any = Qwen3VLTextModel(config.text_config)
    language.norm = nn.Identity()  # H3 reads what comes before it
    language.load_state_dict(model.model.language_model.state_dict(), strict=False)
    tokenizer = PromptTokenizer(directory / "tokenizer", config.text_config.vocab_size)
    random = generator(seed, "text_encoder", "prompts")
    prompts = random_prompts(random_scenes(num_prompts, random, held_out=False), tokenizer, random)
    _train(language, prompts, num_steps, work / "text_encoder.pt", seed)
    model.model.language_model.load_state_dict(language.state_dict(), strict=False)
    save(model.to(torch.bfloat16), directory / "text_encoder", NUM_LAYERS)


def _merge_text(seed: int) -> list[str]:
    """What the tokenizer's merges are learned from: every word of the grammar becomes a token, and so does what often
    stands at the beginning of a prompt or beside a full stop.
    """
    random = generator(seed, "tokenizer")
    words = [f" {word}" for word in VOCABULARY] * 20
    capitals = [word.capitalize() for word in VOCABULARY] * 2
    return [*words, *capitals, *EXAMPLES, *(describe(random_scene(random), random) for _ in range(600))]


def _initialise(model: nn.Module, seed: int) -> None:
    normal = Normal(seed, "text_encoder")

    def rule(name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.ndim == 1:
            return torch.full(parameter.shape, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
        if "embed_tokens" in name or "pos_embed" in name:
            return normal(name, parameter.shape, 0.5)
        return normal(name, parameter.shape, 0.5 * fan_in(parameter) ** -0.5)

    fill(model, rule)


def _train(language: Any, prompts: Prompts, num_steps: int, checkpoint: Path, seed: int) -> None:
    heads = Heads()
    trained = nn.ModuleDict({"language": language, "heads": heads})
    matrices = [weight for name, weight in language.named_parameters() if weight.ndim == 2 and "embed" not in name]
    taken = {id(weight) for weight in matrices}
    rest = [weight for weight in trained.parameters() if id(weight) not in taken]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)

    def step(number: int) -> dict[str, float]:
        pace = min((number + 1) / _WARM_UP, 2 * (1 - number / num_steps), 1.0)
        for optimiser in (muon, adam):
            for group in optimiser.param_groups:
                group["lr"] = pace * _LEARNING_RATE
        random = generator(seed, "text_encoder", number)
        start = _BATCH * int(torch.randint(len(prompts.ids) // _BATCH, (), generator=random))
        loss, told = _loss(language, heads, *prompts.batch(start, start + _BATCH))
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for optimiser in (muon, adam):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return {"loss": float(loss.detach()), "all right": told}

    run_steps("text encoder", num_steps, step, {"trained": trained, "muon": muon, "adam": adam}, checkpoint)


def _loss(language: Any, heads: Heads, ids: Tensor, asked: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Cross entropy of the attributes with what keeps the states' size, and the share of prompts whose last token tells
    all of them.
    """
    states = language(input_ids=ids, use_cache=False).last_hidden_state  # [B, E, 128]; padding is seen by no token
    answers = states[torch.arange(len(ids))[:, None], asked]  # [B, 5, 128]
    last, earlier = heads(answers[:, 0]), heads(answers[:, 1:].flatten(0, 1))
    size = (answers.square().mean(dim=-1) - 1).square().mean()
    loss = cross_entropy(last, targets[:, 0]) + cross_entropy(earlier, targets[:, 1:].flatten(0, 1))
    return loss + _SIZE_WEIGHT * size, float(is_right(last, targets[:, 0]).all(dim=1).float().mean())


def cross_entropy(each: Sequence[Tensor], targets: Tensor) -> Tensor:
    """The attributes' cross entropies, of all rows, one by one and added up."""
    sums = [functional.cross_entropy(logits, targets[:, k], reduction="sum") for k, logits in enumerate(each)]
    return torch.stack(sums).sum() / len(targets)


def is_right(each: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Whether each attribute was told, `[B, 12]`; one that the scene does not have always was."""
    chosen = torch.stack([logits.argmax(dim=-1) for logits in each], dim=-1)
    return (chosen == targets) | (targets == _UNTOLD)
