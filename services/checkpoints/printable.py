"""Text from files as people may see it: no character of it can be a command to a terminal, and it is never long."""

from __future__ import annotations

MAX_LENGTH = 200
"""Longest name that is shown whole. The longest published key has 71 characters."""


def printable(text: str, max_length: int = MAX_LENGTH) -> str:
    """The text with everything that is no visible character or space written as an escape, cut to `max_length`."""
    shown = text if len(text) <= max_length else f"{text[:max_length]}…"
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)
