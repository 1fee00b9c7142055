"""Who may hold a lane's device now: grants and releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from core.phases import Worker
from h3stream.errors import DeviceMemoryError, PhaseError
from h3stream.v1 import workers_pb2


class PhaseHolder(Protocol):
    """A worker that can take the device and give it up."""

    async def describe(self) -> workers_pb2.DescribeResponse:
        """What the worker is and what it holds."""
        ...

    async def enter_phase(self) -> int:
        """Brings the weights onto the device; returns their bytes."""
        ...

    async def leave_phase(self) -> workers_pb2.LeavePhaseResponse:
        """Takes the weights off the device."""
        ...


class PhaseSequencer:
    """Exclusive residency of one lane: the weights of at most one worker are on its device at any moment."""

    def __init__(self, workers: Mapping[Worker, PhaseHolder]) -> None:
        """workers: looked at with each grant, so that a worker may be replaced there."""
        self._workers = workers
        self._holder: Worker | None = None

    async def grant(self, worker: Worker | None) -> None:
        """Gives the device to a worker (None: to nobody), once the one before has left it.

        Raises DeviceMemoryError if the device's free memory does not confirm that there is room.
        """
        if worker is self._holder:
            return
        free_bytes = await self._release()
        if worker is None:
            return
        holder = self._workers[worker]
        if free_bytes and free_bytes < (needed := (await holder.describe()).weight_bytes):
            raise DeviceMemoryError(
                f"{worker.value} needs {needed} bytes on the device, but only {free_bytes} are free after the "
                "worker before it has left"
            )
        # Recorded before entering: a half-entered worker must still be made to leave.
        self._holder = worker
        await holder.enter_phase()

    def forget(self, worker: Worker) -> None:
        """Takes note that a worker's process is gone, and with it all that it held."""
        if worker is self._holder:
            self._holder = None

    async def _release(self) -> int:
        """Free bytes of the device after the holder has left; 0 if there was none or the device is the host."""
        if self._holder is None:
            return 0
        left = await self._workers[self._holder].leave_phase()
        if left.device_weight_bytes:
            raise PhaseError(f"{self._holder.value} left its phase with {left.device_weight_bytes} bytes on the device")
        self._holder = None
        return left.device_free_bytes
