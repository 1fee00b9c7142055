"""Whether clips of the tiny model show and sound what their prompts say, measured on what a client receives.

    python -m bench.quality [--model DIR] [--mode streaming|dense] [--frames N ...] [--prompts N] [--steps N]
                            [--sink N] [--window N|all] [--seed N] [--out DIR]
    python -m bench.quality --mode refine [...]    a sound before and after its refinement, exact and cached
    python -m bench.quality --table [...]          steps x sink x window
    python -m bench.quality --variety [...]        other seeds for one prompt, other prompts for one seed

Prompts describe combinations of attributes that training never saw. Everything goes through the whole service, and is
read from the decoded stream by code that knows the world but not the scene. Misses are listed. With --out every missed
clip and the first few are left there, as files and as sheets of their frames.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from h3stream import Client, FrozenCacheSpec
from h3stream.embedded import EmbeddedServer
from tools.train_tiny.measure.media import contact_sheet, decoded, decoded_sound
from tools.train_tiny.measure.pictures import read_picture
from tools.train_tiny.measure.quality import (
    Case,
    Measured,
    Summary,
    held_out_cases,
    measured,
    measured_reading,
    summary,
)
from tools.train_tiny.measure.reading import ATTRIBUTES, Reading
from tools.train_tiny.measure.sounds import read_sound
from tools.train_tiny.world import HEIGHT, WIDTH

DEFAULT_STEPS = {"streaming": 4, "dense": 20, "refine": 2}
DRAFT_STEPS = 2
"""Of the streaming pass whose sound is refined."""
TABLE_STEPS, TABLE_SINKS = (1, 2, 4, 8), (1, 2)
TABLE_WINDOWS: tuple[int | Literal["all"], ...] = (1, 2, 4, "all")
VARIETY_SEEDS = 8
SHEET_COLUMNS, SHEET_ROWS = 6, 4
NUM_SHOWN = 6
"""Clips that --out keeps whether they are right or not."""


@dataclass(frozen=True)
class Settings:
    """How clips are sampled."""

    mode: Literal["streaming", "dense"]
    num_frames: int
    steps: int
    sink: int | None
    """None, as a window of None: the model's own."""
    window: int | Literal["all"] | None

    def __str__(self) -> str:
        kept = "" if self.sink is None else f", sink {self.sink}"
        kept += "" if self.window is None else f", window {self.window}"
        return f"{self.mode}, {self.num_frames} frames, {self.steps} steps{kept}"


@dataclass(frozen=True)
class Clip:
    """What came back."""

    job_id: str
    media: bytes
    """The stream."""
    seconds: float
    """Until it was complete."""


def generated(client: Client, case: Case, settings: Settings, artifacts: Sequence[str]) -> Clip:
    """Asks for a clip and waits for it."""
    began = time.perf_counter()
    events = client.generate(
        case.prompt,
        num_frames=settings.num_frames,
        width=WIDTH,
        height=HEIGHT,
        mode=settings.mode,
        steps=settings.steps,
        sink=settings.sink,
        window=settings.window,
        seed=case.seed,
        artifacts=artifacts,
    )
    media = b"".join(event.media for event in events)
    return Clip(events.job_id, media, time.perf_counter() - began)


def measure_all(
    client: Client, cases: Sequence[Case], settings: Settings, out: Path | None
) -> tuple[list[Measured], float]:
    """Every clip measured, and the seconds that the service took for one."""
    clips, seconds = [], 0.0
    for index, case in enumerate(cases):
        clip = generated(client, case, settings, ("stream.mp4",))
        client.delete(clip.job_id)
        seconds += clip.seconds
        clips.append(measured(case, clip.media))
        if out is not None and (index < NUM_SHOWN or not clips[-1].is_right):
            name = f"{settings.mode}-{settings.num_frames}-{index}"
            (out / f"{name}.mp4").write_bytes(clip.media)
            sheet = contact_sheet(clips[-1].frames, SHEET_COLUMNS, SHEET_ROWS)
            Image.fromarray(sheet.numpy()).save(out / f"{name}.png")
        told(f"{settings}: clip {index + 1} of {len(cases)}")
    return clips, seconds / len(cases)


