"""The formats of adapters (LoRA files for the DiT): how each names the modules that it changes.

A format is told by its keys alone: by what stands before a module's name, by whose names of modules it uses, and by
whether the name of an adapter stands within its keys. How rows are ordered follows from the format, never from shapes.
Source: docs/reference/raven-streaming.md §8.1, §8.3; docs/reference/h3-model.md §3.1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from services.checkpoints.dit_modules import DitLayout, module_rows, official_modules
from services.checkpoints.key_map import Rule, summary
from services.checkpoints.printable import printable

Side = Literal["down", "up", "alpha"]
Sides = dict[Side, str]
"""Keys of a module's tensors."""

_LORA_KEY = re.compile(r"(?P<stem>.+)\.lora_(?P<side>A|B|down|up)(?:\.(?P<adapter>[^.]+))?\.weight")
_ALPHA_KEY = re.compile(r"(?P<stem>.+)\.alpha")
_SIDES: dict[str, Side] = {"A": "down", "B": "up", "down": "down", "up": "up"}
_BLOCK = re.compile(r"(?<=[._])(?:0|[1-9][0-9]{0,3})(?=[._])")
"""A block's number within a module's name; in the vocabularies block 0 stands for all."""

_OFFICIAL = official_modules(1, 1)
_FLAT = {official.replace(".", "_"): official for official in _OFFICIAL}
_PUBLISHED = {name for names in _OFFICIAL.values() for name in names}
_MOST_PARTS = 1 + max(name.count(".") for name in _PUBLISHED)

_UNSUPPORTED = {
    "DoRA": (r"\.(dora_scale|lora_magnitude_vector)(\.|$)", "it normalises the weights that it changes"),
    "LoHa": (r"\.hada_[wt][12]", "its update is a product of two low-rank ones"),
    "LoKr": (r"\.lokr_[wt][12]", "its update is a Kronecker product"),
    "OFT": (r"\.b?oft_", "it rotates the weights that it changes"),
    "LoCon": (r"\.lora_mid\.", "its middle matrices (lora_mid) are for convolutions"),
    "full weights": (r"\.(diff|diff_b|set_weight)$", "it holds full differences or replacements of weights"),
    "LoRA with biases": (r"\.lora_[AB](\.[^.]+)?\.bias$", "it changes biases"),
}
"""Kinds of adapters that are refused: their keys, and why."""
_UNSUPPORTED_KEYS = {name: re.compile(pattern) for name, (pattern, _) in _UNSUPPORTED.items()}
_TEXT_ENCODER = re.compile(r"lora_te\d?_|text_encoders?[._]|text_model\.|cond_stage_model\.|conditioner\.")


@dataclass(frozen=True)
class LoraKey:
    """A key of a LoRA's tensor."""

    text: str
    """The key itself."""
    stem: str
    """Prefix and module."""
    side: Side
    """Which of the module's tensors it is."""
    adapter: str | None
    """The adapter's name in it."""


@dataclass(frozen=True)
class Format:
    """One way to name an adapter's tensors."""

    name: str
    """What it is called, as in `h3stream.job.AdapterInfo.format`."""
    prefix: str
    """What stands before a module's name."""
    names: Literal["official", "flat", "published"]
    """Whose names of modules it uses: the official ones, those with "_" for every ".", or the published class's."""
    adapter: Literal["default", "any", "none"]
    """Whether the name of an adapter stands within the keys (`.lora_A.default.weight`): this one, one or none, none."""
    rows: DitLayout = "comfyui"
    """The layout in whose order the rows of fused official modules are."""
    default_alpha: float | Literal["rank"] | None = "rank"
    """Alpha of a file that states none; None: it must state one."""
    alpha_settings: tuple[str, ...] = ("lora_alpha", "alpha")
    """Metadata that may state the alpha of all modules, the first having the say."""
    has_alpha_tensors: bool = True
    """Whether a module may have its own alpha as a tensor."""
    data_types: tuple[str, ...] = ("F32", "BF16", "F16")
    """Dtypes that its matrices may have."""
    partition: str = ""
    """The DiT weights that all its adapters were trained on; empty if there are some of either."""

    def takes(self, key: LoraKey) -> bool:
        """Whether a key is written in this format, whatever the module."""
        if not key.stem.startswith(self.prefix) or (key.side == "alpha" and not self.has_alpha_tensors):
            return False
        # An alpha is the module's, in whichever adapter.
        return self.adapter == "any" or key.side == "alpha" or (key.adapter or "none") == self.adapter

    def rule(self, module: str) -> Rule | None:
        """The published modules that a module of this format stands for, and how its rows become theirs.

        module: without the prefix.  None if the DiT has no such module, whatever its number of blocks.
        """
        number = _BLOCK.search(module)
        in_block_0 = f"{module[: number.start()]}0{module[number.end() :]}" if number else module
        if self.names == "published":
            return Rule((module,)) if in_block_0 in _PUBLISHED else None
        official = _FLAT.get(in_block_0, "") if self.names == "flat" else in_block_0
        if official not in _OFFICIAL:
            return None
        published = (_BLOCK.sub(number[0], name, count=1) if number else name for name in _OFFICIAL[official])
        return Rule(tuple(published), module_rows(official, self.rows))


