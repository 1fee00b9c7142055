"""The video VAE: how its files are recognised and checked, and what their keys mean.

Layouts: "diffusers" (the class's own names), "official" (`video_vae/source`: attention matrices fused head by head,
gate before value) and "comfyui" (official names with the latent statistics in the same file).
Source: docs/reference/h3-model.md §4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.key_map import Rows, Rule, Shape, identity
from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint
from services.checkpoints.vae_files import (
    STATISTICS,
    Architecture,
    PublishedClass,
    choose,
    class_problems,
    config_files,
    key_problems,
    quantisation,
    series,
    shape_of,
    statistics_problems,
)

PUBLISHED = PublishedClass(
    name="AutoencoderKLMiniMaxH3",
    official_names=("MiniMaxH3VideoVAE", "AutoencoderKLLegacy"),
    official_fields=("clip_length", "token_drop"),
    defaults=MappingProxyType(
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 24,
            "block_out_channels": (128, 256, 256, 512, 512, 1024),
            "layers_per_block": 2,
            "spatial_downsample_factors": (2, 2, 2, 2, 1, 1),
            "temporal_downsample_factors": (1, 2, 2, 1, 1, 1),
            "norm_num_groups": 32,
            "norm_eps": 1e-6,
            "spatial_padding_mode": "reflect",
            "decoder_num_layers": 36,
            "decoder_num_attention_heads": 32,
            "decoder_attention_head_dim": 64,
            "decoder_num_register_tokens": 4,
            "decoder_ffn_mult": 4,
            "decoder_rope_theta": 100.0,
            "decoder_rope_dim_ratio": 0.75,
            "decoder_norm_eps": 1e-5,
            "clip_length": 17,
            "token_drop": 3,
        }
    ),
    max_values=MappingProxyType({"decoder_num_layers": 1024, "layers_per_block": 64}),
    parallel=(("block_out_channels", "spatial_downsample_factors", "temporal_downsample_factors"),),
)
"""The class in diffusers, with the values of the published weights."""

UNUSED_MODULES: tuple[str, ...] = ("encoder", "quant_conv")
"""Modules that decoding never reads; their weights stay in the file."""
FLOAT32_MODULES = ("norm1", "norm2", "norm_out", "scale1", "scale2")
"""Parts of the decoder that the class computes in float32 whatever dtype the rest has."""
DTYPES = ("F32", "F16", "BF16")
"""Dtypes that weights may be stored in."""

_LANDMARKS = (
    "decoder.register_tokens",
    "decoder.transformer_blocks.0.scale1",
    "decoder.transformer_blocks.0.scale2",
    "post_quant_conv.weight",
)
"""Keys that no other part of the model has; two of them show what a damaged file was."""
_OFFICIAL_WORDS = (
    ("decoder.proj_in.", "decoder.x_embedder."),
    (".attn.to_q.", ".attn.to_qkv."),
    (".attn.to_out.0.", ".attn.to_out."),
    (".ff.net.0.proj.", ".ff.w1."),
    (".ff.net.2.", ".ff.w2."),
    (".down_blocks.", ".down."),
    (".resnets.", ".block."),
    (".downsamplers.0.", ".downsample."),
    (".conv_shortcut.", ".nin_shortcut."),
)
"""Parts of diffusers' keys and what the official keys have in their place."""
_BLOCK = re.compile(r"decoder\.transformer_blocks\.([0-9]{1,4})\.")
MASK_TOKEN = "decoder.mask_token"
"""Key that only official names have: of masked training, zeros; no inference reads it."""


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """What the checkpoint is; None if it is something else."""
    if sum(key in checkpoint.tensors for key in _LANDMARKS) < 2:
        return None
    layout = "diffusers"
    if any(".attn.to_qkv." in key or key.startswith("decoder.x_embedder.") for key in checkpoint.tensors):
        layout = "comfyui" if any(key in checkpoint.tensors for key in STATISTICS) else "official"
    refusal = None
    if shown := quantisation(checkpoint):
        refusal = (
            f"is a quantised copy of the video VAE ({shown}), and only F32, F16 and BF16 weights are read; use "
            "minimax_h3_video_vae_fp16.safetensors, or vae/ of the diffusers repository"
        )
    return Recognition("video_vae", layout, refusal, tuple(_notes(checkpoint, layout)))


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers alone show to be wrong, in sentences."""
    try:
        return faults(checkpoint, recognition.layout, architecture(checkpoint, recognition.layout))
    except CheckpointError as error:
        return [str(error)]


def architecture(checkpoint: Checkpoint, layout: str, directories: Iterable[Path] = ()) -> Architecture:
    """The arguments of the published class for these weights, by the rule of `vae_files`.

    directories: the model directory's folders of the video VAE.
    Raises CheckpointError for an impossible configuration, and where there is none and shapes do not show enough.
    """
    return choose(
        PUBLISHED,
        checkpoint,
        config_files(checkpoint, directories),
        fits=lambda config: not _key_faults(checkpoint, layout, config),
        derive=lambda: _derived(checkpoint, layout),
    )


def faults(checkpoint: Checkpoint, layout: str, chosen: Architecture) -> list[str]:
    """Everything that is wrong with the weights of this architecture, as far as headers show it."""
    return class_problems(checkpoint, PUBLISHED) + _key_faults(checkpoint, layout, chosen.config)


def key_map(layout: str, config: dict[str, Any]) -> dict[str, Rule]:
    """What the keys of a layout become: every parameter of the class once.  config: arguments of the class."""
    keys = parameter_shapes(config)
    if layout == "diffusers":
        return identity(keys)
    heads = config["decoder_num_attention_heads"]
    rules = {MASK_TOKEN: Rule(())}
    for key in keys:
        if ".attn.to_q." in key:
            parts = tuple(key.replace(".to_q.", f".to_{part}.") for part in "qkv")
            rules[official_key(key)] = Rule(parts, Rows.PER_HEAD, heads)
        elif ".ff.net.0." in key:
            rules[official_key(key)] = Rule((key,), Rows.SWAPPED_HALVES)
        elif ".attn.to_k." not in key and ".attn.to_v." not in key:
            rules[official_key(key)] = Rule((key,))
    if layout == "comfyui":
        rules |= {key: Rule(()) for key in STATISTICS}
    return rules


def official_key(key: str) -> str:
    """The official key of a diffusers key; of a query matrix, the key of the fused matrix."""
    for word, official in _OFFICIAL_WORDS:
        key = key.replace(word, official)
    return key


def parameter_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Shapes of the class's parameters, by diffusers key.  config: arguments of the class."""
    latents, width = config["latent_channels"], _width(config)
    inner = width * config["decoder_ffn_mult"]
    pixels = math.prod(config["temporal_downsample_factors"]) * math.prod(config["spatial_downsample_factors"]) ** 2
    shapes = dict(_encoder_shapes(config))
    shapes |= _conv("quant_conv", 2 * latents, 2 * latents, 1)
    shapes |= _conv("post_quant_conv", latents, latents, 1)
    shapes |= _linear("decoder.proj_in", width, latents)
    shapes["decoder.register_tokens"] = (1, config["decoder_num_register_tokens"], width)
    for index in range(config["decoder_num_layers"]):
        block = f"decoder.transformer_blocks.{index}"
        shapes |= {f"{block}.{name}": (width,) for name in ("norm1.weight", "norm2.weight", "scale1", "scale2")}
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= _linear(f"{block}.attn.{name}", width, width)
        shapes |= _linear(f"{block}.ff.net.0.proj", 2 * inner, width)
        shapes |= _linear(f"{block}.ff.net.2", width, inner)
    shapes |= _norm("decoder.norm_out", width)
    shapes |= _linear("decoder.proj_out", config["out_channels"] * pixels, width)
    return shapes


