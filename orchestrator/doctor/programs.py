"""What only the libraries themselves can tell, each asked in a process that can fail, hang or crash alone."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from h3stream.errors import StartupError
from orchestrator.doctor.finding import Finding
from orchestrator.leftovers import end_users_of
from services.common.device import driver_gpus

PROBE_TIMEOUT_S = 120.0
"""Reading torch from a cold disk takes most of a minute."""
RAY_TIMEOUT_S = 60.0
"""Ray takes about 5 s."""


def check_encoders() -> Iterator[Finding]:
    """The encoders of pictures and of sound, by what comes out of them."""
    try:
        told = _ask("services.vae.media")
    except StartupError as error:
        yield Finding("encoders", "fail", str(error), _reinstalled("av"))
        return
    pictures: dict[str, str | None] = told["pictures"]
    usable = [name for name, problem in pictures.items() if problem is None]
    passed_over = [f"{name}: {problem}" for name, problem in pictures.items() if problem is not None]
    if not usable:
        yield Finding(
            "pictures", "fail", "\n".join(("no H.264 encoder works", *passed_over)),
            "install a PyAV whose FFmpeg has libx264 (the wheels on PyPI have it): pip install -c constraints.txt av",
        )  # fmt: skip
    else:
        yield Finding("pictures", "ok", f"{usable[0]} is used; of {', '.join(pictures)} there work {', '.join(usable)}")
    if told["sound"] is not None:
        yield Finding("sound", "fail", told["sound"], "install a PyAV whose FFmpeg has the AAC encoder")
    else:
        yield Finding("sound", "ok", "AAC works")


def check_gpu(device: str) -> Finding:
    """The GPUs: what the driver offers, and what torch can do with it.

    device: the setting.
    """
    num_offered = driver_gpus()
    if device == "cpu":
        return Finding("gpu", "ok", "the model runs on the CPU, as it was told to")
    if device == "auto" and not num_offered:
        return Finding(
            "gpu", "warn", "the NVIDIA driver offers none: the model runs on the CPU",
            "right for the tiny model; the full one needs a GPU, its driver and, in a container, --gpus all",
        )  # fmt: skip
    try:
        told = _ask("services.common.gpus")
    except StartupError as error:
        return Finding("gpu", "fail", str(error), _reinstalled("torch"))
    if told["cuda"] is None:
        return Finding(
            "gpu", "fail", f"the driver offers {num_offered} GPUs, but torch {told['torch']} was built without CUDA",
            "install the CUDA build of that torch (https://pytorch.org), or set --device cpu",
        )  # fmt: skip
    if told["problem"] is not None or not told["gpus"]:
        return Finding(
            "gpu", "fail", told["problem"] or f"torch finds none of the driver's {num_offered} GPUs",
            f"a driver for CUDA {told['cuda']} or newer is needed (`nvidia-smi` tells which it is for)",
        )  # fmt: skip
    cards = [
        f"{gpu['name']} with {gpu['free_bytes'] / (1 << 30):.1f} of {gpu['total_bytes'] / (1 << 30):.1f} GiB free"
        for gpu in told["gpus"]
    ]
    if any(gpu["free_bytes"] < 0.8 * gpu["total_bytes"] for gpu in told["gpus"]):
        return Finding("gpu", "warn", "; ".join(cards), "end what else uses the card (`nvidia-smi` lists it)")
    return Finding("gpu", "ok", f"{'; '.join(cards)}; torch {told['torch']}, CUDA {told['cuda']}")


def check_ray(environment: Mapping[str, str]) -> Finding:
    """Whether Ray starts, runs a task and stops.

    environment: of this process.
    """
    # As in orchestrator/__main__.py: Ray listens beyond loopback, and only who has the token may use it.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [*_PYTHON, "orchestrator.doctor.ray_start"]
    with tempfile.TemporaryDirectory(prefix="h3stream-", ignore_cleanup_errors=True) as name:
        process = subprocess.Popen(
            [*command, name], env={**environment, **token}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=RAY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = f"Ray did not start within {RAY_TIMEOUT_S:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_users_of(Path(name))
    if process.returncode == 0:
        return Finding("ray", "ok", "Ray starts, runs a task and stops")
    return Finding(
        "ray", "fail", _last_line(errors),
        f"look at free disk and memory, at {tempfile.gettempdir()} (its path must be short; TMPDIR changes it) "
        f"and at what forbids to listen on 127.0.0.1; {_reinstalled('ray')}",
    )  # fmt: skip


_PYTHON = [sys.executable, "-P", "-m"] if sys.flags.safe_path else [sys.executable, "-m"]


def _ask(module: str) -> Any:
    """What a program of ours prints as JSON. Raises StartupError, with its own last words, if it does not."""
    try:
        ended = subprocess.run(
            [*_PYTHON, module], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StartupError(f"{module} gave no answer within {PROBE_TIMEOUT_S:.0f} s") from None
    try:
        return json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        if ended.returncode < 0:
            raise StartupError(f"{module} was ended by {signal.Signals(-ended.returncode).name}") from None
        raise StartupError(f"{module}: {_last_line(ended.stderr)}") from None


def _reinstalled(distribution: str) -> str:
    """How a package whose files are broken is mended."""
    return f"`pip install --force-reinstall -c constraints.txt {distribution}`"


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it ended without a word")
