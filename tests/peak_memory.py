"""How much memory an action takes at its height, for programs that tests start to measure it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

SLACK_BYTES = 24 << 20
"""What the allocator keeps of what was freed, and what the interpreter takes for itself meanwhile."""


def peak_of(action: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes that the process holds during an action beyond those before it, and what the action returns."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _memory("VmRSS")
    result = action()
    return _memory("VmHWM") - before, result


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
