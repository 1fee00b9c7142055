"""What model files are, as findings, as a table for people and as JSON for programs. Only headers are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from core.prompt import ALLOWED_SPECIAL_TOKENS
from h3stream.errors import CheckpointError, StartupError
from services.checkpoints.adapter_registry import read_adapter
from services.checkpoints.components import FOLDERS, Part, find_part
from services.checkpoints.dit import partition_of
from services.checkpoints.header import read_header
from services.checkpoints.identify import PARTS, identify
from services.checkpoints.layout import NAMES, Component
from services.checkpoints.printable import printable
from services.checkpoints.source import open_checkpoint
from services.checkpoints.survey import Place, survey
from services.checkpoints.tokenizer import read_tokenizer
from services.common.config import AdapterSource

Kind = Literal["model", Component, "tokenizer", "unknown", "nothing"]

KINDS: dict[str, str] = {
    "model": "model",
    "dit": NAMES["dit"],
    "video_vae": NAMES["video_vae"],
    "audio_vae": NAMES["audio_vae"],
    "text_encoder": NAMES["text_encoder"],
    "tokenizer": "tokenizer",
    "adapter": NAMES["adapter"],
    "unknown": "unknown",
    "nothing": "-",
}
"""What the kinds are called in a table."""

_HEADINGS = ("path", "part", "layout", "types", "parameters", "size", "state")
_RIGHT_ALIGNED = ("parameters", "size")
_MAX_REMARK = 4000
_MAX_PATH = 4096


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter's header and its alphas say."""

    min_rank: int
    """Smallest rank of its modules."""
    max_rank: int
    """Largest rank of its modules."""
    min_alpha: float
    """Smallest alpha of its modules."""
    max_alpha: float
    """Largest alpha of its modules."""
    num_modules: int
    """Modules that it names."""
    trained_steps: int | None
    """Noise forwards it was trained for; None if unknown."""
    trained_video_shift: float | None
    """Shift of the video sigma grid it was trained with; None if unknown."""
    trained_audio_shift: float | None
    """Shift of the audio sigma grid it was trained with; None if unknown."""


