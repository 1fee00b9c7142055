"""What a check has found, and findings as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from services.checkpoints.printable import printable

Level = Literal["ok", "warn", "fail"]
_MAX_TEXT = 4000
_COLUMN = 13
"""Letters of the longest name of a check."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at."""
    level: Level
    """"ok"; "warn" for what the server starts with all the same; "fail" for what keeps it from working."""
    message: str
    """What was found."""
    remedy: str = ""
    """How to mend it; empty where all is well."""


def is_fine(findings: Sequence[Finding]) -> bool:
    """Whether the server can work."""
    return all(finding.level != "fail" for finding in findings)


def as_text(finding: Finding) -> str:
    """A line, and below it how to mend what is wrong. Nothing in it can command a terminal."""
    first, *more = finding.message.splitlines() or [""]
    lines = [f"{finding.level:4}  {finding.check:{_COLUMN}}  {printable(first, _MAX_TEXT)}"]
    lines += (f"{'':{_COLUMN + 8}}{printable(line, _MAX_TEXT)}" for line in more)
    if finding.remedy:
        lines.append(f"{'':{_COLUMN + 8}}-> {printable(finding.remedy, _MAX_TEXT)}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object, `{"is_fine": true, "findings": [...]}`, with the fields of `Finding`."""
    return json.dumps({"is_fine": is_fine(findings), "findings": list(map(asdict, findings))}, indent=2)
