"""Memory that can still be had, as the system and its cgroups tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.budget import GIB
from services.dit.refine.memory import available_host_bytes, free_device_bytes, resident_host_bytes

KIB_16_GIB = 16 << 20


class System:
    """Files as Linux has them."""

    def __init__(self, root: Path, cgroup: str = "") -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {KIB_16_GIB} kB\n")
        if cgroup:
            (self.proc / "self" / "cgroup").write_text(cgroup)

    def group(self, path: str, **files: object) -> None:
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name.replace("__", ".")).write_text(f"{value}\n")

    @property
    def available(self) -> int:
        return available_host_bytes(self.proc, self.cgroups)


def test_without_cgroups_the_system_decides(tmp_path: Path) -> None:
    assert System(tmp_path).available == 16 * GIB


@pytest.mark.parametrize("limit", ["max", 100 * GIB])
def test_a_limit_that_does_not_bind_changes_nothing(limit: object, tmp_path: Path) -> None:
    system = System(tmp_path, "0::/app\n")
    system.group("app", memory__max=limit, memory__current=GIB)
    assert system.available == 16 * GIB


def test_a_limit_leaves_what_is_not_used_and_what_can_be_reclaimed(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/app\n")
    system.group("app", memory__max=8 * GIB, memory__current=5 * GIB)
    assert system.available == 3 * GIB
    system.group("app", memory__stat=f"anon 1\ninactive_file {2 * GIB}\nactive_file 7")
    assert system.available == 5 * GIB


def test_the_tightest_of_the_limits_above_holds(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/pod/app/worker\n")
    system.group("pod/app/worker", memory__max="max", memory__current=GIB)
    system.group("pod/app", memory__max=10 * GIB, memory__current=GIB)
    system.group("pod", memory__max=6 * GIB, memory__current=2 * GIB)
    assert system.available == 4 * GIB


def test_a_container_sees_its_own_limit_where_only_that_is_mounted(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/\n")
    system.group("", memory__max=2 * GIB, memory__current=GIB)
    assert system.available == GIB
    (system.proc / "self" / "cgroup").write_text("0::/kubepods/of/the/host\n")
    assert system.available == GIB


def test_the_first_version_of_cgroups_limits_too(tmp_path: Path) -> None:
    system = System(tmp_path, "4:cpu,memory:/app\n3:cpuset:/other\n0::/\n")
    system.group("memory/app", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=3 * GIB)
    system.group("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=9 * GIB)
    assert system.available == GIB
    system.group("memory/app", memory__stat=f"inactive_file 5\ntotal_inactive_file {GIB}")
    assert system.available == 2 * GIB


def test_what_is_used_beyond_a_limit_leaves_nothing(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/app\n")
    system.group("app", memory__max=GIB, memory__current=2 * GIB)
    assert system.available == 0


def test_this_machine_tells_its_memory() -> None:
    assert available_host_bytes() > 0
    assert free_device_bytes(torch.device("cpu")) > 0
    assert resident_host_bytes() > 10 << 20
