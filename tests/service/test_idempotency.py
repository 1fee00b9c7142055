"""One request, sent as often as its caller must, makes one job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from h3stream.v1 import video_pb2
from tests.service.callers import CoreCaller, callers, status_of
from tests.service.conftest import Service
from tests.service.fake_workers import latents_file
from tests.service.test_cancel_and_queue import until

KEY = "order-7/take-1"


@pytest.fixture
async def studio(service: Service) -> AsyncIterator[CoreCaller]:
    async with callers(service, ("studio", "generate")) as [caller]:
        yield caller


async def test_the_same_request_is_answered_with_the_same_job(studio: CoreCaller) -> None:
    first = await studio.submit(idempotency_key=KEY, seed=3)
    again = await studio.submit(idempotency_key=KEY, seed=3)
    assert (first.is_known, again.is_known) == (False, True)
    assert first.job_id == again.job_id
    await studio.ended(first.job_id)
    assert (await studio.submit(idempotency_key=KEY, seed=3)).job_id == first.job_id
    assert len((await studio.list()).jobs) == 1


async def test_its_events_are_those_of_the_job_from_the_beginning(service: Service) -> None:
    events = await service.generate(idempotency_key=KEY)
    assert await service.generate(idempotency_key=KEY) == events
    assert events[-1].HasField("completed")


async def test_requests_at_once_make_one_job(studio: CoreCaller) -> None:
    answers = await asyncio.gather(*(studio.submit(idempotency_key=KEY) for _ in range(8)))
    assert len({answer.job_id for answer in answers}) == 1
    assert sorted(answer.is_known for answer in answers) == [False] + [True] * 7


@pytest.mark.parametrize(
    "changed",
    [{"prompt": "a bear"}, {"seed": 1}, {"priority": video_pb2.JOB_PRIORITY_HIGH}, {"deadline_s": 60},
     {"cancel_on_disconnect": True}, {"artifacts": ["stream.mp4"]}],
)  # fmt: skip
async def test_another_request_by_the_same_name_is_refused(studio: CoreCaller, changed: dict[str, Any]) -> None:
    job_id = (await studio.submit(idempotency_key=KEY)).job_id
    status, message = await status_of(studio.submit(**{"idempotency_key": KEY} | changed))
    assert status == "ALREADY_EXISTS"
    assert KEY in message
    assert job_id in message


async def test_a_key_is_its_tenants_own(service: Service, studio: CoreCaller) -> None:
    async with callers(service, ("other", "generate")) as [other]:
        mine = await studio.submit(idempotency_key=KEY)
        theirs = await other.submit("a bear", idempotency_key=KEY)
    assert not theirs.is_known
    assert mine.job_id != theirs.job_id


async def test_without_a_key_every_request_is_a_job(studio: CoreCaller) -> None:
    assert (await studio.submit()).job_id != (await studio.submit()).job_id


async def test_a_key_is_free_again_once_its_job_is_deleted(studio: CoreCaller) -> None:
    first = (await studio.submit(idempotency_key=KEY)).job_id
    await studio.ended(first)
    await studio.delete(first)
    second = await studio.submit(idempotency_key=KEY)
    assert not second.is_known
    assert second.job_id != first


@pytest.mark.parametrize("max_queued_jobs", [1])
async def test_a_known_request_is_answered_though_the_queue_is_full(service: Service, studio: CoreCaller) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    await studio.submit()
    await until(service, "sample:0.1")
    waiting = (await studio.submit(idempotency_key=KEY)).job_id
    assert (await status_of(studio.submit()))[0] == "RESOURCE_EXHAUSTED"
    assert (await studio.submit(idempotency_key=KEY)).job_id == waiting


async def test_who_asks_again_keeps_the_job_when_the_first_call_goes(service: Service, studio: CoreCaller) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    asked = {"idempotency_key": KEY, "cancel_on_disconnect": True}
    first, second = studio.submission(**asked), studio.submission(**asked)
    job_id = (await first.read()).job_id
    assert (await second.read()).job_id == job_id
    await until(service, "sample:0.1")
    first.cancel()
    await studio.get(job_id)  # the cancellation is behind us
    gate.set()
    await studio.ended(job_id)


async def test_when_the_last_one_goes_the_job_does(service: Service, studio: CoreCaller) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    asked = {"idempotency_key": KEY, "cancel_on_disconnect": True}
    calls = studio.submission(**asked), studio.submission(**asked)
    job_ids = [(await call.read()).job_id for call in calls]
    for call in calls:
        call.cancel()
    assert (await status_of(studio.ended(job_ids[0])))[0] == "CANCELLED"


async def test_a_refinement_is_made_once(studio: CoreCaller) -> None:
    source = (await studio.submit()).job_id
    await studio.ended(source)
    first = await studio.refine(job_id=source, idempotency_key=KEY)
    again = await studio.refine(job_id=source, idempotency_key=KEY)
    assert (first.is_known, again.is_known) == (False, True)
    assert first.job_id == again.job_id
    other = {"steps": 3}
    assert (await status_of(studio.refine(job_id=source, spec=other, idempotency_key=KEY)))[0] == "ALREADY_EXISTS"
    await studio.ended(first.job_id)


async def test_an_upload_counts_by_its_bytes(service: Service) -> None:
    from tests.service.conftest import CLIP

    data = latents_file(CLIP)

    async def refine(data: bytes) -> str:
        upload = video_pb2.LatentsUpload(prompt="a fox", size_bytes=len(data))
        header = video_pb2.RefineHeader(upload=upload, idempotency_key=KEY)
        messages = [video_pb2.RefineAudioRequest(header=header)]
        messages += (
            video_pb2.RefineAudioRequest(data=data[start : start + 500_000]) for start in range(0, len(data), 500_000)
        )
        call = service.stub.RefineAudio(iter(messages))
        return str((await call.read()).event.job_id)

    job_id = await refine(data)
    assert await refine(data) == job_id
    assert (await status_of(refine(latents_file(CLIP, seed=5))))[0] == "ALREADY_EXISTS"


@pytest.mark.parametrize("key", ["a b", "ö", "x" * 129, "tab\t"])
async def test_a_key_is_short_and_printable(studio: CoreCaller, key: str) -> None:
    for call in (studio.submit(idempotency_key=key), studio.refine(job_id="job", idempotency_key=key)):
        status, message = await status_of(call)
        assert status == "INVALID_ARGUMENT"
        assert "up to 128 characters of ASCII without spaces" in message
