"""`python -m orchestrator.doctor` on this machine, with everything it asks other processes about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.doctor import __main__ as doctor
from orchestrator.doctor import programs


def test_a_machine_on_which_the_tests_run_can_serve_the_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--json", "--model", str(tiny_model), "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator.doctor", *flags], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    always_ok = ("settings", "python", "packages", "pictures", "sound", "ray", "address", "access", "model", "adapters")
    assert {name: levels[name] for name in always_ok} == dict.fromkeys(always_ok, "ok")
    assert told["is_fine"]
    assert not (tmp_path / "data").exists()


def test_what_keeps_a_server_from_starting_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_ray", lambda environment: programs.Finding("ray", "ok", "not asked"))
    monkeypatch.setattr(doctor, "check_encoders", lambda: ())
    assert doctor.main(["--json", "--model", str(tmp_path), "--data", "/proc/h3stream"]) == 1
    levels = {finding["check"]: finding["level"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert (levels["model"], levels["writing"], levels["settings"]) == ("fail", "fail", "ok")
    assert doctor.main(["--json", "--threads", "many"]) == 1
    (settings, *_) = json.loads(capsys.readouterr().out)["findings"]
    assert settings["level"] == "fail"
    assert "threads" in settings["message"]


def test_a_library_that_crashes_hangs_or_complains_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(programs, "_PYTHON", [str(program)])
    monkeypatch.setattr(programs, "PROBE_TIMEOUT_S", 1.0)

    def finding(script: str) -> programs.Finding:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        (found,) = programs.check_encoders()
        return found

    assert finding("kill -SEGV $$").message == "services.vae.media was ended by SIGSEGV"
    assert (
        finding("echo 'ImportError: libx264.so' >&2; exit 1").message == "services.vae.media: ImportError: libx264.so"
    )
    assert finding("exec sleep 60").message == "services.vae.media gave no answer within 1 s"
    assert finding("exit 0").level == "fail"


def is_running(pid: int) -> bool:
    """Whether a process has not ended; nobody may have taken note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_ray_that_does_not_start_is_given_up_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    program = tmp_path / "python"
    # A daemon in a session of its own, which writes into the directory as Ray's do, and a parent that waits for it.
    program.write_text(f'#!/bin/sh\nsetsid sleep 60 >"$3/raylet.out" 2>&1 &\necho $! >{pids}\nexec sleep 60\n')
    program.chmod(0o700)
    monkeypatch.setattr(programs, "_PYTHON", [str(program), "-m"])
    monkeypatch.setattr(programs, "RAY_TIMEOUT_S", 1.0)
    found = programs.check_ray(os.environ)
    assert (found.level, found.message) == ("fail", "Ray did not start within 1 s")
    assert not is_running(int(pids.read_text()))
