"""The model's files and adapters, by their headers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from h3stream.errors import StartupError
from orchestrator.config import Settings
from orchestrator.doctor.finding import Finding
from orchestrator.model_info import read_model_info
from services.checkpoints.adapter_registry import AdapterHeader, read_registry
from services.checkpoints.components import FOLDERS, part_path
from services.checkpoints.model_files import check_model


def check_files(settings: Settings) -> Iterator[Finding]:
    """Whether the server would take the model and its adapters."""
    remedy = f"`h3stream inspect {settings.model or settings.dit}` tells what each file is"
    adapters: tuple[AdapterHeader, ...] = ()
    try:
        model = read_model_info(settings.model, settings.parts)
        adapters = read_registry(settings.adapter, settings.model)
        check_model(
            settings.model,
            settings.parts,
            settings.dit_layout,
            adapters,
            allow_partial_adapters=settings.allow_partial_adapters,
        )
    except StartupError as error:
        yield Finding("model", "fail", str(error), remedy)
        return
    yield Finding("model", "ok", f"{model.name}: every file is there and whole ({model_bytes(settings) / 1e9:.2f} GB)")
    yield _about(adapters)


def model_bytes(settings: Settings) -> int:
    """Bytes of the weight files that the server would read; 0 for those that are not there."""
    files: set[str] = set()
    for part in FOLDERS:
        try:
            path = part_path(settings.model, part, settings.parts[part])
        except StartupError:
            continue
        found = [path] if path.is_file() else path.rglob("*.safetensors")
        files |= {os.path.realpath(file) for file in found}
    return sum(os.path.getsize(file) for file in files if Path(file).exists())


def _about(adapters: tuple[AdapterHeader, ...]) -> Finding:
    names = ", ".join(f"{adapter.name} ({adapter.path})" for adapter in adapters)
    if not any(adapter.is_streaming for adapter in adapters):
        return Finding(
            "adapters", "warn", f"{names or 'there are none'}: only dense clips can be made, nothing is streamed",
            "give RAVEN's adapter: --adapter raven=PATH (docs/getting-the-weights.md)",
        )  # fmt: skip
    return Finding("adapters", "ok", names)
