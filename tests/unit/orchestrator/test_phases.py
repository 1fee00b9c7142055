from __future__ import annotations

import pytest

from core.phases import Worker
from h3stream.errors import DeviceMemoryError, PhaseError
from h3stream.v1 import workers_pb2
from orchestrator.phases import PhaseSequencer


class Holder:
    """A worker that remembers what it was told."""

    def __init__(self, name: str, log: list[str], *, weight_bytes: int = 10, free_bytes: int = 0, left_bytes: int = 0):
        self.name, self.log = name, log
        self.weight_bytes, self.free_bytes, self.left_bytes = weight_bytes, free_bytes, left_bytes
        self.refuses = False

    async def describe(self) -> workers_pb2.DescribeResponse:
        return workers_pb2.DescribeResponse(weight_bytes=self.weight_bytes)

    async def enter_phase(self) -> int:
        self.log.append(f"{self.name} enters")
        if self.refuses:
            raise PhaseError("no")
        return self.weight_bytes

    async def leave_phase(self) -> workers_pb2.LeavePhaseResponse:
        self.log.append(f"{self.name} leaves")
        return workers_pb2.LeavePhaseResponse(device_weight_bytes=self.left_bytes, device_free_bytes=self.free_bytes)


def sequencer(log: list[str], **dit: int) -> tuple[PhaseSequencer, Holder, Holder]:
    first, second = Holder("dit", log, **dit), Holder("vae", log)
    return PhaseSequencer({Worker.DIT: first, Worker.VAE: second}), first, second


async def test_the_holder_leaves_before_the_next_enters() -> None:
    log: list[str] = []
    device, _, _ = sequencer(log)
    for worker in (Worker.DIT, Worker.DIT, Worker.VAE, None, None, Worker.VAE):
        await device.grant(worker)
    assert log == ["dit enters", "dit leaves", "vae enters", "vae leaves", "vae enters"]


async def test_weights_that_stay_on_the_device_stop_the_hand_over() -> None:
    log: list[str] = []
    device, _, _ = sequencer(log, left_bytes=3)
    await device.grant(Worker.DIT)
    with pytest.raises(PhaseError, match="dit left its phase with 3 bytes"):
        await device.grant(Worker.VAE)
    assert "vae enters" not in log


async def test_too_little_free_memory_stops_the_hand_over() -> None:
    log: list[str] = []
    device, _, _ = sequencer(log, free_bytes=9)
    await device.grant(Worker.DIT)
    with pytest.raises(DeviceMemoryError, match="vae needs 10 bytes on the device, but only 9 are free"):
        await device.grant(Worker.VAE)
    assert "vae enters" not in log


async def test_a_worker_that_failed_to_enter_is_made_to_leave() -> None:
    log: list[str] = []
    device, first, _ = sequencer(log)
    first.refuses = True
    with pytest.raises(PhaseError, match="no"):
        await device.grant(Worker.DIT)
    await device.grant(Worker.VAE)
    assert log == ["dit enters", "dit leaves", "vae enters"]


@pytest.mark.parametrize("gone", [Worker.DIT, Worker.VAE])
async def test_a_holder_that_died_stands_in_nobody_s_way(gone: Worker) -> None:
    log: list[str] = []
    workers = {Worker.DIT: Holder("dit", log), Worker.VAE: Holder("vae", log)}
    device = PhaseSequencer(workers)
    await device.grant(Worker.DIT)
    workers[gone] = Holder("another", log)
    device.forget(gone)
    await device.grant(Worker.VAE)
    assert log == (
        ["dit enters", "vae enters"] if gone is Worker.DIT else ["dit enters", "dit leaves", "another enters"]
    )
