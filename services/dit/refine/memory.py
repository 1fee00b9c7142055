"""Memory that can still be had, on the host and on the device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Host memory that this process can have without swapping: the system's, or less where a cgroup limits it."""
    limits = [_meminfo(proc, "MemAvailable")]
    for line in (proc / "self" / "cgroup").read_text().splitlines() if (proc / "self" / "cgroup").exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _left(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _left(cgroups / "memory", path, *names)
    return max(0, min(limits))


def resident_host_bytes(proc: Path = PROC) -> int:
    """Host memory that this process holds."""
    return _kibibytes(proc / "self" / "status", "VmRSS")


def free_device_bytes(device: torch.device) -> int:
    """Device memory that nobody holds, with what this process's allocator keeps for itself; the host's for a CPU."""
    if device.type != "cuda":
        return available_host_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _meminfo(proc: Path, field: str) -> int:
    return _kibibytes(proc / "meminfo", field)


def _kibibytes(path: Path, field: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """What the limits of a cgroup and of those that it lies in leave; empty without any.

    In a container the path is often the host's, of which only the end, or nothing, is mounted: what is not there limits
    nothing that could be read.
    """
    group = root / path.strip("/")
    left = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or "max"
            bound = int((directory / limit).read_text())
            used = int((directory / usage).read_text())
            left.append(bound - used + _statistic(directory / "memory.stat", reclaimable))
    return left


def _statistic(path: Path, name: str) -> int:
    """A number of a cgroup's statistics; 0 if it does not tell it."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
