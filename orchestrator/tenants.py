"""What each tenant may have at a time, and its share."""

from __future__ import annotations

import math
from typing import Protocol

from h3stream.errors import QuotaExceededError
from h3stream.job import TenantLimits, TenantUsage

RETRY_AFTER_S = 5.0
"""What is told a caller whose tenant's own jobs must end first: about the time a short clip holds a lane."""
RETRY_STORED_AFTER_S = 60.0
"""What is told one whose tenant must delete jobs, or wait until the server removes them."""


class TenantPolicy(Protocol):
    """What is laid down for tenants; it may change at any time."""

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may have at a time."""

    def weight(self, tenant: str) -> float:
        """Its share of the lanes, in proportion to those of the others that wait; above 0."""

    def num_tenants(self) -> int:
        """Tenants that there are; where there is more than one, each leaves room for another."""


class NoLimits:
    """All tenants alike, without limits."""

    def limits(self, tenant: str) -> TenantLimits:
        """No limit."""
        return TenantLimits()

    def weight(self, tenant: str) -> float:
        """1, as for all."""
        return 1.0

    def num_tenants(self) -> int:
        """1: nobody is told from another."""
        return 1


def check_limits(policy: TenantPolicy, usage: TenantUsage, tenant: str, num_frames: int) -> None:
    """Raises QuotaExceededError if one more job does not fit into what its tenant may have.

    usage: what the tenant has without it.  num_frames: of the job's clip.
    """
    limits = policy.limits(tenant)
    if limits.max_queued_jobs and usage.num_queued_jobs >= limits.max_queued_jobs:
        raise _refused(
            tenant,
            f"has {usage.num_queued_jobs} jobs waiting of at most {limits.max_queued_jobs} (max_queued_jobs)",
            "try again when one of them has begun, or cancel one",
        )
    if limits.max_pending_frames and usage.num_pending_frames + num_frames > limits.max_pending_frames:
        raise _refused(
            tenant,
            f"has {usage.num_pending_frames} frames waiting or being made of at most {limits.max_pending_frames} "
            f"(max_pending_frames), and this clip has {num_frames}",
            "try again when a job has ended"
            if num_frames <= limits.max_pending_frames
            else f"ask for a clip of at most {limits.max_pending_frames} frames",
        )
    if limits.max_stored_bytes and usage.num_stored_bytes >= limits.max_stored_bytes:
        raise _refused(
            tenant,
            f"keeps {usage.num_stored_bytes} bytes of events and artifacts of at most {limits.max_stored_bytes} "
            "(max_stored_bytes)",
            "delete jobs that have ended",
            RETRY_STORED_AFTER_S,
        )


def check_queue_share(policy: TenantPolicy, tenant: str, num_queued_jobs: int, max_queued_jobs: int) -> None:
    """Raises QuotaExceededError if a tenant without a limit of its own would hold more than half of the queue where
    there are others.

    num_queued_jobs: of the tenant, without as many as there are idle lanes.  max_queued_jobs: of the server.
    """
    if policy.num_tenants() == 1 or policy.limits(tenant).max_queued_jobs:
        return
    most = math.ceil(max_queued_jobs / 2)
    if num_queued_jobs >= most:
        raise _refused(
            tenant,
            f"has {num_queued_jobs} jobs waiting of at most {most}, half of the server's max_queued_jobs of "
            f"{max_queued_jobs}, which leaves room for other tenants",
            "try again when one of them has begun, or cancel one; the access file can give the tenant a "
            "max_queued_jobs of its own",
        )


def may_run_another(policy: TenantPolicy, tenant: str, num_running_jobs: int) -> bool:
    """Whether a tenant with so many jobs on lanes may have one more there."""
    limit = policy.limits(tenant).max_running_jobs
    return not limit or num_running_jobs < limit


def _refused(tenant: str, found: str, help: str, retry_after_s: float = RETRY_AFTER_S) -> QuotaExceededError:
    return QuotaExceededError(f"tenant {tenant} {found}; {help}", retry_after_s=retry_after_s)
