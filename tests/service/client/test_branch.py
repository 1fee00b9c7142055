"""Both clients where a clip goes on from a chunk of another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from h3stream import (
    AsyncClient,
    Branch,
    Client,
    GenerateRequest,
    InvalidRequestError,
    JobNotFoundError,
    PreviewSpec,
    RefineSpec,
)
from tests.fakes import FakeVideoService, Script, events_of, plan_of
from tests.service.client.conftest import Call

PLAN = plan_of(GenerateRequest("a fox"))


async def test_a_branch_asks_for_nothing_but_what_is_said(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    assert await call("branch", "job-0", 2) == list(events_of(PLAN, "job-1"))
    options: dict[str, Any] = {
        "cancel_on_disconnect": True, "preview": PreviewSpec(64, 2), "artifacts": ("final.mp4",),
        "refine_audio": RefineSpec(steps=3), "priority": "low", "deadline_s": 60.0,
    }  # fmt: skip
    await call("branch", "job-0", 1, "snow", 7, **options)
    assert service.requests[1:] == [
        GenerateRequest(branch=Branch("job-0", 2)),
        GenerateRequest(branch=Branch("job-0", 1, "snow", 7), **options),
    ]


async def test_a_branch_is_made_once_and_goes_on_over_losses(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    service.script = Script(lose_at=[0, 0, 5])
    assert await call("branch", "job-0", 2) == list(events_of(PLAN, "job-1"))
    assert len(service.requests) == 2


async def test_a_job_and_a_generation_that_still_runs_name_their_clip(address: str, service: FakeVideoService) -> None:
    async with AsyncClient(address) as client:
        events = client.generate("a fox")
        await anext(events)
        assert (await anext(client.branch(events, 1))).job_id == "job-1"
        assert (await anext(client.branch(await client.job("job-0"), 1))).job_id == "job-2"
        await events.aclose()

    def block() -> None:
        with Client(address) as client, client.generate("a fox") as events:
            next(events)
            assert next(client.branch(events, 2, seed=3)).job_id == "job-4"

    await asyncio.to_thread(block)
    assert service.requests[-1].branch == Branch("job-3", 2, None, 3)


async def test_a_branch_that_cannot_be_is_refused(call: Call, service: FakeVideoService) -> None:
    with pytest.raises(JobNotFoundError):
        await call("branch", "job-7", 1)
    for wrong, field in (((7, 1), "job_id"), (("job-0", "1"), "from_chunk"), (("job-0", 1, None, -1), "seed")):
        with pytest.raises(InvalidRequestError) as caught:
            await call("branch", *wrong)
        assert [violation.field for violation in caught.value.violations] == [f"branch.{field}"]
    assert service.requests == []