RAVEN = Format(
    "raven",
    "base_model.model.dit.",
    "official",
    adapter="any",
    default_alpha=128.0,
    alpha_settings=("lora_alpha", "alpha", "raven_lora_alpha"),
    has_alpha_tensors=False,
    data_types=("F32",),
    partition="fl2va",
)
"""The adapter that streaming was distilled into, for text to video; its default alpha is the published file's."""
PEFT = Format("peft", "base_model.model.", "published", adapter="any", default_alpha=None)
FORMATS = (
    RAVEN,
    PEFT,
    Format("diffusers", "transformer.", "published", adapter="none"),
    Format("diffusers", "transformer_ref.", "published", adapter="none", partition="ref2va"),
    Format("comfyui", "diffusion_model.", "official", adapter="none"),
    Format(
        "musubi-tuner",
        "lora_unet_",
        "flat",
        adapter="none",
        alpha_settings=("lora_alpha", "alpha", "ss_network_alpha"),
    ),
    Format("bare", "", "official", adapter="none"),
    # Trained on the official shards as they are, whose qkv rows are in the order of the heads.
    Format("diffsynth", "", "official", adapter="default", rows="official"),
    # The producer's own program takes alpha 8 where a file states none.
    Format("lightx2v", "", "published", adapter="default", default_alpha=8.0),
    # As diffusers saves an adapter of a model instead of a pipeline: alpha is in its metadata.
    Format("diffusers", "", "published", adapter="none", default_alpha=None),
)
"""Formats, of two prefixes the longer first."""


@dataclass(frozen=True)
class Keys:
    """The keys of an adapter, read in its format."""

    format: Format
    """The format."""
    modules: dict[str, Sides]
    """Modules of the DiT, as the file names them without the prefix, each with both halves."""
    unknown_modules: tuple[str, ...]
    """Modules that the DiT does not have, whatever its number of blocks."""
    problems: list[str]
    """What is wrong with the other keys, in phrases."""


def is_adapter(keys: Iterable[str]) -> bool:
    """Whether keys are those of an adapter, of whatever kind and model."""
    return any(_LORA_KEY.fullmatch(key) or _unsupported(key) for key in keys)


def refusal(keys: Collection[str]) -> tuple[str, str] | None:
    """What an adapter of no supported kind is called, and why it is refused, as a clause that goes on from its name."""
    kinds = Counter(filter(None, map(_unsupported, keys)))
    if kinds:
        (name, _), *_ = kinds.most_common(1)
        return name, f"is no plain LoRA but {name}, which is not supported: {_UNSUPPORTED[name][1]}"
    found = [key for key in map(_parse, keys) if key is not None and key.side != "alpha"]
    if any(_TEXT_ENCODER.match(key.stem) for key in found):
        return "text encoder LoRA", "changes the text encoder; only adapters of the DiT are supported"
    formats = set(filter(None, map(_format, found)))
    if len({format_.partition for format_ in formats if format_.name == "diffusers"}) > 1:
        return "diffusers", "holds adapters of both DiT partitions (transformer and transformer_ref); split it in two"
    if formats:
        return None
    if _ends_in_module(found[0].stem):
        known = ", ".join(sorted({format_.name for format_ in FORMATS}))
        return "LoRA", (
            f"names modules of the DiT as no known format does, such as {printable(found[0].text)}, so the order of "
            f"their rows cannot be told; known are {known}"
        )
    num_modules = len({key.stem for key in found})
    return "LoRA", f"is an adapter of another model: 0 of its {num_modules} modules match the DiT's"


def read_keys(keys: Collection[str]) -> Keys:
    """The keys of an adapter that is not refused, read in the format that most of them are in."""
    parsed = {text: _parse(text) for text in keys}
    own = {text: _format(key) for text, key in parsed.items() if key is not None and key.side != "alpha"}
    (format_, _), *_ = Counter(filter(None, own.values())).most_common(1)
    modules: dict[str, Sides] = {}
    adapters: set[str] = set()
    unknown, repeated = [], []
    for text, key in parsed.items():
        if key is None or not format_.takes(key) or own.get(text) not in (format_, None):
            unknown.append(text)
            continue
        sides = modules.setdefault(key.stem.removeprefix(format_.prefix), {})
        if key.side in sides:
            repeated.append(text)
        sides[key.side] = text
        adapters |= {key.adapter or ""} - {""}
    halved = [text for sides in modules.values() if not {"down", "up"} <= sides.keys() for text in sides.values()]
    faults = {"unknown": unknown, "repeated": repeated, "without their other half": halved}
    problems = [f"{len(texts)} {fault}: {summary(texts)}" for fault, texts in faults.items() if texts]
    if len(adapters) > 1:
        problems.append(f"adapters of {len(adapters)} names in one file: {summary(adapters)}")
    whole = {module: sides for module, sides in modules.items() if {"down", "up"} <= sides.keys()}
    known = {module: sides for module, sides in whole.items() if format_.rule(module)}
    return Keys(format_, known, tuple(module for module in whole if module not in known), problems)


def _parse(key: str) -> LoraKey | None:
    if match := _LORA_KEY.fullmatch(key):
        return LoraKey(key, match["stem"], _SIDES[match["side"]], match["adapter"])
    if match := _ALPHA_KEY.fullmatch(key):
        return LoraKey(key, match["stem"], "alpha", None)
    return None


def _format(key: LoraKey) -> Format | None:
    """The format that a key of a module of the DiT is in."""
    fitting = (format_ for format_ in FORMATS if format_.takes(key))
    return next((format_ for format_ in fitting if format_.rule(key.stem.removeprefix(format_.prefix))), None)


def _unsupported(key: str) -> str | None:
    """The unsupported kind of adapter that a key belongs to."""
    return next((name for name, pattern in _UNSUPPORTED_KEYS.items() if pattern.search(key)), None)


def _ends_in_module(stem: str) -> bool:
    """Whether the end of a stem is a module of the DiT, whatever stands before it."""
    parts = stem.split(".")[-_MOST_PARTS:]
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return any(format_.rule(tail) for tail in tails for format_ in FORMATS)