@dataclass(frozen=True)
class Finding:
    """One file or folder, and what it is. The fields are those of the JSON report."""

    path: str
    """The file or folder."""
    kind: Kind
    """What it is; "unknown" for something else and what cannot be read, "nothing" where a path leads nowhere."""
    layout: str = ""
    """Layout of a part's files, format of an adapter."""
    data_types: tuple[str, ...] = ()
    """Element types of its tensors, most bytes first."""
    num_parameters: int = 0
    """Elements of its tensors."""
    num_bytes: int = 0
    """Bytes of its files."""
    num_files: int = 0
    """Files, of weights or of a tokenizer."""
    partition: str = ""
    """DiT weights that it is, or that an adapter is for: "fl2va", "ref2va"; empty where nothing tells."""
    adapter: AdapterFacts | None = None
    """An adapter's ranks, alphas and training."""
    parts: Mapping[str, str] | None = None
    """Parts of a model directory, with their folders."""
    refusal: str | None = None
    """Why a variant that is known is not supported."""
    problems: tuple[str, ...] = ()
    """What is wrong with it."""
    notes: tuple[str, ...] = ()
    """What its user should know."""

    @property
    def is_fine(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems and self.refusal is None


def inspect(paths: Sequence[Path]) -> tuple[Finding, ...]:
    """What is at or below the paths. A file that cannot be read is a finding with a problem, never an error."""
    findings = [_look(place) for place in survey(list(paths))]
    return tuple(_with_totals(finding, findings) for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object, `{"findings": [...]}`, with the fields of `Finding` and `AdapterFacts`."""
    return json.dumps({"findings": [_as_dict(finding) for finding in findings]}, indent=2)


def as_table(findings: Sequence[Finding]) -> str:
    """The findings as aligned columns, what is to be said about each of them below its line.

    Nothing in it can command a terminal.
    """
    rows = [_HEADINGS, *(_row(finding) for finding in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [_aligned(_HEADINGS, widths)]
    for finding, row in zip(findings, rows[1:], strict=True):
        lines.append(_aligned(row, widths))
        lines += (f"    {printable(remark, _MAX_REMARK)}" for remark in _remarks(finding))
    return "\n".join(lines)


def exit_status(findings: Sequence[Finding]) -> int:
    """0 if all is fine, 1 if something is wrong, 2 if there was nothing to look at."""
    if any(finding.kind == "nothing" for finding in findings):
        return 2
    return 0 if all(finding.is_fine for finding in findings) else 1


# ---- looking --------------------------------------------------------------------------------------------------------


def _look(place: Place) -> Finding:
    match place.kind:
        case "weights":
            return _look_at_weights(place)
        case "tokenizer":
            return _look_at_tokenizer(place)
        case "model":
            return _look_at_model(place)
        case "foreign":
            return _look_at_foreign(place)
        case "unread" | "nothing":
            kind: Kind = "nothing" if place.kind == "nothing" else "unknown"
            return Finding(str(place.path), kind, problems=(place.problem,))


def _look_at_weights(place: Place) -> Finding:
    try:
        checkpoint = open_checkpoint(place.path)
    except CheckpointError as error:
        return Finding(str(place.path), "unknown", problems=(_after(place.path, str(error)),))
    finding = Finding(
        path=str(place.path),
        kind="unknown",
        data_types=checkpoint.dtypes(),
        num_parameters=checkpoint.num_parameters,
        num_bytes=sum(header.size_bytes for header in checkpoint.headers),
        num_files=len(checkpoint.headers),
    )
    recognition = identify(checkpoint)
    if recognition is None:
        remark = ("is not recognised as any part of the model",)
        return replace(finding, problems=remark) if place.is_named else replace(finding, notes=remark)
    problems = []
    if recognition.refusal is None:
        problems = PARTS[recognition.component].file_problems(checkpoint, recognition)
    finding = replace(
        finding,
        kind=recognition.component,
        layout=recognition.layout,
        refusal=recognition.refusal,
        problems=tuple(_after(place.path, problem) for problem in problems),
        notes=recognition.notes,
    )
    match recognition.component:
        case "dit":
            return replace(finding, partition=partition_of(place.path))
        case "adapter" if finding.is_fine:
            return _with_adapter_facts(finding, place.path)
        case _:
            return finding


def _with_adapter_facts(finding: Finding, path: Path) -> Finding:
    try:
        header = read_adapter(AdapterSource("inspected", path))
    except StartupError as error:  # its alphas, which are no part of the header, or the file has gone
        return replace(finding, problems=(_after(path, str(error)),))
    facts = {field.name: getattr(header, field.name) for field in fields(AdapterFacts)}
    return replace(finding, partition=header.partition, adapter=AdapterFacts(**facts))


def _look_at_tokenizer(place: Place) -> Finding:
    files = read_tokenizer(place.path)
    # What may name added tokens.
    added = [v.get("added_tokens") if name == "tokenizer.json" else v for name, v in files.values.items()]
    told = json.dumps(added)
    absent = [token for token in ALLOWED_SPECIAL_TOKENS if json.dumps(token) not in told]
    notes = (f"It does not name {', '.join(absent)}: loading adds them if it is Qwen3-VL's own tokenizer.",)
    return Finding(
        path=str(place.path),
        kind="tokenizer",
        num_bytes=sum(map(_size, files.paths)),
        num_files=len(files.paths),
        problems=tuple(_after(place.path, problem) for problem in files.problems),
        notes=notes if absent else (),
    )


def _look_at_model(place: Place) -> Finding:
    found: dict[Part, Path] = {}
    for part in FOLDERS:
        if (path := find_part(place.path, part)) is not None:
            found[part] = path
    missing = [f"has no {KINDS[part]}: {' or '.join(FOLDERS[part])}" for part in FOLDERS if part not in found]
    dit = found.get("dit")
    layout = "" if dit is None else "diffusers" if dit == place.path / FOLDERS["dit"][0] else "official"
    parts: dict[str, str] = {part: str(path) for part, path in found.items()}
    return Finding(str(place.path), "model", layout=layout, parts=parts, problems=tuple(missing))


def _look_at_foreign(place: Place) -> Finding:
    try:
        read_header(place.path)
    except CheckpointError as error:
        remark = _after(place.path, str(error))
    else:
        remark = "is a safetensors file whose name does not end so, and is not looked at"
    return Finding(str(place.path), "unknown", num_bytes=_size(place.path), num_files=1, notes=(remark,))


def _with_totals(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """A model directory with the sums of its parts."""
    if finding.kind != "model" or finding.parts is None:
        return finding
    found = [part for path in finding.parts.values() for part in _at_or_in(path, findings)]
    return replace(
        finding,
        num_parameters=sum(part.num_parameters for part in found),
        num_bytes=sum(part.num_bytes for part in found),
        num_files=sum(part.num_files for part in found),
    )


def _at_or_in(folder: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    return (one for one in findings if one.path == folder or one.path.startswith(f"{folder}{os.sep}"))


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it has gone."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _after(path: Path, message: str) -> str:
    """A message about a file without its path, which the finding has."""
    return message.removeprefix(str(path)).lstrip("/: ") if message.startswith(str(path)) else message


# ---- telling --------------------------------------------------------------------------------------------------------


def _as_dict(finding: Finding) -> dict[str, Any]:
    values = {field.name: getattr(finding, field.name) for field in fields(Finding)}
    adapter = finding.adapter
    return {**values, "adapter": None if adapter is None else vars(adapter)}


def _row(finding: Finding) -> tuple[str, ...]:
    partition = f" {finding.partition}" if finding.partition else ""
    state = "refused" if finding.refusal is not None else "wrong" if finding.problems else "ok"
    return (
        printable(finding.path, _MAX_PATH),
        f"{KINDS[finding.kind]}{partition}",
        printable(finding.layout),
        ", ".join(finding.data_types),
        _scaled(finding.num_parameters, ("", " K", " M", " B", " T")),
        _scaled(finding.num_bytes, (" B", " kB", " MB", " GB", " TB")),
        "-" if finding.kind == "unknown" and finding.is_fine else state,
    )


def _remarks(finding: Finding) -> Iterator[str]:
    if finding.adapter is not None:
        yield _adapter_remark(finding.adapter)
    if finding.refusal is not None:
        yield f"refused: it {finding.refusal}"
    yield from (f"problem: {problem}" for problem in finding.problems)
    yield from (f"note: {note}" for note in finding.notes)


def _adapter_remark(facts: AdapterFacts) -> str:
    rank, alpha = (
        f"{low:g}" if low == high else f"{low:g} to {high:g}"
        for low, high in ((facts.min_rank, facts.max_rank), (facts.min_alpha, facts.max_alpha))
    )
    told = [f"rank {rank}", f"alpha {alpha}", f"{facts.num_modules} modules"]
    if facts.trained_steps is not None:
        told.append(f"trained for {facts.trained_steps} steps")
    shifts = (facts.trained_video_shift, facts.trained_audio_shift)
    if None not in shifts:
        told.append("trained with shifts {:g} (video) and {:g} (audio)".format(*shifts))
    return ", ".join(told)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        text.rjust(width) if heading in _RIGHT_ALIGNED else text.ljust(width)
        for heading, text, width in zip(_HEADINGS, row, widths, strict=True)
    )
    return "  ".join(cells).rstrip()


def _scaled(number: int, units: Sequence[str]) -> str:
    """Three digits and a unit of a power of 1000; nothing for 0."""
    if number == 0:
        return ""
    scaled, index = float(number), 0
    while scaled >= 999.5 and index < len(units) - 1:
        scaled, index = scaled / 1000, index + 1
    return f"{scaled:.3g}{units[index]}" if index else f"{number}{units[0]}"
