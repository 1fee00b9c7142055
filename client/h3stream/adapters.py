"""The adapters that a request names."""

from __future__ import annotations

from dataclasses import dataclass

from h3stream.errors import FieldViolation
from h3stream.fields import is_finite_or_none, too_many

MAX_ADAPTERS, MAX_ADAPTER_NAME_BYTES = 64, 256
"""What a message has room for beside the longest prompt; the server's own limits are lower."""


@dataclass(frozen=True)
class AdapterUse:
    """An adapter that a clip is sampled with."""

    name: str
    """Name in the server's registry (`Client.adapters`)."""
    strength: float
    """What its update is multiplied with; finite and not 0."""


@dataclass(frozen=True)
class AdapterChoice:
    """An adapter that a pass is to be sampled with."""

    name: str
    """Name in the server's registry (`Client.adapters`)."""
    strength: float | None = None
    """What its update is multiplied with; finite and not 0. None: the registry's."""


def adapter_violations(adapters: object) -> list[FieldViolation]:
    """What no message can hold of the adapters of a request."""
    if not isinstance(adapters, tuple):
        return [FieldViolation("adapters", f"adapters is {adapters!r:.80}; it must be a sequence of AdapterChoice")]
    if len(adapters) > MAX_ADAPTERS:
        return [too_many("adapters", len(adapters), MAX_ADAPTERS)]
    violations = []
    for index, choice in enumerate(adapters):
        field = f"adapters[{index}]"
        if not isinstance(choice, AdapterChoice) or not isinstance(choice.name, str):
            violations.append(
                FieldViolation(field, f"{field} is {choice!r:.80}; it must be an AdapterChoice with a string as name")
            )
        elif not _is_short_unicode(choice.name):
            rule = f"it must be Unicode text of at most {MAX_ADAPTER_NAME_BYTES} bytes"
            violations.append(FieldViolation(f"{field}.name", f"{field}.name is {choice.name[:80]!a}; {rule}"))
        elif not is_finite_or_none(choice.strength):
            violations.append(
                FieldViolation(
                    f"{field}.strength", f"{field}.strength is {choice.strength!r:.80}; it must be a finite number"
                )
            )
    return violations


def _is_short_unicode(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_ADAPTER_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False
