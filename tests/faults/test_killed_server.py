"""A server that is killed as a whole leaves nothing behind once the next one has started."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

from tests.e2e.conftest import descendants, start_server, stop_server


def is_running(pid: int) -> bool:
    """Whether a process has not ended; nobody may have taken note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_of_a_killed_server_is_left_once_the_next_one_has_started(tiny_model: Path, tmp_path: Path) -> None:
    server = start_server(tiny_model, tmp_path)
    runtime = Path(json.loads((server.data / "runtime.json").read_text())["path"])
    assert runtime.parent == Path(tempfile.gettempdir())
    pids = descendants(server.process.pid)
    # They notice by themselves that their parent has gone, and end: these cannot, like ones that hang.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    assert any(map(is_running, pids))
    assert runtime.exists()

    following = start_server(tiny_model, tmp_path, "--log-format", "json")
    assert not any(map(is_running, pids))
    assert not runtime.exists()
    assert stop_server(following) == 0, following.log.read_text()[-4000:]
    assert not (server.data / "runtime.json").exists()
    assert (server.data / "VERSION").read_text() == "1\n"
    records = [json.loads(line) for line in following.log.read_text().splitlines()]
    assert f"{runtime} of the server before this one has been removed" in [record["message"] for record in records]
    assert {"orchestrator", "services.dit.weights"} <= {record["logger"] for record in records}
