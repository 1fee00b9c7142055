"""Each worker as a process of its own, without Ray: the same session over them makes the same clip."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.phases import Worker
from h3stream import Client, Completed
from h3stream.errors import UnsupportedError
from h3stream.v1 import records_pb2, types_pb2
from orchestrator.admission import make_plan
from orchestrator.job import Job
from orchestrator.job_files import LOG_NAME
from orchestrator.job_log import JobLog
from orchestrator.lane import Lane
from orchestrator.model_info import read_model_info
from orchestrator.session import run_session
from tests.e2e.conftest import Server
from tests.job_logs import read_log


class ProcessLaneHost:
    """Hosts the three workers as `python -m services.NAME`."""

    token = ""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> Mapping[Worker, str]:
        for worker in Worker:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"services.{worker.value}", "--model", str(self._model)),
                *("--listen", "127.0.0.1:0", "--ledger", str(self._directory / "residency.jsonl")),
                stdout=asyncio.subprocess.PIPE,
            )
            self._processes.append(process)
        return {w: await self._address(p) for w, p in zip(Worker, self._processes, strict=True)}

    async def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        assert [await process.wait() for process in self._processes] == [0, 0, 0]

    async def _address(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
        assert line.startswith("listening on "), line
        return line.removeprefix("listening on ").strip()


async def test_three_processes_make_the_clip_that_the_service_makes(
    tiny_model: Path, server: Server, tmp_path: Path
) -> None:
    lane = Lane(ProcessLaneHost(tiny_model, tmp_path))
    await lane.start()
    try:
        assert {w.worker for w in await lane.describe()} == {"text_encoder", "dit", "vae"}
        with pytest.raises(UnsupportedError, match="enter the phase first"):
            await lane.text_encoder.encode("a fox in the snow")
        model = read_model_info(tiny_model)
        (tmp_path / "job").mkdir()
        record = records_pb2.JobRecord(
            job_id="job", prompt="a fox in the snow", plan=make_plan(model.default_clip, model, (), 6_000_000)
        )
        job = Job(record, tmp_path / "job", JobLog(tmp_path / "job" / LOG_NAME))
        await run_session(job, lane)
        await lane.clear("job")
        job.end(None)
        events = read_log(job.log)
        fragments = [e.fragment.data for e in events if e.HasField("fragment")]
        assert all(not w.session_ids and not w.device_weight_bytes for w in await lane.describe())
    finally:
        await lane.stop()
    with Client(server.address) as client:
        served = list(client.generate("a fox in the snow"))
    assert isinstance(served[-1], Completed)
    assert events[-1].completed.latents_sha256 == served[-1].latents_sha256
    assert b"".join(fragments) == b"".join(e.media for e in served if not hasattr(e, "mime_type"))
    assert types_pb2.Phase.Name(events[-2].phase.phase) == "PHASE_FINISH"
