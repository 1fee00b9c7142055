"""Records of a process that is asked by another one of the server tell of the job and of the caller's call."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from h3stream.v1 import workers_pb2, workers_pb2_grpc
from orchestrator.caller import REQUEST_ID_KEY, Caller
from services.common import logs
from services.common.rpc import RpcServer, connect
from services.common.verbs import Cancelled, VerbRunner

log = logging.getLogger("h3stream.test")


class Dit(workers_pb2_grpc.DitServiceServicer):
    """Logs, as the handler and on the verbs' thread."""

    def __init__(self) -> None:
        self.runner = VerbRunner("test")

    async def CommitChunk(self, request: Any, context: Any) -> workers_pb2.CommitChunkResponse:
        def verb(cancelled: Cancelled) -> None:
            log.warning("computing")

        log.warning("asked")
        await self.runner.run(verb)
        return workers_pb2.CommitChunkResponse()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """What was logged, and what each record tells of."""
    records: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(log, "warning", lambda message: records.append((message, logs._ids())))
    return records


async def test_a_worker_tells_of_the_job_and_the_call_also_on_its_verbs_thread(
    tmp_path: Path, told: list[tuple[str, dict[str, str]]]
) -> None:
    server, dit = RpcServer(("h3stream.v1.DitService",)), Dit()
    workers_pb2_grpc.add_DitServiceServicer_to_server(dit, server.server)
    address = await server.start(f"unix:{tmp_path}/dit.sock")
    try:
        async with connect(address) as channel:
            stub: Any = workers_pb2_grpc.DitServiceStub(channel)
            await stub.CommitChunk(
                workers_pb2.CommitChunkRequest(session_id="job-1"), metadata=Caller(request_id="call-1").metadata()
            )
            await stub.CommitChunk(workers_pb2.CommitChunkRequest(session_id="job-2"))
    finally:
        await server.stop(grace_s=0)
        dit.runner.close()
    first, second = {"job_id": "job-1", "request_id": "call-1"}, {"job_id": "job-2"}
    assert told == [("asked", first), ("computing", first), ("asked", second), ("computing", second)]


def test_processes_call_a_request_s_id_the_same() -> None:
    assert logs.REQUEST_ID_KEY == REQUEST_ID_KEY
