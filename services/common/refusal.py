"""Core's verdict on a request as the error that a caller meets. Imports no torch: the orchestrator uses it too."""

from __future__ import annotations

from collections.abc import Iterable

from core.request import Violation
from h3stream.errors import FieldViolation, OffGridError
from h3stream.fields import invalid_request


def refuse(violations: Iterable[Violation]) -> None:
    """Raises InvalidRequestError with every violation; returns if there is none.

    A frame count off the grid, and nothing else wrong, is OffGridError.
    """
    found = [FieldViolation(v.field, v.description, v.reason) for v in violations]
    if [violation.reason for violation in found] == [OffGridError.reason]:
        raise OffGridError(found[0].description, violations=tuple(found))
    if found:
        raise invalid_request(found)