def told(line: str) -> None:
    """Progress, over the line before where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)


def print_quality(settings: Settings, clips: Sequence[Measured], seconds: float) -> None:
    """Shares, seams, sound and misses of some clips."""
    told("")
    found = summary(clips)
    print(f"\n{settings}: {found.count} unseen prompts, {seconds:.2f} s a clip")
    print("  right      " + "  ".join(f"{name} {found.right[name]:.1%}" for name in ATTRIBUTES))
    print(f"  all right  {found.all_right:.1%}")
    print(f"  seams      change over that elsewhere, where things move: {_listed(found.moving)}")
    if not all(clip.is_moving for clip in clips):
        print(f"             change in 8-bit levels, where nothing moves: {_listed(found.still)}")
    print(f"  path       {found.path}, pixels from the motion")
    print(f"  jitter     {found.jitter}, pixels from a step of the motion to the object's")
    print(f"  pitch      {found.pitch}, relative")
    print_sound(found)
    for clip in clips:
        if not clip.is_right:
            wrong = ", ".join(f"{name} is {clip.words[name]}" for name in ATTRIBUTES if not clip.right[name])
            print(f"  miss       {wrong} (seed {clip.case.seed}): {clip.case.prompt}")


def print_sound(found: Summary) -> None:
    """What is heard against what is seen."""
    print(f"  pan        {found.pan}")
    print(f"  clicks     {found.clicks}, frames; {found.num_missed_clicks} missing, {found.num_lone_clicks} too many")
    print(f"  tone       {found.tone}, relative error of the partials' amplitudes")


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def print_table(client: Client, cases: Sequence[Case], num_frames: int) -> None:
    """One line for each number of steps, sink and window."""
    print(f"\n{len(cases)} unseen prompts, {num_frames} frames\n")
    print("| steps | sink | window | all right | worst attribute | cut | blend | border | pan, 95 % | s a clip |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for steps, sink, window in itertools.product(TABLE_STEPS, TABLE_SINKS, TABLE_WINDOWS):
        clips, seconds = measure_all(client, cases, Settings("streaming", num_frames, steps, sink, window), None)
        told("")
        found = summary(clips)
        worst = min(found.right, key=lambda name: found.right[name])
        seams = " | ".join(f"{found.moving[name]:.2f}" for name in ("cut", "blend", "border"))
        print(
            f"| {steps} | {sink} | {window} | {found.all_right:.1%} | {worst} {found.right[worst]:.1%} | {seams} | "
            f"{found.pan.most:.3f} | {seconds:.2f} |",
            flush=True,
        )


def print_refinement(client: Client, cases: Sequence[Case], num_frames: int, steps: int, denoise: float) -> None:
    """The sound of a short streaming pass, before and after."""
    settings = Settings("streaming", num_frames, DRAFT_STEPS, None, None)
    sounds: dict[str, list[Measured]] = {"before": [], "exact": [], "cached": []}
    for index, case in enumerate(cases):
        clip = generated(client, case, settings, ("stream.mp4", "latents.safetensors"))
        frames, sound = decoded(clip.media)
        picture = read_picture(frames)
        sounds["before"].append(measured_reading(case, frames, Reading(picture, read_sound(sound))))
        for name in ("exact", "cached"):
            cache = FrozenCacheSpec(enabled=name == "cached")
            events = client.refine(clip.job_id, steps=steps, audio_denoise=denoise, cache=cache)
            sound = decoded_sound(b"".join(event.refined_media for event in events))
            client.delete(events.job_id)
            sounds[name].append(measured_reading(case, frames, Reading(picture, read_sound(sound))))
        client.delete(clip.job_id)
        told(f"refined {index + 1} of {len(cases)}")
    told("")
    print(f"\n{settings}, then the sound refined with {steps} steps of the base from {denoise}: {len(cases)} prompts")
    found: dict[str, Summary] = {name: summary(clips) for name, clips in sounds.items()}
    for name, value in found.items():
        print(f"  {name}: pitch {value.right['pitch']:.1%} and rhythm {value.right['rhythm']:.1%} right")
        print_sound(value)
    for name in ("exact", "cached"):
        pairs = zip(sounds["before"], sounds[name], strict=True)
        both = [(a.tone_error, b.tone_error) for a, b in pairs if a.tone_error is not None and b.tone_error is not None]
        better = sum(after < before for before, after in both)
        ratio = sum(after for _, after in both) / sum(before for before, _ in both)
        print(f"  {name}: error {ratio:.2f}x of that before, smaller in {better} of {len(both)} clips")


def print_variety(client: Client, cases: Sequence[Case], settings: Settings) -> None:
    """What another seed changes, and what another prompt changes."""
    right, spreads, differences = [], [], []
    for case in cases:
        seeds = [Case(case.scene, case.prompt, case.seed + 7919 * number) for number in range(VARIETY_SEEDS)]
        clips, _ = measure_all(client, seeds, settings, None)
        right += [clip.is_right for clip in clips]
        starts = torch.stack([clip.tracks[0][0] for clip in clips if clip.tracks])
        spreads.append(float(starts.std(dim=0).norm()))
        differences += _differences(clips)
    told("")
    print(f"\n{settings}: {len(cases)} prompts with {VARIETY_SEEDS} seeds each")
    print(f"  attributes of the prompt all right in {sum(right) / len(right):.1%} of {len(right)} clips")
    print(f"  where the first object begins: standard deviation over the seeds {_range(spreads)} pixels")
    print(f"  two clips of one prompt differ by {_range(differences)} 8-bit levels")
    clips, _ = measure_all(client, [Case(c.scene, c.prompt, cases[0].seed) for c in cases], settings, None)
    told("")
    num_right = sum(clip.is_right for clip in clips)
    print(
        f"  the same prompts with one seed: {num_right} of {len(clips)} all right; "
        f"two clips differ by {_range(_differences(clips))} levels"
    )


def _differences(clips: Sequence[Measured]) -> list[float]:
    pairs = itertools.combinations([clip.frames.float() for clip in clips], 2)
    return [float((a - b).abs().mean()) for a, b in pairs]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, mean {sum(values) / len(values):.2f}"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="model directory (models/tiny)")
    parser.add_argument("--mode", choices=tuple(DEFAULT_STEPS), default="streaming")
    parser.add_argument("--frames", type=int, nargs="+", default=[39, 73, 192])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, help="4 when streaming, 20 when dense")
    parser.add_argument("--sink", type=int)
    parser.add_argument("--window", type=lambda text: text if text == "all" else int(text))
    parser.add_argument("--refine-steps", type=int, default=6)
    parser.add_argument("--denoise", type=float, default=0.5, help="how far back a refinement goes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="directory for clips and sheets")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--variety", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    torch.set_grad_enabled(False)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    cases = held_out_cases(arguments.prompts, arguments.seed)
    with EmbeddedServer(arguments.model, told, os.environ) as server, Client(server.address) as client:
        print(f"{arguments.model}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
        for num_frames in arguments.frames:
            run(client, cases, num_frames, arguments)


def run(client: Client, cases: Sequence[Case], num_frames: int, arguments: Any) -> None:
    """What was asked for, at one length."""
    if arguments.mode == "refine":
        print_refinement(client, cases, num_frames, arguments.refine_steps, arguments.denoise)
        return
    if arguments.table:
        print_table(client, cases, num_frames)
        return
    steps = arguments.steps or DEFAULT_STEPS[arguments.mode]
    settings = Settings(arguments.mode, num_frames, steps, arguments.sink, arguments.window)
    if arguments.variety:
        print_variety(client, cases, settings)
        return
    print_quality(settings, *measure_all(client, cases, settings, arguments.out))


if __name__ == "__main__":
    main()
