from __future__ import annotations

import dataclasses

import pytest

from h3stream.errors import QuotaExceededError
from h3stream.job import TenantLimits, TenantUsage
from orchestrator.tenants import NoLimits, check_limits, check_queue_share, may_run_another

USAGE = TenantUsage(num_running_jobs=1, num_queued_jobs=2, num_pending_frames=117, num_stored_bytes=1000)


class Limited(NoLimits):
    def __init__(self, num_tenants: int = 1, **limits: int) -> None:
        self._num_tenants = num_tenants
        self._limits = TenantLimits(**limits)

    def num_tenants(self) -> int:
        return self._num_tenants

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits


def refusal(usage: TenantUsage = USAGE, num_frames: int = 39, **limits: int) -> QuotaExceededError:
    with pytest.raises(QuotaExceededError) as caught:
        check_limits(Limited(**limits), usage, "studio", num_frames)
    return caught.value


def test_where_nothing_is_laid_down_everything_fits() -> None:
    plenty = TenantUsage(10**6, 10**6, 10**12, 10**15)
    check_limits(NoLimits(), plenty, "studio", 362)
    assert may_run_another(NoLimits(), "studio", 10**6)
    assert NoLimits().weight("studio") == 1


def test_what_just_fits_is_taken() -> None:
    limits = Limited(max_queued_jobs=3, max_pending_frames=156, max_stored_bytes=1001)
    check_limits(limits, USAGE, "studio", 39)


def test_as_many_jobs_wait_as_the_limit_says() -> None:
    error = refusal(max_queued_jobs=2)
    assert "tenant studio has 2 jobs waiting of at most 2 (max_queued_jobs)" in error.message
    assert error.retry_after_s == 5


def test_as_many_frames_are_pending_as_the_limit_says() -> None:
    error = refusal(max_pending_frames=150)
    assert "117 frames waiting or being made of at most 150 (max_pending_frames)" in error.message
    assert error.message.endswith("and this clip has 39; try again when a job has ended")


def test_a_clip_that_never_fits_is_not_told_to_come_again() -> None:
    error = refusal(dataclasses.replace(USAGE, num_pending_frames=0), num_frames=362, max_pending_frames=150)
    assert error.message.endswith("ask for a clip of at most 150 frames")


def test_as_many_bytes_are_kept_as_the_limit_says() -> None:
    error = refusal(max_stored_bytes=1000)
    assert "keeps 1000 bytes of events and artifacts of at most 1000 (max_stored_bytes); delete jobs" in error.message
    assert error.retry_after_s == 60


def test_as_many_jobs_run_as_the_limit_says() -> None:
    assert may_run_another(Limited(max_running_jobs=2), "studio", 1)
    assert not may_run_another(Limited(max_running_jobs=2), "studio", 2)


@pytest.mark.parametrize(("num_places", "most"), [(16, 8), (5, 3), (1, 1)])
def test_one_of_several_tenants_holds_at_most_half_of_the_queue(num_places: int, most: int) -> None:
    check_queue_share(Limited(2), "studio", most - 1, num_places)
    with pytest.raises(QuotaExceededError) as caught:
        check_queue_share(Limited(2), "studio", most, num_places)
    found = f"has {most} jobs waiting of at most {most}, half of the server's max_queued_jobs of {num_places}"
    assert found in caught.value.message
    assert caught.value.message.endswith("the access file can give the tenant a max_queued_jobs of its own")
    assert caught.value.retry_after_s == 5


def test_a_tenant_that_is_alone_or_has_a_limit_of_its_own_may_hold_more_than_half() -> None:
    check_queue_share(Limited(1), "studio", 15, 16)
    check_queue_share(Limited(3, max_queued_jobs=15), "studio", 14, 16)


def test_where_nothing_may_wait_idle_lanes_are_still_used() -> None:
    check_queue_share(Limited(2), "studio", -1, 0)
