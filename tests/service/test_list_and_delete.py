"""Which jobs there are, page by page, and removing one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.prompt import MAX_PROMPT_BYTES
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.v1 import video_pb2
from tests.service.callers import CoreCaller, callers, status_of
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import until

SUCCEEDED, CANCELLED = video_pb2.JOB_STATE_SUCCEEDED, video_pb2.JOB_STATE_CANCELLED
QUEUED, RUNNING = video_pb2.JOB_STATE_QUEUED, video_pb2.JOB_STATE_RUNNING


@pytest.fixture
async def studio(service: Service) -> AsyncIterator[CoreCaller]:
    async with callers(service, ("studio", "generate")) as [caller]:
        yield caller


async def made(caller: CoreCaller, prompt: str = "a fox") -> str:
    """A job that has succeeded."""
    job_id = (await caller.submit(prompt)).job_id
    await caller.ended(job_id)
    return job_id


def ids(page: video_pb2.ListJobsResponse) -> list[str]:
    return [job.job_id for job in page.jobs]


async def test_a_server_without_jobs_lists_none(studio: CoreCaller) -> None:
    assert await studio.list() == video_pb2.ListJobsResponse()


async def test_jobs_are_listed_newest_first_in_every_state(service: Service, studio: CoreCaller) -> None:
    done = await made(studio, "a bear")
    service.script.gates["sample:0.1"] = asyncio.Event()
    running = (await studio.submit("a fox", priority=video_pb2.JOB_PRIORITY_HIGH)).job_id
    await until_running(studio, running)
    cancelled, waiting = (await studio.submit()).job_id, (await studio.submit("an owl")).job_id
    await studio.cancel(cancelled)
    page = await studio.list()
    assert ids(page) == [waiting, cancelled, running, done]
    assert [job.state for job in page.jobs] == [QUEUED, CANCELLED, RUNNING, SUCCEEDED]
    assert [job.prompt for job in page.jobs] == ["an owl", "a fox", "a fox", "a bear"]
    assert [job.queue_position for job in page.jobs] == [1, 0, 0, 0]
    assert page.jobs[2].priority == video_pb2.JOB_PRIORITY_HIGH
    assert page.jobs[3].priority == video_pb2.JOB_PRIORITY_NORMAL
    assert page.jobs[3] == await studio.get(done)
    assert page.jobs[3].artifacts
    assert not page.next_page_token


async def until_running(caller: CoreCaller, job_id: str) -> None:
    async with asyncio.timeout(10):
        while (await caller.get(job_id)).state == QUEUED:
            await asyncio.sleep(0.01)


async def test_states_choose_among_the_jobs(service: Service, studio: CoreCaller) -> None:
    done = await made(studio)
    service.script.gates["sample:0.1"] = asyncio.Event()
    running = (await studio.submit()).job_id
    await until_running(studio, running)
    assert ids(await studio.list(states=[SUCCEEDED])) == [done]
    assert ids(await studio.list(states=[RUNNING, SUCCEEDED])) == [running, done]
    assert ids(await studio.list(states=[CANCELLED])) == []


@pytest.mark.parametrize("max_queued_jobs", [20])
async def test_pages_hold_every_job_once_while_jobs_come_and_go(service: Service, studio: CoreCaller) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    jobs = [(await studio.submit()).job_id for _ in range(7)]
    found, token = [], ""
    while True:
        page = await studio.list(page_size=3, page_token=token)
        assert len(page.jobs) <= 3
        found += ids(page)
        token = page.next_page_token
        if not token:
            break
        await studio.submit()  # comes before the first page
        await studio.cancel(jobs[0])  # is still listed on the last
    assert found == jobs[::-1]


@pytest.mark.parametrize("max_queued_jobs", [100])
async def test_a_page_of_long_prompts_fits_a_message(service: Service, studio: CoreCaller) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    jobs = [(await studio.submit("a" * MAX_PROMPT_BYTES)).job_id for _ in range(70)]
    first = await studio.list(page_size=100)
    assert 30 < len(first.jobs) < 70
    assert first.ByteSize() < MAX_MESSAGE_BYTES
    rest = await studio.list(page_size=100, page_token=first.next_page_token)
    assert ids(first) + ids(rest) == jobs[::-1]
    assert not rest.next_page_token


async def test_what_is_wrong_with_a_list_is_told_field_by_field(studio: CoreCaller) -> None:
    for fields, told in (
        ({"page_size": 101}, "page_size is 101; it must be from 1 to 100, or 0; the nearest valid value is 100"),
        ({"page_size": -1}, "page_size is -1; it must be from 1 to 100, or 0; the nearest valid value is 1"),
        ({"page_token": "more"}, "page_token is 'more'"),
        ({"states": [99]}, "states[0] is 99; it must be one of JOB_STATE_QUEUED (1), JOB_STATE_RUNNING (2)"),
        ({"states": [0]}, "states[0] is 0; it must be one of"),
        ({"states": [1] * 6}, "states holds 6 states; there are 5"),
    ):
        status, message = await status_of(studio.list(**fields))
        assert status == "INVALID_ARGUMENT"
        assert told in message


async def test_a_job_that_has_ended_is_deleted_with_its_files(service: Service, studio: CoreCaller) -> None:
    kept, job_id = await made(studio), await made(studio)
    assert (service.data / "jobs" / job_id).is_dir()
    await studio.delete(job_id)
    assert not (service.data / "jobs" / job_id).exists()
    assert ids(await studio.list()) == [kept]
    for call in (studio.get(job_id), studio.delete(job_id), studio.follow(job_id), studio.find(job_id, "final.mp4")):
        assert (await status_of(call))[0] == "NOT_FOUND"


async def test_deleting_gives_back_what_was_stored(studio: CoreCaller) -> None:
    job_id = await made(studio)
    stored = (await studio.info()).caller.usage.num_stored_bytes
    assert stored > sum(artifact.size_bytes for artifact in (await studio.get(job_id)).artifacts)
    await studio.delete(job_id)
    assert (await studio.info()).caller.usage.num_stored_bytes == 0


async def test_a_job_that_has_not_ended_is_not_deleted(service: Service, studio: CoreCaller) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    running = (await studio.submit()).job_id
    await until(service, "sample:0.1")
    waiting = (await studio.submit()).job_id
    for job_id in (running, waiting):
        status, message = await status_of(studio.delete(job_id))
        assert status == "FAILED_PRECONDITION"
        assert "cancel" in message
    gate.set()
    await studio.ended(waiting)
    await studio.delete(running)
    await studio.delete(waiting)


async def test_no_job_of_that_name_is_not_found(studio: CoreCaller) -> None:
    for name in ("", "nobody", "../jobs", "a" * 10_000):
        assert (await status_of(studio.delete(name)))[0] == "NOT_FOUND"
