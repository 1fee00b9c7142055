from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from services.common import logs

log = logging.getLogger("h3stream.test")
KEY = "h3s_ci_" + "A1b2" * 10


@pytest.fixture
def stderr() -> Iterator[io.StringIO]:
    """Standard error of the process once `take` has been called; afterwards all is as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    before = sys.stderr, sys.excepthook
    yield io.StringIO()
    sys.stderr, sys.excepthook = before
    root.handlers[:] = handlers
    root.setLevel(level)


def take(stream: io.StringIO, log_format: str, *, has_time: bool = True) -> None:
    sys.stderr = stream
    logs.setup(log_format, has_time=has_time)


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_of_text_is_a_line_with_the_ids_behind_the_message(stderr: io.StringIO) -> None:
    take(stderr, "text", has_time=False)
    log.info("starting")
    with logs.request_context("r1"), logs.job_context("j1"):
        log.warning("slow")
    assert stderr.getvalue() == "INFO h3stream.test: starting\nWARNING h3stream.test: slow [job_id=j1 request_id=r1]\n"


def test_a_record_of_json_is_one_line_also_with_an_exception(stderr: io.StringIO) -> None:
    take(stderr, "json")
    with logs.job_context("j1"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it %s", "failed")
    (record,) = records(stderr)
    exception = record.pop("exception")
    assert exception.startswith("Traceback")
    assert exception.endswith("ValueError: two\nlines")
    assert record.pop("time").endswith("Z")
    assert record.pop("pid") > 0
    assert record == {"level": "ERROR", "logger": "h3stream.test", "message": "it failed", "job_id": "j1"}


@pytest.mark.parametrize("log_format", logs.LOG_FORMATS)
def test_no_secret_is_written_wherever_it_stands(stderr: io.StringIO, log_format: str) -> None:
    take(stderr, log_format)
    log.info("authorization: Bearer %s", "abc.DEF-123")
    log.info("the key %r of %s", KEY, {"authorization": f"bearer {KEY}"})
    log.info("H3STREAM_WORKER_TOKEN=%s", "0123abcd")
    try:
        raise RuntimeError(KEY)
    except RuntimeError:
        log.exception("failed with %s", KEY)
    written = stderr.getvalue()
    assert not any(secret in written for secret in ("abc.DEF-123", "A1b2", "0123abcd"))
    assert written.count("h3s_***") == 3


def test_what_others_print_becomes_records_and_workers_records_stay_as_they_are(stderr: io.StringIO) -> None:
    take(stderr, "json")
    own = {"time": "2026-01-02T03:04:05.678Z", "level": "INFO", "logger": "services.dit", "message": "ready"}
    print(f"(WorkerActor pid=42) {json.dumps(own)}", file=sys.stderr)
    print("(raylet) 17", KEY, file=sys.stderr)
    print("half of", end=" ", file=sys.stderr)
    print("a line", file=sys.stderr)
    worker, ray, half = records(stderr)
    assert worker == own
    assert (ray["logger"], ray["message"]) == ("stderr", "(raylet) 17 h3s_***")
    assert half["message"] == "half of a line"


def test_a_second_setup_replaces_the_first(stderr: io.StringIO) -> None:
    take(stderr, "json")
    logs.setup("json")
    print("once", file=sys.stderr)
    log.info("once")
    assert [record["message"] for record in records(stderr)] == ["once", "once"]
    logs.setup("text", has_time=False)
    log.info("plainly")
    assert stderr.getvalue().endswith("}\nINFO h3stream.test: plainly\n")
    assert sys.stderr is stderr


async def test_tasks_tell_of_what_they_were_started_for(stderr: io.StringIO) -> None:
    take(stderr, "json")

    async def work() -> None:
        await asyncio.sleep(0)
        log.info("working")

    tasks = []
    for job_id in ("a", "b"):
        with logs.job_context(job_id):
            tasks.append(asyncio.create_task(work()))
    await asyncio.gather(*tasks, work())
    assert [record.get("job_id") for record in records(stderr)] == ["a", "b", None]


def test_an_error_that_ends_the_process_is_a_record(stderr: io.StringIO) -> None:
    take(stderr, "json")
    error = RuntimeError("lost")
    sys.excepthook(RuntimeError, error, None)
    (record,) = records(stderr)
    assert record["level"] == "CRITICAL"
    assert record["exception"] == "RuntimeError: lost"
