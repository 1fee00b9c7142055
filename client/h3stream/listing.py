"""Which jobs a caller wants to see."""

from __future__ import annotations

from collections.abc import Sequence

from h3stream.errors import FieldViolation
from h3stream.fields import INT32, MAX_PROMPT_BYTES, invalid_request, text_violations
from h3stream.job import JOB_STATES, JobState
from h3stream.v1 import video_pb2


def list_request(
    page_token: str, page_size: int, states: Sequence[JobState], all_tenants: bool
) -> video_pb2.ListJobsRequest:
    """The message that asks for a page of jobs. Raises InvalidRequestError for what no message can hold."""
    violations = text_violations("page_token", page_token, MAX_PROMPT_BYTES)
    if type(page_size) is not int or not INT32[0] <= page_size <= INT32[1]:
        violations.append(FieldViolation("page_size", f"page_size is {page_size!r:.80}; it must be an integer"))
    if isinstance(states, str) or any(state not in JOB_STATES for state in states):
        rule = f"it must be a sequence of {', '.join(JOB_STATES)}"
        violations.append(FieldViolation("states", f"states is {states!r:.80}; {rule}"))
    if violations:
        raise invalid_request(violations)
    names = [f"JOB_STATE_{state.upper()}" for state in states]
    return video_pb2.ListJobsRequest(page_size=page_size, page_token=page_token, states=names, all_tenants=all_tenants)
