from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3stream.errors import UnsupportedError
from services.common.ledger import LedgerEntry, ResidencyLedger, overlaps, read_ledger

HOLDER = """
import sys
from pathlib import Path
from services.common.ledger import ResidencyLedger

ledger = ResidencyLedger(Path(sys.argv[1]), "dit")
ledger.enter(7)
print("holding", flush=True)
sys.stdin.readline()
ledger.leave()
print("left", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def other_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the device and gives it up at the first line written to it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def entry(at: int, worker: str, event: str) -> LedgerEntry:
    return LedgerEntry(at, worker, event, 1 if event == "enter" else 0)


def test_entering_and_leaving_are_written_in_order(path: Path) -> None:
    ledger = ResidencyLedger(path, "vae")
    ledger.enter(5)
    ledger.leave()
    entries = read_ledger(path)
    assert [(e.worker, e.event, e.device_weight_bytes) for e in entries] == [("vae", "enter", 5), ("vae", "leave", 0)]
    assert entries[0].monotonic_ns < entries[1].monotonic_ns


def test_a_second_holder_in_the_same_process_is_refused(path: Path) -> None:
    first, second = ResidencyLedger(path, "dit"), ResidencyLedger(path, "vae")
    first.enter(1)
    with pytest.raises(UnsupportedError, match="vae cannot enter its phase"):
        second.enter(1)
    first.leave()
    second.enter(1)
    second.leave()


def test_a_holder_in_another_process_keeps_everyone_out_until_it_leaves(
    path: Path, other_process: subprocess.Popen[str]
) -> None:
    assert other_process.stdin is not None
    assert other_process.stdout is not None
    ledger = ResidencyLedger(path, "vae")
    with pytest.raises(UnsupportedError, match="another worker's weights are on the device"):
        ledger.enter(1)
    other_process.stdin.write("\n")
    other_process.stdin.flush()
    assert other_process.stdout.readline() == "left\n"
    ledger.enter(1)
    ledger.leave()
    events = [(e.worker, e.event) for e in read_ledger(path)]
    assert events == [("dit", "enter"), ("dit", "leave"), ("vae", "enter"), ("vae", "leave")]
    assert overlaps(read_ledger(path)) == []


def test_a_refused_entry_is_not_written(path: Path, other_process: subprocess.Popen[str]) -> None:
    with pytest.raises(UnsupportedError):
        ResidencyLedger(path, "vae").enter(1)
    assert [e.worker for e in read_ledger(path)] == ["dit"]


def test_a_holder_that_dies_gives_the_device_up_and_the_next_one_says_so(
    path: Path, other_process: subprocess.Popen[str]
) -> None:
    other_process.kill()
    other_process.wait()
    ledger = ResidencyLedger(path, "vae")
    ledger.enter(1)
    ledger.leave()
    entries = read_ledger(path)
    assert [(e.worker, e.event) for e in entries] == [
        ("dit", "enter"),
        ("dit", "lost"),
        ("vae", "enter"),
        ("vae", "leave"),
    ]
    assert overlaps(entries) == []


def test_an_entry_that_cannot_be_written_leaves_no_lock_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            ResidencyLedger(path, "dit").enter(1)
    other = ResidencyLedger(path, "vae")
    other.enter(1)
    other.leave()


def test_an_entry_that_only_half_fits_leaves_a_whole_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    ledger = ResidencyLedger(path, "dit")
    ledger.enter(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))  # as a disk does that is about to be full
        with pytest.raises(OSError, match="No space left"):
            ledger.leave()
    ResidencyLedger(path, "vae").enter(2)
    assert [(e.worker, e.event) for e in read_ledger(path)] == [("dit", "enter"), ("dit", "lost"), ("vae", "enter")]


def test_a_file_that_is_no_ledger_is_not_held(path: Path) -> None:
    path.write_text("no ledger\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="Expecting value"):
            ResidencyLedger(path, "dit").enter(1)


def test_a_planted_overlap_is_found() -> None:
    entries = [entry(1, "dit", "enter"), entry(2, "vae", "enter"), entry(3, "dit", "leave"), entry(4, "vae", "leave")]
    assert overlaps(entries) == [(entries[0], entries[1])]


def test_overlaps_are_found_by_time_and_not_by_place() -> None:
    entries = [entry(1, "dit", "enter"), entry(3, "dit", "leave"), entry(2, "vae", "enter"), entry(4, "vae", "leave")]
    assert overlaps(entries) == [(entries[0], entries[2])]


def test_three_workers_at_once_are_three_overlaps() -> None:
    entries = [entry(1, "dit", "enter"), entry(2, "vae", "enter"), entry(3, "text_encoder", "enter")]
    assert overlaps(entries) == [(entries[0], entries[1]), (entries[0], entries[2]), (entries[1], entries[2])]


def test_turns_are_no_overlap() -> None:
    turns = [(1, "dit", "enter"), (2, "dit", "leave"), (3, "vae", "enter"), (4, "vae", "leave"), (5, "dit", "enter")]
    assert overlaps([entry(*turn) for turn in turns]) == []
    assert overlaps([]) == []