def _notes(checkpoint: Checkpoint, layout: str) -> Iterator[str]:
    lossy = {
        tensor.info.dtype
        for key, tensor in checkpoint.tensors.items()
        if key.startswith("decoder.") and not set(FLOAT32_MODULES).isdisjoint(key.split("."))
    } - {"F32"}
    if lossy:
        yield (
            f"Norms and residual scales are stored as {' and '.join(sorted(lossy))}: they are computed in float32, but "
            "not with the precision of the float32 weights."
        )
    if any(key in checkpoint.tensors and checkpoint.tensors[key].info.dtype != "F32" for key in STATISTICS):
        yield "The latent statistics of a config.json beside it or in --model DIR are preferred to its rounded ones."
    if layout == "official":
        yield "It holds no latent statistics: they are read from the config.json of its folder or of --model DIR."


def _key_faults(checkpoint: Checkpoint, layout: str, config: dict[str, Any]) -> list[str]:
    found = key_problems(checkpoint, key_map(layout, config), parameter_shapes(config), DTYPES, UNUSED_MODULES)
    return found + statistics_problems(checkpoint, config["latent_channels"]) if layout == "comfyui" else found


def _derived(checkpoint: Checkpoint, layout: str) -> dict[str, Any]:
    """Arguments of the class that shapes show; those of missing tensors are left to the defaults."""

    def shape(key: str) -> Shape | None:
        return shape_of(checkpoint.tensors, key if layout == "diffusers" else official_key(key))

    derived: dict[str, Any] = {}
    head_dim = PUBLISHED.defaults["decoder_attention_head_dim"]
    match shape("decoder.proj_in.weight"):
        case (width, latents):
            if width % head_dim:
                raise CheckpointError(
                    f"{checkpoint.path}: the decoder is {width} wide, no multiple of the published head size "
                    f"{head_dim}; put the config.json of this model beside it, or give --model DIR with vae/config.json"
                )
            derived["decoder_num_attention_heads"] = width // head_dim
            derived["latent_channels"] = latents
            match shape("decoder.transformer_blocks.0.ff.net.2.weight"):
                case (_, inner) if width:
                    derived["decoder_ffn_mult"] = inner // width
    match shape("decoder.register_tokens"):
        case (_, tokens, _):
            derived["decoder_num_register_tokens"] = tokens
    derived["decoder_num_layers"] = 1 + max(
        (int(block[1]) for block in map(_BLOCK.match, checkpoint.tensors) if block), default=-1
    )
    if channels := [math.prod(sizes) for sizes in series(shape, "encoder.down_blocks.{}.resnets.0.norm2.weight")]:
        derived |= {
            "block_out_channels": tuple(channels),
            "layers_per_block": len(series(shape, "encoder.down_blocks.0.resnets.{}.norm2.weight")),
            # Strides and groups have no shapes: as many as there are levels, and a number that divides the channels.
            "norm_num_groups": math.gcd(PUBLISHED.defaults["norm_num_groups"], *channels),
            **{
                name: (PUBLISHED.defaults[name] + (1,) * len(channels))[: len(channels)]
                for name in ("spatial_downsample_factors", "temporal_downsample_factors")
            },
        }
    return derived


