"""The command as it is run: real processes, which find every part made already and go on from there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.train_tiny.card import problems

ROOT = Path(__file__).parents[4]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.train_tiny", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_run_whose_parts_are_made_writes_the_model_with_its_card(tmp_path: Path) -> None:
    work = tmp_path / "work" / "seed-3"
    shutil.copytree(ROOT / "models" / "tiny", work / "model", ignore=shutil.ignore_patterns("README.md", "SHA256SUMS"))
    for part in ("text-encoder", "transformer", "audio-vae", "video-vae"):
        (work / f"finished-{part}").touch()
    done = run(tmp_path / "model", "--work", tmp_path / "work", "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert problems(tmp_path / "model") == []
    assert "--seed 3" in (tmp_path / "model" / "README.md").read_text()


def test_a_part_that_fails_ends_the_run_and_leaves_the_model_alone(tmp_path: Path) -> None:
    work = tmp_path / "work" / "seed-0"
    work.mkdir(parents=True)
    (work / "finished-text-encoder").touch()  # without one: the DiT's training finds no tokenizer
    (work / "finished-audio-vae").touch()
    (work / "finished-video-vae").touch()
    done = run(tmp_path / "model", "--work", tmp_path / "work")
    assert done.returncode == 1
    assert "started again it goes on" in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_directory_that_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    done = run(tmp_path / "mine", "--work", tmp_path / "work")
    assert done.returncode == 1
    assert "is no model directory" in done.stderr
    assert (tmp_path / "mine" / "notes").read_text() == "keep"


def test_a_run_that_is_told_to_end_leaves_no_process_behind(tmp_path: Path) -> None:
    work = tmp_path / "work" / "seed-0"
    work.mkdir(parents=True)
    for part in ("audio-vae", "transformer"):
        (work / f"finished-{part}").touch()
    command = [sys.executable, "-m", "tools.train_tiny", str(tmp_path / "model"), "--work", str(tmp_path / "work")]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        deadline = time.monotonic() + 60
        while len(children.read_text().split()) < 3:  # two lanes and Python's own
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
        while is_there(running.pid):
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
    finally:
        if is_there(running.pid):
            os.killpg(running.pid, signal.SIGKILL)


def is_there(group: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
