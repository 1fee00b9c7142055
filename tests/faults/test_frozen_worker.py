"""A worker that stands still for good is as lost as one that is gone."""

from __future__ import annotations

import signal
from pathlib import Path

from h3stream import JobWarning
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import children, start_server, stop_server
from tests.e2e.test_resume import during, make


async def test_a_frozen_worker_is_replaced_and_its_clip_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """Its connection tells it within half a minute; it has the device and its lock until it is killed."""
    server = start_server(tiny_model, tmp_path)
    try:
        undisturbed, _ = await make(server, "a fox")
        frozen = children(server.process.pid)["dit"]
        made, events = await make(server, "a fox", ("dit",), during("denoise", 2), signal.SIGSTOP)
        assert made == undisturbed
        (resumed,) = [event.message for event in events if isinstance(event, JobWarning)]
        assert resumed.startswith("the dit worker was lost in phase denoise of chunk 2; ")
        assert not Path(f"/proc/{frozen}").exists()
        entries = read_ledger(server.ledger)
        assert [entry.worker for entry in entries if entry.event == "lost"] == ["dit"]
        assert overlaps(entries) == []
    finally:
        assert stop_server(server) == 0, server.log.read_text()[-4000:]
