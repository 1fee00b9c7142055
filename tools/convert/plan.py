"""What a conversion writes: every tensor of the new layout and where its rows come from. No weight is read here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints import audio_vae, dit, dit_modules, text_encoder, video_vae
from services.checkpoints.dit import CLASS_NAME, ISLANDS
from services.checkpoints.dit_modules import DitLayout
from services.checkpoints.identify import PARTS, identify
from services.checkpoints.key_map import Rule, stored_shape
from services.checkpoints.layout import NAMES, Component, Layout, Recognition
from services.checkpoints.model_files import VAES, Vae, VaeFiles, VaeName, open_vae
from services.checkpoints.source import Checkpoint, open_checkpoint
from services.checkpoints.vae_files import STATISTICS, Architecture
from services.dit.weights import open_transformer
from services.vae.weights import latent_statistics
from tools.convert.content import Content, Folded, Parameters, Rows, Unfolded, Values, whole

LAYOUTS: dict[Component, tuple[Layout, ...]] = {
    "dit": ("diffusers", "official", "comfyui"),
    "video_vae": ("diffusers", "official", "comfyui"),
    "audio_vae": ("diffusers", "comfyui"),
    "text_encoder": ("transformers", "comfyui"),
}
"""Layouts that each part can be converted to."""
DTYPES: dict[Component, tuple[str, ...]] = {
    "dit": ("BF16", "F32"),
    "video_vae": ("F32", "F16", "BF16"),
    "audio_vae": ("F32",),
    "text_encoder": ("BF16", "F32"),
}
"""Dtypes that each part can be converted to; the others are not loaded, or lose what matters."""

_LIBRARY_DTYPES = {"BF16": "bfloat16", "F32": "float32"}
"""What transformers calls the dtypes, in a configuration."""

_DERIVED = (
    "The source has no config.json; the one made says what shapes show, and the published model's values for all else."
)


@dataclass(frozen=True)
class Plan:
    """A conversion."""

    component: Component
    """The part of the model."""
    layout: Layout
    """The layout that is written."""
    tensors: dict[str, Content]
    """What is written, by key."""
    config: dict[str, Any] | None
    """The folder's `config.json`; None where a single file is written, or there is nothing to say."""
    settings: dict[str, Any]
    """What decides how the weights are computed with."""
    metadata: dict[str, str]
    """Metadata of the weight files."""
    file_stem: str = "model"
    """How a folder's weight files are called, as who reads this layout expects."""
    notes: tuple[str, ...] = ()
    """What the user should know about the result, in sentences."""

    @property
    def is_folder(self) -> bool:
        """Whether a folder is written; ComfyUI's files are single ones."""
        return self.layout != "comfyui"

    @property
    def has_index(self) -> bool:
        """Whether even a single weight file gets an index.

        The official DiT's fused rows are told from ComfyUI's by there being one (docs/reference/h3-model.md §3.1).
        """
        return (self.component, self.layout) == ("dit", "official")


def make_plan(source: Path, to: Layout, *, layout: str = "auto", dtype: str | None = None) -> Plan:
    """How to convert a file or folder.

    to: the layout that is wanted.  layout: the one that a DiT is in, where its files do not tell.
    dtype: of the weights, where it shall change; modules that must stay float32 do.
    Raises CheckpointError for files that are not in order or cannot be converted, ConfigError for what is asked for and
    does not exist.
    """
    checkpoint = open_checkpoint(source)
    recognition = identify(checkpoint)
    if recognition is None:
        raise CheckpointError(f"{source} is not recognised as any part of the model")
    component = recognition.component
    if component not in LAYOUTS:
        raise CheckpointError(
            f"{source} is an adapter ({recognition.layout} format), and those are taken in every format as they are"
        )
    if recognition.refusal is not None:
        raise CheckpointError(f"{source} {recognition.refusal}")
    if to not in LAYOUTS[component]:
        known = " and ".join(LAYOUTS[component])
        official = f"; the official repository has {LAYOUTS[component][0]}" if to == "official" else ""
        raise ConfigError(f"--to is {to!r}, but the layouts of the {NAMES[component]} are {known}{official}")
    if dtype is not None and dtype not in DTYPES[component]:
        raise ConfigError(
            f"--dtype is {dtype!r}, but the {NAMES[component]} is converted to {' or '.join(DTYPES[component])} only"
        )
    if layout != "auto" and component != "dit":
        raise ConfigError(f"--layout is for a DiT; {source} is the {NAMES[component]} ({recognition.layout} layout)")
    match component:
        case "dit":
            return _dit_plan(source, to, layout, dtype)
        case "video_vae" | "audio_vae":
            return _vae_plan(component, source, to, dtype)
        case _:
            return _text_encoder_plan(checkpoint, recognition, to, dtype)


