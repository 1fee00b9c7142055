"""The machine: Python, packages, memory, limits, address, clock. Every function is one check and raises nothing."""

from __future__ import annotations

import ctypes
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from orchestrator.doctor.finding import Finding

DISTRIBUTION = "h3stream-server"
LEAST_PYTHON = (3, 11)
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 80 << 20
"""What Ray puts there (`orchestrator/lanes.py`)."""
MEMORY_BESIDE_WEIGHTS = 3 << 30
"""Host memory of the orchestrator, Ray and three workers without weights: about 2 GiB on the tiny model."""
OPEN_FILES = 4096
"""A viewer is a connection and, now and then, a file: so many are enough for a thousand viewers, Ray and the rest."""
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in the second and the first version of control groups."""
CLOCK_SLACK_S = 60.0
"""How far the clocks of machines that share a file system may be apart."""
_CLOCK_UNSYNCHRONISED = 5
"""What adjtimex(2) returns for a clock that nothing sets (TIME_ERROR)."""


def check_python() -> Finding:
    """The interpreter."""
    told = f"Python {platform.python_version()} ({sys.executable}), {platform.machine()}"
    if sys.version_info < LEAST_PYTHON or platform.system() != "Linux":
        return Finding("python", "fail", f"{told} on {platform.system()}", "use Python 3.11 or newer on Linux")
    return Finding("python", "ok", told)


def check_packages() -> Finding:
    """The distributions that the server's own needs."""
    try:
        required = [
            found.group()
            for line in metadata.requires(DISTRIBUTION) or ()
            if "extra ==" not in line and (found := re.match(r"[\w.-]+", line))
        ]
    except metadata.PackageNotFoundError:
        return Finding("packages", "fail", f"{DISTRIBUTION} is not installed", "run `pip install` as the README says")
    versions, missing = [], []
    for name in required:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(
            "packages", "fail", f"missing: {', '.join(missing)}",
            f"pip install -c constraints.txt {' '.join(missing)}, in the environment of {sys.executable}",
        )  # fmt: skip
    return Finding("packages", "ok", ", ".join(versions))


def check_memory(model_bytes: int, memory: tuple[int, int]) -> Finding:
    """Host memory against the model, whose weights all stay in it.

    model_bytes: of its weight files; 0 for no model.  memory: bytes in all and bytes that are free.
    """
    total, available = memory
    told = f"{_gib(available)} of {_gib(total)} are free"
    if model_bytes:
        told += f"; the model's files are {_gib(model_bytes)}"
    needed = model_bytes + MEMORY_BESIDE_WEIGHTS
    if needed > total:
        return Finding(
            "memory", "fail", told,
            f"give the machine or container {_gib(needed)} or more, or use smaller weights (fp8, ComfyUI's NVFP4)",
        )  # fmt: skip
    if needed > available:
        return Finding("memory", "warn", told, f"free memory until {_gib(needed)} are there before the server starts")
    return Finding("memory", "ok", told)


def memory() -> tuple[int, int]:
    """Bytes of memory that this process and its children may have in all, and bytes of them that are free."""
    text = Path("/proc/meminfo").read_text()
    total, available = (
        1024 * int(found.group(1)) if (found := re.search(rf"^{name}: +(\d+) kB", text, re.M)) else 0
        for name in ("MemTotal", "MemAvailable")
    )
    for limit_name, used_name in _CGROUP_FILES:
        try:
            limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def check_shared_memory(directory: Path = SHARED_MEMORY) -> Finding:
    """Where Ray keeps its object store."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Finding("shared memory", "warn", f"{directory}: {error.strerror}", f"mount a tmpfs at {directory}")
    told = f"{free >> 20} MiB are free in {directory}"
    if free < SHARED_MEMORY_BYTES:
        return Finding(
            "shared memory", "warn", f"{told}; Ray wants {SHARED_MEMORY_BYTES >> 20} MiB and takes the disk instead",
            "give the container --shm-size=256m (in Kubernetes an emptyDir of medium Memory), or free what is there",
        )  # fmt: skip
    return Finding("shared memory", "ok", told)


def check_open_files() -> Finding:
    """How many files a process may open; Python does not raise the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = "any number of files" if soft == resource.RLIM_INFINITY else f"{soft} files"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return Finding(
            "open files", "warn", f"a process may open {told}, too few for a thousand viewers",
            f"`ulimit -n {OPEN_FILES}`, or LimitNOFILE={OPEN_FILES} in the systemd unit (the hard limit is {hard})",
        )  # fmt: skip
    return Finding("open files", "ok", f"a process may open {told}")


def check_address(listen: str, *, is_server_running: bool) -> Finding:
    """Whether the address can be listened on.

    listen: "HOST:PORT".  is_server_running: whether a server has the data directory, and probably the port with it.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            # As gRPC does: a connection that is still being forgotten does not keep the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except socket.gaierror as error:
        return Finding("address", "fail", f"{listen}: {error.strerror}", "give --listen an address of this machine")
    except OSError as error:
        if is_server_running:
            return Finding("address", "ok", f"{listen} is taken, as it should be: a server is running")
        remedy = "give --listen another port, or end what listens there (`ss -ltnp`)"
        if isinstance(error, PermissionError):
            remedy = "give --listen a port from 1024 on, or let the unit have CAP_NET_BIND_SERVICE"
        return Finding("address", "fail", f"{listen}: {error.strerror}", remedy)
    return Finding("address", "ok", f"{listen} is free")


def check_clock(now_s: float, known_past_s: float) -> Finding:
    """The wall clock, by which keys and certificates expire and artifacts age.

    now_s: what it says.  known_past_s: a time that has certainly passed.
    """
    told = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s))
    if now_s < known_past_s - CLOCK_SLACK_S:
        past = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(known_past_s))
        return Finding("clock", "fail", f"it is {told} here, but files here are from {past}", "set the clock")
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == _CLOCK_UNSYNCHRONISED:
        return Finding(
            "clock", "warn", f"{told}; the kernel says that nothing keeps it right",
            "run chrony or systemd-timesyncd (for a container on its host): keys and certificates expire by it",
        )  # fmt: skip
    return Finding("clock", "ok", told)


def check_host(now_s: float, known_past_s: float) -> Iterator[Finding]:
    """What depends on neither the settings nor the model."""
    yield check_python()
    yield check_packages()
    yield check_shared_memory()
    yield check_open_files()
    yield check_clock(now_s, known_past_s)


def newest_of(paths: Iterable[Path]) -> float:
    """When the last of some files was written, in seconds since 1970; 0 for none that is there."""
    newest_s = 0.0
    for path in paths:
        with suppress(OSError):
            newest_s = max(newest_s, path.stat().st_mtime)
    return newest_s


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
