"""Text encoder files in every published layout, made from one small model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.checkpoints.header import TensorInfo
from services.checkpoints.source import Checkpoint, StoredTensor

H3 = Path(__file__).parent / "fixtures" / "h3"
GOLDEN = json.loads((H3 / "text_encoder_config.json").read_text())
TAP_LAYER: int = GOLDEN["tap_layer"]

TABLES = Path(__file__).parent / "fixtures" / "checkpoints"
"""Keys, shapes and dtypes of the published files."""

State = dict[str, torch.Tensor]

LINEAR_INPUTS_SCALED = ("o_proj.weight", "down_proj.weight")
NVFP4_MARKER = b'{"format": "nvfp4", "full_precision_matrix_mult": true}'
INT8_MARKER = b'{"format": "int8_tensorwise"}'
CODE_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def golden_state() -> State:
    """The model of the golden vectors, as transformers names it."""
    return load_file(H3 / "text_encoder_state.safetensors")


def write_folder(directory: Path, state: State, **config: object) -> Path:
    """A transformers folder of the golden model's configuration with one weight file."""
    directory.mkdir()
    stated = GOLDEN["transformers_config"] | {"model_type": "qwen3_vl", "h3_hidden_state_index": TAP_LAYER} | config
    (directory / "config.json").write_text(json.dumps(stated))
    save_file(state, directory / "model.safetensors")
    return directory


def comfyui_state(state: State, num_layers: int) -> State:
    """The tensors that ComfyUI's single file has, by its names: no final norm, no head, no further layers."""
    cut = {}
    for key, tensor in state.items():
        if key.startswith("model.language_model.layers."):
            if int(key.split(".")[3]) < num_layers:
                cut[key.replace("model.language_model.", "model.", 1)] = tensor
        elif key.startswith("model.visual."):
            cut[key.removeprefix("model.")] = tensor
        elif key == "model.language_model.embed_tokens.weight":
            cut["model.embed_tokens.weight"] = tensor
    return cut


def write_comfyui(path: Path, state: State, num_layers: int) -> Path:
    """ComfyUI's single file of a state with transformers' names."""
    save_file(comfyui_state(state, num_layers), path, {"h3_hidden_state_index": str(num_layers)})
    return path


def nvfp4_state(state: State, num_layers: int) -> State:
    """What ComfyUI's nvfp4_awq file has, of a state with transformers' names."""
    generator = torch.Generator().manual_seed(0)
    quantised: State = {}
    for key, tensor in comfyui_state(state, num_layers).items():
        module = key.removesuffix(".weight")
        if key == "model.embed_tokens.weight":
            scale = tensor.abs().amax(1, keepdim=True) / 127
            quantised[key] = (tensor / scale).round().to(torch.int8)
            quantised[f"{module}.weight_scale"] = scale
            quantised[f"{module}.comfy_quant"] = marker(INT8_MARKER)
        elif key.startswith("model.") and tensor.ndim == 2:
            if key.endswith(LINEAR_INPUTS_SCALED):
                input_scale = (0.25 + 2 * torch.rand(tensor.shape[1], generator=generator)).bfloat16()
                quantised[f"{module}.pre_quant_scale"] = input_scale
                tensor = tensor / input_scale.float()
            codes, scales, scale = quantise(tensor)
            quantised[key] = codes
            quantised[f"{module}.weight_scale"] = tiled(scales)
            quantised[f"{module}.weight_scale_2"] = scale
            quantised[f"{module}.comfy_quant"] = marker(NVFP4_MARKER)
        else:
            quantised[key] = tensor.bfloat16()
    return quantised


def write_nvfp4(path: Path, state: State, num_layers: int) -> Path:
    """A file of an `nvfp4_state`."""
    save_file(state, path, {"h3_hidden_state_index": str(num_layers)})
    return path


def marker(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[out, in / 2]`, scales of the blocks `[out, in / 16]` and of the tensor, by rounding to the nearest."""
    scale = weight.abs().max() / (6 * 448)
    blocks = weight.view(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
    step = (scales.float() * scale).unsqueeze(-1).clamp(min=1e-30)
    codes = ((blocks / step).unsqueeze(-1) - CODE_VALUES).abs().argmin(-1).view(len(weight), -1)
    return (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), scales, scale


def tile_index(row: torch.Tensor, block: torch.Tensor, padded_blocks: int) -> torch.Tensor:
    """Flat position of a block's scale. Source: docs/reference/h3-model.md §6.6."""
    tile = (row // 128) * (padded_blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[rows, blocks]` as they are stored; what pads them is not a number, so that using it shows."""
    rows, blocks = scales.shape
    shape = (-(-rows // 128) * 128, -(-blocks // 4) * 4)
    stored = torch.full((shape[0] * shape[1],), 0x7F, dtype=torch.uint8)
    row, block = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    stored[tile_index(row, block, shape[1])] = scales.view(torch.uint8)
    return stored.view(shape).view(torch.float8_e4m3fn)


def formula(state: State, module: str) -> torch.Tensor:
    """The weight of a module of an `nvfp4_state`, float32, straight from the reference's formula."""
    packed = state[f"{module}.weight"]
    stored = state[f"{module}.weight_scale"]
    rows, columns = len(packed), 2 * packed.shape[1]
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    byte = packed[row, column // 2].long()
    code = torch.where(column % 2 == 0, byte // 16, byte % 16)
    block_scale = stored.float().flatten()[tile_index(row, column // 16, stored.shape[1])]
    return CODE_VALUES[code] * (block_scale * state[f"{module}.weight_scale_2"])


def unquantised(state: State) -> State:
    """An `nvfp4_state` as plain float32 weights with transformers' names, the scale of an input put into its weight."""
    plain = {}
    for key, tensor in state.items():
        module = key.removesuffix(".weight")
        if not key.endswith(".weight") or key.startswith("visual."):
            continue
        if key == "model.embed_tokens.weight":
            tensor = tensor.float() * state[f"{module}.weight_scale"]
        elif tensor.ndim == 2:
            tensor = formula(state, module)
            if f"{module}.pre_quant_scale" in state:
                tensor = tensor * state[f"{module}.pre_quant_scale"].float()
        plain[key.replace("model.", "model.language_model.", 1)] = tensor.float()
    return plain


def published(name: str, config: dict[str, object] | None = None) -> Checkpoint:
    """A published text encoder by its key table, `text_encoder.NAME.json`; there is no file behind it."""
    table = json.loads((TABLES / f"text_encoder.{name}.json").read_text())["tensors"]
    infos = {key: TensorInfo(dtype, tuple(shape), 0, 0) for key, (shape, dtype) in table.items()}
    path = Path(name)
    return Checkpoint(path, (), {key: StoredTensor(path, info) for key, info in infos.items()}, False, config)
