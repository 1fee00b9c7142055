"""The audio VAE: how its files are recognised and checked, and what their keys mean.

Layouts: "diffusers" and "official" (the same keys: weight norm as `weight_g` and `weight_v`) and "comfyui" (weight norm
folded into plain weights, with the latent statistics in the same file).
Source: docs/reference/h3-model.md §5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.key_map import Rule, Shape, identity
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
    name="AutoencoderKLMiniMaxH3Audio",
    official_names=("MiniMaxH3AudioVAE",),
    official_fields=(),
    defaults=MappingProxyType(
        {
            "encoder_dim": 64,
            "encoder_rates": (2, 4, 4, 5, 5),
            "latent_dim": 2048,
            "latent_channels": 32,
            "num_attention_heads": 8,
            "decoder_dim": 1024,
            "decoder_rates": (5, 5, 2, 2, 2, 2, 2),
            "decoder_kernel_sizes": (9, 9, 4, 4, 4, 4, 4),
            "resblock_kernel_sizes": (3, 7, 11),
            "resblock_dilation_sizes": ((1, 3, 5), (1, 3, 5), (1, 3, 5)),
            "sampling_rate": 32000,
        }
    ),
    max_values=MappingProxyType({}),
    parallel=(("decoder_rates", "decoder_kernel_sizes"), ("resblock_kernel_sizes", "resblock_dilation_sizes")),
)
"""The class in diffusers, with the values of the published weights."""

UNUSED_MODULES: tuple[str, ...] = ("encoder", "pre_block", "mean_proj", "logs_proj")
"""Modules that decoding never reads; their weights stay in the file."""
DTYPES = ("F32",)
"""Dtypes that weights may be stored in: lower precision is audibly worse (docs/reference/h3-model.md §5)."""

_LANDMARKS = ("dec_in_proj.weight", "decoder.activation_post.act.alpha", "decoder.ups.0.0.bias", "mean_proj.weight")
"""Keys that no other part of the model has; two of them show what a damaged file was."""
_FILTER_TAPS = 12
_RATES = MappingProxyType({9: 5, 4: 2})
"""Upsampling rate by the kernel it has in the published weights: shapes show the kernel alone."""


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """What the checkpoint is; None if it is something else."""
    if sum(key in checkpoint.tensors for key in _LANDMARKS) < 2:
        return None
    is_official = (checkpoint.config or {}).get("_class_name") in PUBLISHED.official_names
    layout = "official" if is_official else "diffusers"
    if not any(key.endswith((".weight_g", ".weight_v")) for key in checkpoint.tensors):
        layout = "comfyui"
    return Recognition("audio_vae", layout, _refusal(checkpoint))


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers alone show to be wrong, in sentences."""
    try:
        return faults(checkpoint, recognition.layout, architecture(checkpoint, recognition.layout))
    except CheckpointError as error:
        return [str(error)]


def architecture(checkpoint: Checkpoint, layout: str, directories: Iterable[Path] = ()) -> Architecture:
    """The arguments of the published class for these weights, by the rule of `vae_files`.

    directories: the model directory's folders of the audio VAE.
    Raises CheckpointError for an impossible configuration, and where there is none and shapes do not show enough.
    """
    return choose(
        PUBLISHED,
        checkpoint,
        config_files(checkpoint, directories),
        fits=lambda config: not _key_faults(checkpoint, layout, config),
        derive=lambda: _derived(checkpoint),
    )


def faults(checkpoint: Checkpoint, layout: str, chosen: Architecture) -> list[str]:
    """Everything that is wrong with the weights of this architecture, as far as headers show it."""
    return class_problems(checkpoint, PUBLISHED) + _key_faults(checkpoint, layout, chosen.config)


def key_map(layout: str, config: dict[str, Any]) -> dict[str, Rule]:
    """What the keys of a layout become: every parameter once, of "comfyui" those of the class without weight norm."""
    rules = identity(parameter_shapes(config, is_folded=layout == "comfyui"))
    return rules | {key: Rule(()) for key in STATISTICS} if layout == "comfyui" else rules


