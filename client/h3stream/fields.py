"""What a message can hold, checked before it is made; whether the rest can be done is the server's to say."""

from __future__ import annotations

import sys

from h3stream.errors import FieldViolation, InvalidRequestError

INT32 = (-(2**31), 2**31 - 1)
UINT64 = (0, 2**64 - 1)
MAX_PROMPT_BYTES = 1_000_000
"""A longer prompt would not fit a message; the server's own limit (GetServerInfo) is far lower."""


def invalid_request(violations: list[FieldViolation]) -> InvalidRequestError:
    """The error for one or more violations; its message holds them all."""
    return InvalidRequestError(
        "; ".join(violation.description for violation in violations), violations=tuple(violations)
    )


def too_many(field: str, number: int, limit: int) -> FieldViolation:
    """What is wrong with a list of more entries than a message holds."""
    return FieldViolation(field, f"{field} holds {number} {field}; a message holds at most {limit}")


def text_violations(field: str, text: object, max_bytes: int) -> list[FieldViolation]:
    """What is wrong with a text."""
    if not isinstance(text, str):
        return [FieldViolation(field, f"{field} is {text!r:.80}; it must be a string")]
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        rule = f"holds a lone surrogate at character {error.start}; it must be Unicode text"
        return [FieldViolation(field, f"{field} {rule}")]
    if size_bytes > max_bytes:
        return [FieldViolation(field, f"{field} has {size_bytes} bytes; a message holds at most {max_bytes}")]
    return []


def sendable(field: str, text: str) -> str:
    """A text as it is. Raises InvalidRequestError if no message can hold it."""
    if violations := text_violations(field, text, MAX_PROMPT_BYTES):
        raise invalid_request(violations)
    return text


def is_finite_or_none(value: object) -> bool:
    """Whether a value is None or a number."""
    # NaN is not <=; True is no number that anybody means.
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)  # type: ignore[arg-type]