def check_result(plan: Plan, source: Path, written: Checkpoint, folder: Path) -> tuple[str, ...]:
    """Whether the files that a plan makes are read as what was converted, by their headers.

    folder: the one that the result will lie in; a VAE's single file is known by a `config.json` beside it.
    Returns what whoever loads them must know. Raises CheckpointError if they would be read as another model: a single
    file tells shapes and nothing else, so what a configuration said beside the source would be lost.
    """
    recognition = identify(written)
    assert recognition is not None, plan.layout
    assert (recognition.component, recognition.layout) == (plan.component, plan.layout), recognition
    if plan.component == "video_vae" or plan.component == "audio_vae":
        return _check_vae(VAES[plan.component], plan, source, written, folder)
    faults = PARTS[plan.component].file_problems(written, recognition)
    if faults:
        raise CheckpointError(f"{source} cannot be converted to the {plan.layout} layout: {'; '.join(faults)}")
    if plan.component == "dit":
        found = dataclasses.asdict(dit.describe(written, _dit_layout(plan.layout)).architecture)
    else:
        found = _text_settings(text_encoder.describe(written, recognition).settings)
    if lost := _differences(plan.settings, found):
        raise CheckpointError(
            f"{source} cannot be converted to the {plan.layout} layout, which tells shapes only: {lost}"
        )
    return ()


def _check_vae(vae: Vae, plan: Plan, source: Path, written: Checkpoint, folder: Path) -> tuple[str, ...]:
    faults = vae.faults(written, plan.layout, Architecture(plan.settings, None, ()))
    if faults:
        raise CheckpointError(f"{source} cannot be converted to the {plan.layout} layout: {'; '.join(faults)}")
    try:
        lost = _differences(plan.settings, _vae_settings(vae, vae.architecture(written, plan.layout, [folder]).config))
    except CheckpointError:
        lost = "its sizes cannot be told"
    return (f"Keep the config.json of this model beside it, or in --model DIR: without it {lost}.",) if lost else ()


def _differences(settings: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} is {value}, read as {found[name]}" for name, value in settings.items() if found[name] != value
    )


