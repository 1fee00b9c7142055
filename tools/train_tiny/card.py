"""What stands around the weights of the trained model: its card, defaults for requests, index and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch
import transformers

from tools.tiny.index import COMPONENT_CLASSES, write_json, write_model_index
from tools.train_tiny.grammar import EXAMPLES
from tools.train_tiny.transformer import AUDIO_SHIFT, VIDEO_SHIFT
from tools.train_tiny.world import HEIGHT, MAX_FRAMES, WIDTH

NUM_FRAMES, STEPS, DENSE_STEPS = 73, 4, 20
"""Of a request that says nothing."""
NOTICE = "a tiny model: it knows moving coloured shapes and their sounds, and skips every other word of the prompt"
MAX_BYTES = 16_000_000
"""Most that the whole directory may have: it is kept in the repository."""
CHECKSUMS = "SHA256SUMS"

_HOW_MADE = {
    "transformer": "trained on whole clips; by itself it makes dense clips and refines sound",
    "adapters/raven.safetensors": "trained with it; needed to stream: chunk by chunk, few steps",
    "vae": "decoder begun by formula, then trained; encoder random",
    "audio_vae": "built by formula, not trained",
    "text_encoder": "trained to tell what a prompt says; vision part random",
    "tokenizer": "byte-level BPE over the words of the prompts",
}
"""How each part came about, in the order of the card."""


def write_card(directory: Path, seed: int, figures: Mapping[str, str]) -> None:
    """Writes what a complete model directory holds beside its parts, the checksums last.

    seed: what the model was trained with.  figures: what was measured, by its name, in the order of the card.
    """
    write_model_index(directory)
    defaults = {
        "num_frames": NUM_FRAMES,
        "width": WIDTH,
        "height": HEIGHT,
        "steps": STEPS,
        "dense_steps": DENSE_STEPS,
        "video_shift": VIDEO_SHIFT,
        "audio_shift": AUDIO_SHIFT,
        "seed": 0,
    }
    write_json(directory / "generation_config.json", {**defaults, "notice": NOTICE, "examples": list(EXAMPLES)})
    (directory / "README.md").write_text(_card(directory, seed, figures), encoding="utf-8")
    for file in _files(directory):
        file.chmod(0o644)  # safetensors writes for the owner alone
    sums = "".join(f"{_digest(file)}  {file.relative_to(directory).as_posix()}\n" for file in _files(directory))
    (directory / CHECKSUMS).write_text(sums, encoding="utf-8")


def problems(directory: Path) -> list[str]:
    """What is wrong with the files of a model directory by its own checksums, or by its size; empty if nothing."""
    lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    found = {file.relative_to(directory).as_posix(): file for file in _files(directory)}
    total = sum(file.stat().st_size for file in found.values())
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{name} has no checksum" for name in sorted(found.keys() - expected.keys())),
        *(
            f"{name} is not what its checksum says"
            for name in sorted(expected.keys() & found.keys())
            if _digest(found[name]) != expected[name]
        ),
        *([f"the files have {total} bytes; at most {MAX_BYTES} are allowed"] if total > MAX_BYTES else []),
    ]


def _files(directory: Path) -> list[Path]:
    """Every file but the checksums, sorted by name."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _card(directory: Path, seed: int, figures: Mapping[str, str]) -> str:
    """The model card."""
    examples = "\n".join(f"{number}. {example}" for number, example in enumerate(EXAMPLES, start=1))
    rows = "\n".join(_row(directory, part, how) for part, how in _HOW_MADE.items())
    measured = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    measured = f"\n| measured | |\n| --- | --- |\n{measured}\n" if figures else ""
    return f"""# A tiny model of moving shapes and their sounds

A small model of the classes, file layout and latents of MiniMax H3, with a streaming adapter in RAVEN's file format. It
makes short clips of a world of its own, {WIDTH} x {HEIGHT} pixels at 24 frames a second with stereo sound: one or two
coloured shapes that rest, drift, bounce or orbit before a background, a tone that comes from where the first of them
is, and a click wherever one touches the ground. It shows and sounds what the prompt says; the seed decides what the
prompt leaves open, such as where a shape begins.

**What it is for**: a first clip within seconds on any machine, and tests that can measure whether a clip is right.

**What it is not**:

- It holds none of MiniMax's weights, nor anything made from them, and says nothing of the quality of H3.
- It knows its world and nothing else. Words that are none of that world's are skipped: a fox is a white circle.
- The encoder of its video autoencoder is random and does not match the decoder: a picture that is put in does not come
  out again. The audio autoencoder gives back the world's sounds alone.
- It was trained for this canvas and for clips of up to {MAX_FRAMES} frames.

## Try it

```sh
h3stream examples --model DIR                      # prompts to begin with
h3stream generate --model DIR --example -o clip.mp4
h3stream generate --model DIR -o clip.mp4 "{EXAMPLES[1]}"
```

{examples}

## Parts

| part | class | kB | how it was made |
| --- | --- | --- | --- |
{rows}

## How it was made

`python -m tools.train_tiny DIR --seed {seed}`, from a procedural world whose pictures and sounds are exact functions of
time; no data set was used. Made with torch {_release(torch)}, diffusers {_release(diffusers)} and
transformers {_release(transformers)}. `docs/tiny-model.md` of the h3stream repository describes the world, the words
that prompts may use, the training and how quality is measured.
{measured}
`sha256sum -c {CHECKSUMS}`, run in this directory, tells whether its files are whole.
"""


def _row(directory: Path, part: str, how: str) -> str:
    path = directory / part
    files = [path] if path.is_file() else _files(path)
    kind = COMPONENT_CLASSES[part][1] if part in COMPONENT_CLASSES else "LoRA"
    return f"| `{part}` | {kind} | {sum(file.stat().st_size for file in files) / 1e3:.0f} | {how} |"


def _release(library: object) -> str:
    """Its version without the build."""
    return str(getattr(library, "__version__", "")).partition("+")[0]
