"""Which session a worker may still open."""

from __future__ import annotations

from collections.abc import Collection

from h3stream.errors import InvalidRequestError, OverloadedError

MAX_SESSIONS = 16
"""Open at a time: a lane has one, and each holds memory until it is closed."""
MAX_ID_CHARACTERS = 128


def check_new_session(session_id: str, open_sessions: Collection[str]) -> None:
    """Raises InvalidRequestError for what names no session, OverloadedError if there are too many already."""
    if not session_id:
        raise InvalidRequestError("session_id is empty")
    if len(session_id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"session_id has {len(session_id)} characters; at most {MAX_ID_CHARACTERS} are taken")
    if len(open_sessions) >= MAX_SESSIONS:
        raise OverloadedError(f"{len(open_sessions)} sessions are open, which is all there can be: close one first")