def _width(config: dict[str, Any]) -> int:
    width: int = config["decoder_num_attention_heads"] * config["decoder_attention_head_dim"]
    return width


def _encoder_shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    widths = config["block_out_channels"]
    yield from _conv("encoder.conv_in", widths[0], config["in_channels"], 3).items()
    strides = zip(config["spatial_downsample_factors"], config["temporal_downsample_factors"], strict=True)
    for level, (before, width, factors) in enumerate(zip((widths[0], *widths[:-1]), widths, strides, strict=True)):
        block = f"encoder.down_blocks.{level}"
        for index in range(config["layers_per_block"]):
            into, resnet = before if index == 0 else width, f"{block}.resnets.{index}"
            yield from _norm(f"{resnet}.norm1", into).items()
            yield from _conv(f"{resnet}.conv1", width, into, 3).items()
            yield from _norm(f"{resnet}.norm2", width).items()
            yield from _conv(f"{resnet}.conv2", width, width, 3).items()
            if into != width:
                yield from _conv(f"{resnet}.conv_shortcut", width, into, 1).items()
        if math.prod(factors) > 1:
            yield from _conv(f"{block}.downsamplers.0.conv", width, width, 3).items()
    yield from _norm("encoder.norm_out", widths[-1]).items()
    yield from _conv("encoder.conv_out", 2 * config["latent_channels"], widths[-1], 3).items()


def _conv(name: str, out: int, into: int, kernel: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, into, kernel, kernel, kernel), f"{name}.bias": (out,)}


def _linear(name: str, out: int, into: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