def parameter_shapes(config: dict[str, Any], *, is_folded: bool) -> dict[str, Shape]:
    """Shapes of the class's parameters, by key.  is_folded: whether weight norm has been folded into plain weights."""
    normed = partial(_normed, is_folded=is_folded)
    latents, width = config["latent_channels"], config["latent_dim"]
    shapes = _encoder_shapes(config, normed) | _projection_shapes(width, latents)
    for name in ("mean_proj", "logs_proj"):
        shapes |= {f"{name}.weight": (latents, latents, 1), f"{name}.bias": (latents,)}
    shapes |= {"dec_in_proj.weight": (width, latents, 1), "dec_in_proj.bias": (width,)}
    channels = config["decoder_dim"]
    shapes |= normed("decoder.conv_pre", (channels, width, 7), channels)
    blocks = list(zip(config["resblock_kernel_sizes"], config["resblock_dilation_sizes"], strict=True))
    for level, kernel in enumerate(config["decoder_kernel_sizes"]):
        # Of a transposed convolution the first dimension is what comes in.
        shapes |= normed(f"decoder.ups.{level}.0", (channels, channels // 2, kernel), channels // 2)
        channels //= 2
        for index, (kernel_size, dilations) in enumerate(blocks):
            block = f"decoder.resblocks.{level * len(blocks) + index}"
            for conv in range(len(dilations)):
                for half in ("convs1", "convs2"):
                    shapes |= normed(f"{block}.{half}.{conv}", (channels, channels, kernel_size), channels)
                for activation in (2 * conv, 2 * conv + 1):
                    shapes |= _activation_shapes(f"{block}.activations.{activation}", channels)
    shapes |= _activation_shapes("decoder.activation_post", channels)
    return shapes | normed("decoder.conv_post", (1, channels, 7), None)


def _refusal(checkpoint: Checkpoint) -> str | None:
    advice = "use minimax_h3_audio_vae_fp32.safetensors, or audio_vae/ of the diffusers or the official repository"
    if shown := quantisation(checkpoint):
        return f"is a quantised copy of the audio VAE ({shown}), and sound needs its float32 weights; {advice}"
    if checkpoint.dtypes()[0] in ("F16", "BF16"):
        return f"is a copy of the audio VAE in {checkpoint.dtypes()[0]}, which is audibly worse than float32; {advice}"
    return None


def _key_faults(checkpoint: Checkpoint, layout: str, config: dict[str, Any]) -> list[str]:
    shapes = parameter_shapes(config, is_folded=layout == "comfyui")
    found = key_problems(checkpoint, key_map(layout, config), shapes, DTYPES, UNUSED_MODULES)
    return found + statistics_problems(checkpoint, config["latent_channels"]) if layout == "comfyui" else found


def _derived(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments of the class that shapes show; those of missing tensors are left to the defaults.

    Raises CheckpointError for an upsampling or a residual block unlike the published ones.
    """

    def weight(module: str) -> Shape | None:
        normed = shape_of(checkpoint.tensors, f"{module}.weight_v")
        return shape_of(checkpoint.tensors, f"{module}.weight") if normed is None else normed

    derived: dict[str, Any] = {}
    match weight("dec_in_proj"):
        case (width, latents, _):
            derived |= {"latent_dim": width, "latent_channels": latents}
    match weight("decoder.conv_pre"):
        case (channels, _, _):
            derived["decoder_dim"] = channels
    match weight("encoder.block.0"):
        case (channels, _, _):
            # Every strided convolution is twice as long as its stride.
            strides = [_kernel(shape) // 2 for shape in series(weight, "encoder.block.{}.block.4", start=1)]
            derived |= {"encoder_dim": channels} | ({"encoder_rates": tuple(strides)} if strides else {})
    if kernels := [_kernel(shape) for shape in series(weight, "decoder.ups.{}.0")]:
        derived |= _derived_decoder(checkpoint, kernels, weight)
    return derived


def _derived_decoder(
    checkpoint: Checkpoint, kernels: list[int], weight: Callable[[str], Shape | None]
) -> dict[str, Any]:
    """What shapes show of the upsampling stages.  kernels: theirs.  weight: shape of a convolution."""
    blocks = series(weight, "decoder.resblocks.{}.convs1.0")
    # Only those of one stage are alike in width.
    num_blocks = sum(shape[:1] == blocks[0][:1] for shape in blocks)
    convolutions = [series(weight, f"decoder.resblocks.{index}.convs1.{{}}") for index in range(num_blocks)]
    dilations = PUBLISHED.defaults["resblock_dilation_sizes"][0]
    if not set(kernels) <= _RATES.keys() or any(len(shapes) > len(dilations) for shapes in convolutions):
        raise CheckpointError(
            f"{checkpoint.path}: upsampling kernels of {kernels!s:.80} and residual blocks of "
            f"{[len(shapes) for shapes in convolutions]!s:.80} convolutions are not those of the published audio VAE, "
            "so rates and dilations are unknown; put the config.json of this model beside it, or give --model DIR with "
            "audio_vae/config.json"
        )
    stages = {
        "decoder_kernel_sizes": tuple(kernels),
        "decoder_rates": tuple(_RATES[kernel] for kernel in kernels),
    }
    if not blocks:
        return stages
    return stages | {
        "resblock_kernel_sizes": tuple(_kernel(shapes[0]) for shapes in convolutions),
        "resblock_dilation_sizes": tuple(dilations[: len(shapes)] for shapes in convolutions),
    }


def _kernel(shape: Shape) -> int:
    return shape[-1] if shape else 0


def _encoder_shapes(config: dict[str, Any], normed: Callable[..., dict[str, Shape]]) -> dict[str, Shape]:
    channels = config["encoder_dim"]
    shapes = normed("encoder.block.0", (channels, 1, 7), channels)
    last = len(config["encoder_rates"])
    for level, rate in enumerate(config["encoder_rates"], start=1):
        block = f"encoder.block.{level}.block"
        for unit in range(3):
            for index, kernel in ((1, 7), (3, 1)):
                shapes[f"{block}.{unit}.block.{index - 1}.alpha"] = (1, channels, 1)
                shapes |= normed(f"{block}.{unit}.block.{index}", (channels, channels, kernel), channels)
        shapes[f"{block}.3.alpha"] = (1, channels, 1)
        shapes |= normed(f"{block}.4", (2 * channels, channels, 2 * rate), 2 * channels)
        channels *= 2
    shapes[f"encoder.block.{last + 1}.alpha"] = (1, channels, 1)
    return shapes | normed(f"encoder.block.{last + 2}", (config["latent_dim"], channels, 3), config["latent_dim"])


def _projection_shapes(width: int, latents: int) -> dict[str, Shape]:
    """Of the attention block between encoder and latents."""
    attention: dict[str, Shape] = {f"attn.{name}": (width,) for name in ("q_bias", "v_bias", "zero_k_bias")}
    attention["attn.qkv.weight"] = (3 * width, width)
    linears = {"attn.proj": (latents, latents), "proj": (latents, width), "mlp.w2": (latents, 2 * latents)}
    linears |= {f"mlp.{name}": (2 * latents, latents) for name in ("w0", "w1")}
    norms = {"norm1": width, "norm2": latents, "norm3": width, "mlp.norm": latents}
    for name, shape in linears.items():
        attention |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, size in norms.items():
        attention |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {f"pre_block.{name}": shape for name, shape in attention.items()}


def _activation_shapes(name: str, channels: int) -> dict[str, Shape]:
    """Of an anti-aliased activation; its filters are stored although they are constant."""
    return {
        f"{name}.act.alpha": (channels,),
        f"{name}.act.beta": (channels,),
        f"{name}.upsample.filter": (1, 1, _FILTER_TAPS),
        f"{name}.downsample.lowpass.filter": (1, 1, _FILTER_TAPS),
    }


def _normed(name: str, weight: Shape, bias: int | None, *, is_folded: bool) -> dict[str, Shape]:
    """Of a convolution with weight norm.  weight: shape of the weight it computes.  bias: size of its bias, if any."""
    norm = (weight[0], *(1 for _ in weight[1:]))
    shapes = {f"{name}.weight": weight} if is_folded else {f"{name}.weight_g": norm, f"{name}.weight_v": weight}
    return shapes if bias is None else {**shapes, f"{name}.bias": (bias,)}
