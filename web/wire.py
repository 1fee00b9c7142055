"""JSON and HTTP forms of what the SDK speaks: requests in, events, jobs and errors out."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from datetime import datetime
from typing import Any

from h3stream import errors
from h3stream.adapters import AdapterChoice
from h3stream.errors import FieldViolation, GenerationError, InvalidRequestError, OverloadedError
from h3stream.events import Event, Preview
from h3stream.fields import invalid_request
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from h3stream.request import Branch, GenerateRequest, PreviewSpec

REQUEST_FIELDS = tuple(
    field.name for field in dataclasses.fields(GenerateRequest) if field.name != "cancel_on_disconnect"
)
"""What a request may hold. The page's job outlives every connection, so it cannot ask for the opposite."""
REFINE_FIELDS = tuple(field.name for field in dataclasses.fields(RefineSpec))

_OBJECTS: dict[str, type[Any]] = {
    "adapters": AdapterChoice,
    "branch": Branch,
    "preview": PreviewSpec,
    "audio_range": TimeRange,
    "cache": FrozenCacheSpec,
}
"""Fields that are objects, or arrays of them, with the class that each is of."""

_STATUS: tuple[tuple[type[GenerationError], int], ...] = (
    (errors.InvalidRequestError, 400),
    (errors.UnauthenticatedError, 401),
    (errors.PermissionDeniedError, 403),
    (errors.JobNotFoundError, 404),
    (errors.ArtifactNotFoundError, 404),
    (errors.UnsupportedError, 409),
    (errors.IdempotencyKeyError, 409),
    (errors.JobCancelledError, 409),
    (errors.OverloadedError, 429),
    (errors.NotReadyError, 503),
    (errors.DeadlineError, 504),
    (errors.GenerationError, 500),
)


def http_status(error: GenerationError) -> int:
    """The HTTP status of an error."""
    return next(status for cls, status in _STATUS if isinstance(error, cls))


def error_json(error: GenerationError) -> dict[str, Any]:
    """What a caller is told of an error."""
    result: dict[str, Any] = {"reason": error.reason, "message": error.message, "job_id": error.job_id}
    if isinstance(error, InvalidRequestError):
        result["violations"] = [dataclasses.asdict(violation) for violation in error.violations]
    if isinstance(error, OverloadedError):
        result["retry_after_s"] = error.retry_after_s
    return result


def parse_request(body: bytes) -> GenerateRequest:
    """The request that a JSON object states; names and values are those of `GenerateRequest`.

    Raises InvalidRequestError, with one violation per field, also for names that do not exist.
    """
    fields = _json_object(body)
    violations = _unknown_fields(fields, REQUEST_FIELDS)
    if "prompt" not in fields and fields.get("branch") is None:
        violations.append(FieldViolation("prompt", "prompt is missing; it must be a string"))
    given = _objects({name: value for name, value in fields.items() if name in REQUEST_FIELDS}, violations)
    if given.get("refine_audio") is not None:
        wish = given.pop("refine_audio")
        try:
            given["refine_audio"] = _refine_spec(wish)
        except InvalidRequestError as error:
            prefix = "refine_audio."
            violations += (FieldViolation(prefix + v.field, prefix + v.description, v.reason) for v in error.violations)
        except TypeError:
            rule = f"it must be an object with fields of {', '.join(REFINE_FIELDS)}"
            violations.append(FieldViolation("refine_audio", f"refine_audio is {wish!r:.80}; {rule}"))
    try:
        request = GenerateRequest(**{"prompt": "", **given})
    except InvalidRequestError as error:
        raise invalid_request([*violations, *error.violations]) from None
    if violations:
        raise invalid_request(violations)
    return request


def parse_refinement(body: bytes) -> RefineSpec:
    """The refinement that a JSON object states; names and values are those of `RefineSpec`.

    Raises InvalidRequestError, with one violation per field, also for names that do not exist.
    """
    return _refine_spec(_json_object(body))


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid_request([FieldViolation("body", "the body is no JSON; it must be a JSON object")]) from None
    if not isinstance(fields, dict):
        raise invalid_request([FieldViolation("body", "the body is no JSON object; it must be one")])
    return fields


def _refine_spec(fields: Any) -> RefineSpec:
    """Raises TypeError for what is no JSON object."""
    if not isinstance(fields, dict):
        raise TypeError(fields)
    violations = _unknown_fields(fields, REFINE_FIELDS)
    given = _objects({name: value for name, value in fields.items() if name in REFINE_FIELDS}, violations)
    try:
        spec = RefineSpec(**given)
    except InvalidRequestError as error:
        raise invalid_request([*violations, *error.violations]) from None
    if violations:
        raise invalid_request(violations)
    return spec


def _unknown_fields(fields: dict[str, Any], known: tuple[str, ...]) -> list[FieldViolation]:
    return [
        FieldViolation(name[:80], f"there is no field {name[:80]!r}; fields are {', '.join(known)}")
        for name in fields
        if name not in known
    ]


def _objects(given: dict[str, Any], violations: list[FieldViolation]) -> dict[str, Any]:
    """The fields with objects made of what stands for them; what stands for none is left out and told."""
    made = dict(given)
    for name, value in given.items():
        if (cls := _OBJECTS.get(name)) is None or value is None:
            continue
        try:
            made[name] = [cls(**item) for item in _array(value)] if name == "adapters" else cls(**value)
        except TypeError:
            members = ", ".join(field.name for field in dataclasses.fields(cls))
            shape = f"an array of objects with {members}" if name == "adapters" else f"an object with {members}"
            violations.append(FieldViolation(name, f"{name} is {made.pop(name)!r:.80}; it must be {shape}"))
    return made


def _array(value: Any) -> list[Any]:
    """Raises TypeError for what is no JSON array."""
    if not isinstance(value, list):
        raise TypeError(value)
    return value


def to_json(value: Any) -> str:
    """Dataclasses as JSON; times in ISO 8601, bytes in base64."""
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def server_sent_event(event: Event) -> bytes:
    """An event as one message of an event stream, its number as the id. Media stay out; stills are told in base64."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if not isinstance(event, Preview):
        fields.pop("data", None)
    return sse_message(event_name(event), to_json(fields), event.seq)


def sse_message(name: str, data: str, number: int | None = None) -> bytes:
    """One message of an event stream; `data` is a single line."""
    head = f"event: {name}\n" if number is None else f"id: {number}\nevent: {name}\n"
    return f"{head}data: {data}\n\n".encode()


def event_number(name: str, text: str) -> int:
    """The number of an event that a text states. Raises InvalidRequestError, which calls it by that name."""
    if not re.fullmatch("[0-9]{1,18}", text):  # no job has so many events, and the service takes no larger numbers
        rule = "it must be an event's number of at most 18 digits"
        raise invalid_request([FieldViolation(name, f"{name} is {text[:80]!a}; {rule}")])
    return int(text)


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of the one range that a Range header asks for; None for the whole.

    Headers that are malformed or ask for several ranges count as absent (RFC 9110 §14.2).
    Raises ValueError if nothing of the range exists.
    """
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= stop:
        raise ValueError(f"no byte of {header} exists; there are {size}")
    return start, stop


def event_name(event: Event) -> str:
    """The class in snake case, e.g. "phase_change"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")