def _vae_settings(vae: Vae, config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_tuples(config[name]) for name in vae.PUBLISHED.defaults}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that text is computed with: its positions are equal on all three axes, however those share frequencies."""
    sizes = {name: settings[name] for name in (*text_encoder.SIZES, "num_hidden_layers")}
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    return {
        **sizes,
        "hidden_act": settings.get("hidden_act", "silu"),
        "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
        "rope_theta": settings.get("rope_theta", rope.get("rope_theta")),
        "rope_type": rope.get("rope_type", "default"),
    }


# ---- DiT ------------------------------------------------------------------------------------------------------------


def _dit_plan(source: Path, to: Layout, layout: str, dtype: str | None) -> Plan:
    files = open_transformer(source, layout)
    tensors, sizes = files.checkpoint.tensors, files.contents.architecture
    parameters, inv_freq = Parameters(tensors, files.contents.key_map), dit.stored_inv_freq(files.checkpoint)
    rules = dit_modules.key_map(_dit_layout(to), sizes.num_layers, sizes.num_refiner_layers, sizes.num_attention_heads)

    def content(rule: Rule) -> Content:
        if not rule.targets:  # the rotary frequencies, which diffusers' layout does not have
            shape = (sizes.rope_freq_dim,)
            return (
                Values(sizes.inv_freq(), shape, "F32") if inv_freq is None else Rows((whole(inv_freq),), shape, "F32")
            )
        is_island = rule.targets[0].startswith(ISLANDS)
        return parameters.rows(rule, stored_shape(rule, files.contents.shapes), None if is_island else dtype)

    config = files.checkpoint.config or {}
    if config.get("_class_name") != CLASS_NAME:
        config = {"_class_name": CLASS_NAME, **dataclasses.asdict(sizes)}
    return Plan(
        component="dit",
        layout=to,
        tensors={key: content(rule) for key, rule in rules.items()},
        config=None if to == "comfyui" else config,
        settings=dataclasses.asdict(sizes),
        metadata={"format": "pt"},
        file_stem="diffusion_pytorch_model" if to == "diffusers" else "model",
        notes=() if config == files.checkpoint.config or to == "comfyui" else (_DERIVED,),
    )


def _dit_layout(name: str) -> DitLayout:
    return next(layout for layout in get_args(DitLayout) if layout == name)


# ---- VAEs -----------------------------------------------------------------------------------------------------------


def _vae_plan(component: VaeName, source: Path, to: Layout, dtype: str | None) -> Plan:
    files = open_vae(component, source, None)
    config = files.architecture.config
    statistics = latent_statistics(files, config["latent_channels"])
    tensors = dict(_video_tensors(files, to, dtype) if component == "video_vae" else _audio_tensors(files, to))
    if to == "comfyui":
        for key, values in zip(STATISTICS, (statistics.mean, statistics.std), strict=True):
            tensors[key] = Values(values, (len(values),), "F32")
    told = dict(zip(STATISTICS, (statistics.mean, statistics.std), strict=True))
    return Plan(
        component=component,
        layout=to,
        tensors=tensors,
        config=None if to == "comfyui" else {**config, **told, "_class_name": VAES[component].PUBLISHED.name},
        settings=_vae_settings(VAES[component], config),
        metadata={"format": "pt"},
        file_stem="model" if to == "official" else "diffusion_pytorch_model",
        notes=tuple(_vae_notes(files, to)),
    )


def _video_tensors(files: VaeFiles, to: Layout, dtype: str | None) -> Iterator[tuple[str, Content]]:
    config = files.architecture.config
    shapes = video_vae.parameter_shapes(config)
    parameters = Parameters(files.checkpoint.tensors, video_vae.key_map(files.layout, config))
    for key, rule in video_vae.key_map(to, config).items():
        if key == video_vae.MASK_TOKEN:
            width = shapes["decoder.proj_in.bias"][0]
            yield key, Values((0.0,) * width, (1, 1, width), dtype or "F32")
        elif rule.targets and rule.targets[0] in parameters:
            yield key, parameters.rows(rule, stored_shape(rule, shapes), dtype)


def _audio_tensors(files: VaeFiles, to: Layout) -> Iterator[tuple[str, Content]]:
    config, stored = files.architecture.config, files.checkpoint.tensors
    parameters = Parameters(stored, audio_vae.key_map(files.layout, config))
    shapes = audio_vae.parameter_shapes(config, is_folded=to == "comfyui")
    for key, shape in shapes.items():
        weight, _, half = key.rpartition("_")
        if key in parameters:
            yield key, parameters.rows(Rule((key,)), shape, None)
        elif f"{key}_g" in parameters:
            yield key, Folded(stored[f"{key}_g"], stored[f"{key}_v"])
        elif half in ("g", "v") and weight in parameters:
            yield key, Unfolded(stored[weight], is_norm=half == "g")


def _vae_notes(files: VaeFiles, to: Layout) -> Iterator[str]:
    if files.architecture.source is None and to != "comfyui":
        yield _DERIVED
    if not any(key.startswith("encoder.") for key in files.checkpoint.tensors):
        yield "The source has no encoder, so the result has none either: it decodes only."
    if files.component == "audio_vae" and (files.layout == "comfyui") != (to == "comfyui"):
        if to == "comfyui":
            yield "Weight norm is folded into plain weights; the norms and directions cannot be told from them again."
        else:
            yield "Weight norm is made from plain weights: it computes them again, but is not what they were made from."


# ---- text encoder ---------------------------------------------------------------------------------------------------


def _text_encoder_plan(checkpoint: Checkpoint, recognition: Recognition, to: Layout, dtype: str | None) -> Plan:
    faults = text_encoder.file_problems(checkpoint, recognition)
    if faults:
        raise CheckpointError(f"{checkpoint.path} is not in order: {'; '.join(faults)}")
    contents = text_encoder.describe(checkpoint, recognition)
    if contents.is_nvfp4:
        raise CheckpointError(
            f"{checkpoint.path} has 4-bit weights, made together with its norms, which no other layout holds; convert "
            "the BF16 weights"
        )
    is_cut = "comfyui" in (recognition.layout, to)  # which has no names for what H3 does not read
    keys = _text_encoder_keys(checkpoint, recognition, contents, to, is_cut=is_cut)
    parameters = Parameters(checkpoint.tensors, {key: Rule((key,)) for key in keys})
    tensors: dict[str, Content] = {
        new: parameters.rows(Rule((key,)), checkpoint.tensors[key].info.shape, dtype) for key, new in keys.items()
    }
    index = contents.settings["num_hidden_layers"]
    said = {} if index == text_encoder.DEFAULT_HIDDEN_STATE_INDEX else {text_encoder.HIDDEN_STATE_INDEX_KEY: index}
    config = checkpoint.config or {"model_type": "qwen3_vl", "text_config": contents.settings, **said}
    if dtype is not None:
        config = {**config, "dtype": _LIBRARY_DTYPES[dtype]}
    num_left = len(checkpoint.tensors) - len(tensors)
    notes = (f"{num_left} tensors above layer {index - 1} are left out: H3 reads none of them.",) if num_left else ()
    return Plan(
        component="text_encoder",
        layout=to,
        tensors=tensors,
        config=None if to == "comfyui" else config,
        settings=_text_settings(contents.settings),
        metadata={"format": "pt", **{key: str(value) for key, value in said.items()}},
        notes=notes if checkpoint.config or to == "comfyui" else (*notes, _DERIVED),
    )


def _text_encoder_keys(
    checkpoint: Checkpoint, recognition: Recognition, contents: text_encoder.Contents, to: Layout, *, is_cut: bool
) -> dict[str, str]:
    """Keys of what is kept, and what they become.  is_cut: whether layers that H3 does not read are left out."""
    old, new = text_encoder.NAMES[recognition.layout], text_encoder.NAMES[to]
    keys = {}
    for key in checkpoint.tensors:
        if key.startswith(old.vision):
            keys[key] = new.vision + key.removeprefix(old.vision)
        elif key in contents.key_map or not is_cut:
            keys[key] = new.language + key.removeprefix(old.language) if key.startswith(old.language) else key
    return keys
