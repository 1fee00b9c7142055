"""The service as a child of this process, for when there is no server: started, awaited, stopped.

The child never outlives its parent: it stops when its standard input closes, however the parent ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from h3stream.adapters import AdapterChoice, AdapterUse
from h3stream.errors import ConfigError, FieldViolation, StartupError
from h3stream.fields import invalid_request
from h3stream.request import ClipSpec, GenerateRequest

STARTUP_TIMEOUT_S = 900.0
"""A large model on a slow disk takes minutes."""
STARTUP_REPORT_S = 10.0
"""How often a user who waits is told so."""
STOP_TIMEOUT_S = 20.0
"""After that the child is killed; stopping Ray takes about 2 s."""
LOG_TAIL_LINES = 20

MODEL_SETTINGS = ("model", "dit", "video_vae", "audio_vae", "text_encoder", "tokenizer")
"""Settings of the server that name files of the model, as flags and as H3STREAM_NAME."""

ACCESS_VARIABLES = (
    *("H3STREAM_API_KEY", "H3STREAM_TLS", "H3STREAM_TLS_CA", "H3STREAM_CLIENT_CERT", "H3STREAM_CLIENT_KEY"),
    *("H3STREAM_KEYS", "H3STREAM_TLS_CERT", "H3STREAM_TLS_KEY", "H3STREAM_TLS_CLIENT_CA"),
)
"""What a client shows to other servers, and what a server asks of others."""

_LONGEST = 362
"""Frames of the longest clip."""
_ANNOUNCEMENT = "listening on "
# -P: a folder of the user's that happens to be called `orchestrator` or `tools` must not be run.
_PYTHON = [sys.executable, "-P", "-m"]


def require_server_package() -> None:
    """Raises StartupError if the server is not installed here."""
    if importlib.util.find_spec("orchestrator") is None:
        raise StartupError(
            "the server is not installed here: install h3stream-server, or use a running server with --server HOST:PORT"
        )


def check_request(request: GenerateRequest) -> None:
    """Raises InvalidRequestError for what the server would refuse, so that none is started for it."""
    if violations := rule_violations(request):
        raise invalid_request(violations)


def rule_violations(request: GenerateRequest) -> list[FieldViolation]:
    """What the server's own rules say of a request, where they are installed.

    What a request leaves out is taken as valid, and what depends on the model or its adapters is left to the server.
    """
    if importlib.util.find_spec("core") is None:
        return []
    # By name: this distribution depends on nothing of the server's.
    rules, artifacts, refinement = map(importlib.import_module, ("core.request", "core.artifacts", "core.refine"))
    found: list[Any] = [
        *rules.prompt_violations(request.prompt),
        *rules.clip_violations(_completed(request)),
        *artifacts.artifact_violations(request.artifacts),
        *(() if request.preview is None else rules.preview_violations(request.preview)),
    ]
    if (spec := request.refine_audio) is not None:
        adapters = [AdapterChoice(choice.name, _strength(choice)) for choice in spec.adapters]
        spec = replace(spec, seed=spec.seed or 0, adapters=adapters)
        found += refinement.refine_violations(spec, request.num_frames or _LONGEST, "refine_audio")
    return [FieldViolation(violation.field, violation.description, violation.reason) for violation in found]


def _completed(request: GenerateRequest) -> ClipSpec:
    """A clip with the values of a request, and with valid ones where it has none."""
    is_dense = request.mode == "dense"
    clip = ClipSpec(
        num_frames=22, width=32, height=32, steps=1, video_shift=1.0, audio_shift=1.0, sink=0 if is_dense else 1,
        window=None if is_dense else 0, kv_storage="gpu", seed=0, mode=request.mode or "streaming",
        adapters=tuple(AdapterUse(choice.name, _strength(choice)) for choice in request.adapters),
    )  # fmt: skip
    names = ("num_frames", "width", "height", "steps", "video_shift", "audio_shift", "sink", "kv_storage", "seed")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.window is not None:
        given["window"] = None if request.window == "all" else request.window
    return replace(clip, **given)


def _strength(choice: AdapterChoice) -> float:
    return 1.0 if choice.strength is None else choice.strength


def model_directory(given: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The model directory to serve: the one given, else $H3STREAM_MODEL, else `models/tiny` beside the server's code.

    None where the environment names parts of a model but no directory: with a tiny model in place of the parts that
    are missing nobody would be served. Raises StartupError where there is no server, ConfigError where its code stands
    without that model, as an installed one does.
    """
    if given is not None:
        return given
    if "H3STREAM_MODEL" in environment:
        return Path(environment["H3STREAM_MODEL"])
    if any(f"H3STREAM_{name.upper()}" in environment for name in MODEL_SETTINGS):
        return None
    require_server_package()
    package = importlib.util.find_spec("orchestrator")
    assert package is not None
    assert package.origin is not None
    directory = Path(package.origin).parents[1] / "models" / "tiny"
    if not directory.is_dir():
        raise ConfigError("no model is named: give --model DIR, or set H3STREAM_MODEL; the repository has models/tiny")
    return directory


