"""What the DiT learns from: random scenes of the world with prompts that say them, as latents and hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from services.text_encoder.prompt import PromptTokenizer
from services.text_encoder.weights import load_language_model
from tools.train_tiny.audio_vae import audio_latents
from tools.train_tiny.grammar import describe
from tools.train_tiny.text_encoder import attributes, random_scenes
from tools.train_tiny.training import generator
from tools.train_tiny.transformer import Clips, Lesson
from tools.train_tiny.video_latents import clip_latents
from tools.train_tiny.world import Scene, batch, beginnings

NUM_PROMPTS = 40_000
_ENCODED_AT_ONCE = 256


class Lessons:
    """Prompts with their hidden states, in groups of one length: a step's prompts need no padding."""

    def __init__(self, model: Path, seed: int, num_prompts: int = NUM_PROMPTS) -> None:
        """model: directory with `text_encoder` and `tokenizer`."""
        random = generator(seed, "lessons")
        language_model = load_language_model(model / "text_encoder", "auto")
        tokenizer = PromptTokenizer(model / "tokenizer", language_model.vocab_size)
        groups: dict[int, list[tuple[Scene, list[int]]]] = {}
        for scene in random_scenes(num_prompts, random, held_out=False):
            ids = tokenizer.ids(describe(scene, random))
            groups.setdefault(len(ids), []).append((scene, ids))
        # A length that few prompts have would always bring the same ones.
        kept = [group for _, group in sorted(groups.items()) if len(group) >= num_prompts // 1000]
        self._scenes = [[scene for scene, _ in group] for group in kept]
        self._states = [_encoded(language_model.module, [ids for _, ids in group]) for group in kept]
        self._sizes = torch.tensor([float(len(group)) for group in kept])

    def texts(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, E, 128]` of random prompts of one length, and their scenes' `attributes` `[N, 12]`."""
        scenes, states = self._chosen(count, random)
        return states, torch.tensor([attributes(scene) for scene in scenes])

    def __call__(self, lesson: Lesson, random: torch.Generator) -> Clips:
        """Random clips of a lesson."""
        named, states = self._chosen(lesson.num_clips, random)
        scenes = batch(named, beginnings(named, random))
        return Clips(
            text=states,
            video=clip_latents(scenes, lesson.num_frames),
            audio=audio_latents(scenes, lesson.num_frames),
        )

    def _chosen(self, count: int, random: torch.Generator) -> tuple[list[Scene], Tensor]:
        """Scenes whose prompts have one length, and the hidden states `[N, E, 128]` of those."""
        group = int(torch.multinomial(self._sizes, 1, generator=random))
        chosen = torch.randint(len(self._scenes[group]), (count,), generator=random)
        return [self._scenes[group][i] for i in chosen.tolist()], self._states[group][chosen].float()


@torch.no_grad()
def _encoded(module: nn.Module, prompts: list[list[int]]) -> Tensor:
    """Hidden states `[N, E, 128]` of prompts of one length, as the encoder computes them."""
    parts = torch.tensor(prompts).split(_ENCODED_AT_ONCE)
    return torch.cat([module(input_ids=ids, use_cache=False).last_hidden_state for ids in parts])
