"""LoRA files to float32 residuals on the published modules, and which of them a pass uses. Nothing is ever fused.

    out = round(float32(base_out) + sum over adapters of strength * alpha / rank * up(down(float32(x))))

Source: docs/reference/raven-streaming.md §8.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from h3stream.errors import CheckpointError
from services.dit.names import official_modules, split_output_rows

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

AdapterMix = tuple[tuple[str, float], ...]
"""The adapters of a pass, each with its strength."""
Term = tuple[Tensor, Tensor, float]
"""down `[rank, in]`, up `[out, rank]` and the scale of their product."""

_RAVEN_KEY = re.compile(r"base_model\.model\.dit\.(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")
_ALPHA_KEYS = ("lora_alpha", "alpha", "raven_lora_alpha")
_DEFAULT_ALPHA = 128.0
_TEMP_BYTES = 64 << 20
"""Budget of the float32 temporaries of one residual; rows are processed in blocks that fit it."""
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 128, 1024


@dataclass(frozen=True)
class LowRankPair:
    """The update of one official module."""

    down: Tensor
    """"A", `[rank, in]` float32."""
    up: Tensor
    """"B", `[out, rank]` float32, rows in the official order."""
    alpha: float
    """The update is `alpha / rank * up @ down`."""


class Adapter(nn.Module):
    """One adapter, bound to the modules of a transformer."""

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, pairs: Mapping[str, LowRankPair]) -> None:
        """pairs: by official module name, checked against the transformer."""
        super().__init__()
        self.tensors = nn.ParameterList()
        self.residuals: dict[str, tuple[nn.Parameter, nn.Parameter, float]] = {}
        """Published module name to down, up and alpha / rank."""
        modules = _official_modules(transformer)
        for official, pair in pairs.items():
            down = self._keep(pair.down)  # shared by the modules that the official one was split into
            for name, up in zip(modules[official], split_output_rows(official, pair.up), strict=True):
                self.residuals[name] = (down, self._keep(up), pair.alpha / len(pair.down))

    def _keep(self, tensor: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.tensors.append(parameter)
        return parameter


class AdapterBank(nn.Module):
    """All adapters of a transformer, attached to the calls of its modules; silent until a pass names some of them."""

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, adapters: Mapping[str, Adapter]) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict(adapters)  # its tensors move with the module's
        self._by_name = dict(adapters)
        self._active: list[tuple[Adapter, float]] = []
        names = sorted({name for adapter in adapters.values() for name in adapter.residuals})
        modules = [transformer.get_submodule(name) for name in names]
        for name, module in zip(names, modules, strict=True):
            # A subclass may be a fused or quantised linear, whose kernel never runs the hook.
            if type(module) is not nn.Linear or not module.weight.is_floating_point():
                raise CheckpointError(f"an adapter cannot be attached to {name}, a {type(module).__name__}")
        for name, module in zip(names, modules, strict=True):
            module.register_forward_hook(self._hook(name))

    @contextmanager
    def using(self, mix: AdapterMix) -> Iterator[None]:
        """Adds these adapters, at these strengths, to every forward inside."""
        before = self._active
        self._active = [(self._by_name[name], strength) for name, strength in mix]
        try:
            yield
        finally:
            self._active = before

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
            terms: list[Term] = [
                (*adapter.residuals[name][:2], strength * adapter.residuals[name][2])
                for adapter, strength in self._active
                if name in adapter.residuals
            ]
            return add_residuals(args[0], out, terms) if terms else None

        return add


def add_residuals(x: Tensor, out: Tensor, terms: list[Term]) -> Tensor:
    """Adds the terms to `out` in place and returns it: summed in float32, rounded once to the dtype of `out`.

    x: `[..., in]`.  out: `[..., out]`, fresh from the base module.
    """
    inputs, outputs = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    ranks = sum(len(down) for down, _, _ in terms)
    row_bytes = 4 * (inputs.shape[1] + ranks + 2 * outputs.shape[1])
    block = min(max(_TEMP_BYTES // row_bytes, _MIN_BLOCK_ROWS), _MAX_BLOCK_ROWS)
    for base, rows in zip(outputs.split(block), inputs.split(block), strict=True):
        x32, total = rows.float(), base.float()
        for down, up, scale in terms:
            total.add_(linear(linear(x32, down), up), alpha=scale)
        if total.dtype != base.dtype:  # else it is `base` itself
            base.copy_(total)
    return out


def load_raven_adapter(path: Path, transformer: MiniMaxH3Transformer3DModel) -> Adapter:
    """The RAVEN adapter, bound to a transformer.

    Raises CheckpointError that lists everything that does not fit: the adapter covers every linear module of the
    transformer, and nothing is skipped.
    """
    try:
        with safe_open(path, framework="pt") as file:
            keys, problems = _raven_keys(list(file.keys()))
            problems += _raven_problems(file, keys, transformer)
            if problems:
                expected = _official_modules(transformer).keys()
                matched = sum(len(keys.get(module, {})) == 2 for module in expected)
                raise CheckpointError(f"{path}: {matched} of {len(expected)} modules matched; {'; '.join(problems)}")
            alpha = _alpha(path, file.metadata() or {})
            pairs = {
                module: LowRankPair(file.get_tensor(sides["A"]), file.get_tensor(sides["B"]), alpha)
                for module, sides in keys.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"adapter {path} cannot be read: {error}") from error
    return Adapter(transformer, pairs)


def find_adapter(model_directory: Path) -> Path:
    """The only safetensors file in a model directory's `adapters/`. Raises CheckpointError for none or several."""
    directory = model_directory / "adapters"
    found = sorted(directory.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(path.name for path in found) or "none"
        raise CheckpointError(f"{directory} must hold one adapter, found {listed}; name one with the setting `adapter`")
    return found[0]


def _official_modules(transformer: MiniMaxH3Transformer3DModel) -> dict[str, tuple[str, ...]]:
    return official_modules(transformer.config.num_layers, transformer.config.num_refiner_layers)


def _raven_keys(names: list[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Key of each side ("A", "B") of each official module, and what is wrong with the rest."""
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for name in sorted(names):
        match = _RAVEN_KEY.fullmatch(name)
        if match is None:
            problems.append(f"unknown key {name!r}")
        elif match["side"] in keys[match["module"]]:
            problems.append(f"{name!r} repeats {keys[match['module']][match['side']]!r}")
        else:
            keys[match["module"]][match["side"]] = name
    return dict(keys), problems


def _raven_problems(file: Any, keys: dict[str, dict[str, str]], transformer: MiniMaxH3Transformer3DModel) -> list[str]:
    """What is wrong with the modules and tensors that the keys name."""
    modules = _official_modules(transformer)
    problems = [f"module {module!r} is missing" for module in modules if module not in keys]
    ranks: dict[int, str] = {}
    for module, sides in keys.items():
        if module not in modules:
            problems.append(f"there is no module {module!r}")
            continue
        if len(sides) == 1:
            problems.append(f"{next(iter(sides.values()))!r} has no other half")
            continue
        slices = {side: file.get_slice(key) for side, key in sides.items()}
        problems += [
            f"{sides[side]!r} is {part.get_dtype()}, expected F32"
            for side, part in slices.items()
            if part.get_dtype() != "F32"
        ]
        shape_a, shape_b = (tuple(slices[side].get_shape()) for side in "AB")
        weights = [transformer.get_submodule(name).weight for name in modules[module]]
        num_out, num_in = sum(len(weight) for weight in weights), weights[0].shape[1]
        rank = shape_a[0]
        if shape_a != (rank, num_in) or shape_b != (num_out, rank):
            problems.append(
                f"module {module!r}: A {list(shape_a)} and B {list(shape_b)} do not fit a weight [{num_out}, {num_in}]"
            )
        ranks.setdefault(rank, module)
    if len(ranks) > 1:
        problems.append("ranks differ: " + ", ".join(f"{rank} ({module})" for rank, module in sorted(ranks.items())))
    return problems


def _alpha(path: Path, metadata: dict[str, str]) -> float:
    """Alpha from the file's metadata, else from `adapter_config.json` beside it, else RAVEN's own."""
    config_path = path.parent / "adapter_config.json"
    try:
        config = json.loads(config_path.read_text()) if config_path.is_file() else {}
        found = [metadata[key] for key in _ALPHA_KEYS if key in metadata]
        found += [config[key] for key in _ALPHA_KEYS[:2] if key in config]
        return float(found[0]) if found else _DEFAULT_ALPHA
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the alpha of adapter {path} cannot be read: {error}") from error