def model_examples(directory: Path | None) -> tuple[str, ...]:
    """The prompts that a model suggests, as a server would tell them; none where it has no directory.

    Raises StartupError if they cannot be read.
    """
    require_server_package()
    if directory is None:
        return ()
    _require_directory(directory)
    examples: tuple[str, ...] = importlib.import_module("orchestrator.model_info").read_examples(directory)
    return examples


def _require_directory(model: Path) -> None:
    if not model.is_dir():
        raise ConfigError(f"there is no model directory {model}")


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs a program of the server's with these arguments."""
    return [*_PYTHON, module, *arguments]


class EmbeddedServer:
    """The service on a free port of this machine, for as long as the `with` block lasts."""

    def __init__(self, model: Path | None, report: Callable[[str], None], environment: Mapping[str, str]) -> None:
        """model: model directory; None where the environment names the parts of the model.
        report: told, in a line, what a waiting user should know.  environment: what the service finds in its own, but
        for who may call: it serves the caller alone.

        Entering the block raises StartupError if the service does not start.
        """
        self.address = ""
        """"HOST:PORT" once the block is entered."""
        self._model = model
        self._report = report
        self._environment = {name: value for name, value in environment.items() if name not in ACCESS_VARIABLES}
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        require_server_package()
        if self._model is not None:
            _require_directory(self._model)
        self._directory = tempfile.TemporaryDirectory(prefix="h3stream-", ignore_cleanup_errors=True)
        data = Path(self._directory.name) / "data"
        data.mkdir()
        self._log_path = Path(self._directory.name) / "server.log"
        model = [] if self._model is None else ["--model", str(self._model)]
        command = module_command("orchestrator", [*model, "--listen", "127.0.0.1:0", "--data", str(data)])
        self._report(f"starting the service on {self._model or 'the files that the environment names'}")
        started_s = time.monotonic()
        try:
            with open(self._log_path, "wb") as log:
                self._process = subprocess.Popen(
                    # Nothing can be worth draining when the only user stops.
                    [*command, "--drain-s", "0", "--exit-with-parent"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    # A Ctrl-C in the terminal is for this process, which then cancels the job and stops the child.
                    start_new_session=True,
                )
            self.address = self._await_address(self._process, started_s)
        except BaseException:
            self._stop()
            raise
        self._report(f"ready after {time.monotonic() - started_s:.1f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def log_tail(self) -> str:
        """The last lines of the service's log."""
        return _tail(self._log_path.read_text(errors="replace"))

    def _await_address(self, process: subprocess.Popen[bytes], started_s: float) -> str:
        threading.Thread(target=_forward_lines, args=(process.stdout, self._lines), daemon=True).start()
        while (waited_s := time.monotonic() - started_s) < STARTUP_TIMEOUT_S:
            try:
                line = self._lines.get(timeout=STARTUP_REPORT_S)
            except queue.Empty:
                self._report(f"still starting after {waited_s + STARTUP_REPORT_S:.0f} s")
                continue
            if line is None:
                code = process.wait()
                raise StartupError(f"the service ended with exit status {code}; its log ends with:\n{self.log_tail()}")
            if line.startswith(_ANNOUNCEMENT):
                return line.removeprefix(_ANNOUNCEMENT).strip()
        raise StartupError(f"the service has not started within {STARTUP_TIMEOUT_S:g} s:\n{self.log_tail()}")

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
        self._directory.cleanup()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session of its own, by force if it does not end when told to."""
    assert process.stdin is not None
    process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # nobody but its own children is in its group
        process.wait()


def _forward_lines(output: IO[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    """Hands on lines up to the announcement, then reads on so that the child never blocks on its output."""
    is_announced = False
    with output:
        for data in output:
            if not is_announced:
                line = data.decode(errors="replace")
                is_announced = line.startswith(_ANNOUNCEMENT)
                lines.put(line)
    lines.put(None)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
