"""Adapters as float32 residuals on the published modules, and which of them a pass uses. Nothing is ever fused.

    out = round(float32(base_out) + sum over adapters of strength * alpha / rank * up(down(float32(x))))

Matrices stay in the dtype of their file, in which they take least memory, and are widened for each call: to the same
bits as if they were kept in float32.
Source: docs/reference/raven-streaming.md §8.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from h3stream.errors import CheckpointError
from h3stream.job import AdapterInfo
from services.checkpoints.adapter_registry import AdapterHeader, Binding, bind
from services.checkpoints.adapters import AdapterModule
from services.checkpoints.dit_modules import Architecture
from services.checkpoints.header import content_digest
from services.checkpoints.key_map import Rule
from services.common.weights import read_tensors, split_rows

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

log = logging.getLogger(__name__)

AdapterMix = tuple[tuple[str, float], ...]
"""The adapters of a pass, each with its strength."""
Term = tuple[Tensor, Tensor, float]
"""down `[rank, in]`, up `[out, rank]` and the scale of their product."""

_ATTACHABLE = (torch.float32, torch.bfloat16, torch.float16)
_TEMP_BYTES = 64 << 20
"""Budget of the float32 temporaries of one residual; rows are processed in blocks that fit it."""
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 128, 1024


@dataclass(frozen=True)
class LowRankPair:
    """The update of one module, as a file has it."""

    down: Tensor
    """"A", `[rank, in]` float32, bfloat16 or float16."""
    up: Tensor
    """"B", `[out, rank]`, rows in the file's order."""
    alpha: float
    """The update is `alpha / rank * up @ down`."""


class Adapter(nn.Module):
    """The residuals of one adapter."""

    def __init__(self, pairs: Iterable[tuple[Rule, LowRankPair]]) -> None:
        """pairs: each with the published modules that it stands for; taken one by one and not kept."""
        super().__init__()
        self.tensors = nn.ParameterList()
        self.residuals: dict[str, tuple[nn.Parameter, nn.Parameter, float]] = {}
        """Published module name to down, up and alpha / rank."""
        for rule, pair in pairs:
            down = self._keep(pair.down)  # shared by the modules that a fused one was split into
            for name, up in zip(rule.targets, split_rows(rule, pair.up), strict=True):
                self.residuals[name] = (down, self._keep(up), pair.alpha / len(pair.down))

    def _keep(self, tensor: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.tensors.append(parameter)
        return parameter


class AdapterBank(nn.Module):
    """All adapters of a transformer, attached to the calls of its modules; silent until a pass names some of them."""

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, adapters: Mapping[str, Adapter]) -> None:
        """Attaches all of them, or raises CheckpointError and attaches none."""
        super().__init__()
        self.adapters = nn.ModuleList(adapters.values())  # their tensors move with the bank's
        self._by_name = dict(adapters)
        self._active: list[tuple[Adapter, float]] = []
        names = sorted({name for adapter in adapters.values() for name in adapter.residuals})
        modules = [transformer.get_submodule(name) for name in names]
        for name, module in zip(names, modules, strict=True):
            # A subclass may be a fused or quantised linear, whose kernel never runs the hook.
            if type(module) is not nn.Linear or module.weight.dtype not in _ATTACHABLE:
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
    terms = [(down.float(), up.float(), scale) for down, up, scale in terms]
    for base, rows in zip(outputs.split(block), inputs.split(block), strict=True):
        x32, total = rows.float(), base.float()
        for down, up, scale in terms:
            total.add_(linear(linear(x32, down), up), alpha=scale)
        if total.dtype != base.dtype:  # else it is `base` itself
            base.copy_(total)
    return out


def load_adapter(modules: Sequence[AdapterModule], num_heads: int) -> Adapter:
    """Reads an adapter's matrices.

    modules: those that fit the transformer.  num_heads: the transformer's attention heads.
    Raises CheckpointError if the file has changed or cannot be read any more.
    """
    return Adapter(_read_pairs(modules, num_heads))


def fit_adapters(
    headers: Sequence[AdapterHeader], architecture: Architecture, partition: str, *, allow_partial: bool
) -> list[tuple[AdapterHeader, Binding]]:
    """Fits the adapters of a registry to a DiT before anything of either is read; arguments as of `bind`."""
    fitted = []
    for header in headers:
        binding = bind(header, architecture, partition=partition, allow_partial=allow_partial)
        if binding.faults:
            log.warning("adapter %s is used in part: %s", header.name, "; ".join(binding.faults))
        if partition and not header.partition:
            log.info("adapter %s does not tell whether it is for the %s DiT, which is loaded", header.name, partition)
        fitted.append((header, binding))
    return fitted


def load_adapters(
    transformer: MiniMaxH3Transformer3DModel, fitted: Sequence[tuple[AdapterHeader, Binding]]
) -> tuple[AdapterBank, tuple[AdapterInfo, ...]]:
    """Reads the adapters and attaches them; also what is to be told of each.  Raises CheckpointError."""
    num_heads: int = transformer.config.num_attention_heads
    adapters = {header.name: load_adapter(binding.modules, num_heads) for header, binding in fitted}
    return AdapterBank(transformer, adapters), tuple(_info(header, binding) for header, binding in fitted)


def _read_pairs(modules: Sequence[AdapterModule], num_heads: int) -> Iterator[tuple[Rule, LowRankPair]]:
    stored = {f"{module.name}.{side}": getattr(module, side) for module in modules for side in ("down", "up")}
    tensors = read_tensors(stored)
    for module, (_, down), (_, up) in zip(modules, tensors, tensors, strict=True):
        yield dataclasses.replace(module.rule, num_heads=num_heads), LowRankPair(down, up, module.alpha)


def _info(header: AdapterHeader, binding: Binding) -> AdapterInfo:
    told = {field.name for field in dataclasses.fields(AdapterInfo)} - {"sha256", "num_bound_modules"}
    facts = {name: getattr(header, name) for name in told}
    return AdapterInfo(**facts, sha256=content_digest(header.path), num_bound_modules=len(binding.modules))
