from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START_TIMEOUT_S = 120.0


@dataclass
class Server:
    """`python -m orchestrator` as a process of its own: Ray, one lane on the tiny model, VideoService."""

    process: subprocess.Popen[str]
    address: str
    data: Path
    log: Path

    @property
    def ledger(self) -> Path:
        return self.data / "residency.0.jsonl"


@dataclass
class Clip:
    """What one request gave."""

    job_id: str = ""
    media: bytes = b""
    fragments: list[bytes] = field(default_factory=list)
    latents_sha256: str = ""


def start_server(model: Path | None, directory: Path, *arguments: str, group: bool = False) -> Server:
    """group: in a process group of its own."""
    log = directory / "server.log"
    given = [] if model is None else ["--model", str(model)]
    command = [sys.executable, "-m", "orchestrator", *given, "--listen", "127.0.0.1:0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--data", str(directory / "data"), *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0 if group else None,
        )
    give_up = threading.Timer(START_TIMEOUT_S, process.kill)
    give_up.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("listening on "):
            give_up.cancel()
            # Drained so that the server never blocks on a full pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return Server(process, line.removeprefix("listening on ").strip(), directory / "data", log)
    give_up.cancel()
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def stop_server(server: Server, timeout_s: float = 60) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout_s)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    running = start_server(tiny_model, tmp_path_factory.mktemp("server"))
    yield running
    assert stop_server(running) == 0, running.log.read_text()[-4000:]


def children(pid: int) -> dict[str, int]:
    """Process ids of the lane's workers below a server, by service name."""
    import psutil

    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        for connection in process.net_connections("unix"):
            for name in ("text_encoder", "dit", "vae"):
                if f"-{name}-" in (connection.laddr or ""):
                    found[name] = process.pid
    return found


def edge_of(pid: int) -> int:
    """Process id of what callers of a server are connected to."""
    import psutil

    (edge,) = [child.pid for child in psutil.Process(pid).children() if "orchestrator.edge" in child.cmdline()]
    return edge


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process has started, directly or not."""
    import psutil

    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
