"""`python -m orchestrator.doctor [--json] [settings of the server]`, which `h3stream doctor` runs.

Takes the settings from where the server takes them. Exit status: 0 the server can work (there may be warnings), 1 it
cannot, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from h3stream.errors import ConfigError
from orchestrator.config import ENVIRONMENT_PREFIX, Settings, load_settings
from orchestrator.data_directory import VERSION_NAME
from orchestrator.doctor.access import check_access
from orchestrator.doctor.finding import Finding, as_json, as_text, is_fine
from orchestrator.doctor.host import check_address, check_host, check_memory, memory, newest_of
from orchestrator.doctor.model import check_files, model_bytes
from orchestrator.doctor.programs import check_encoders, check_gpu, check_ray
from orchestrator.doctor.storage import check_storage, is_used
from orchestrator.journal import JOURNAL_NAME
from services.checkpoints.components import FOLDERS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="h3stream doctor",
        description="Tells whether the server can work on this machine, and how to mend what keeps it from that.",
        epilog="Every option of `h3stream serve` is taken, and what it takes from the environment and --config.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="write JSON in place of text")
    arguments, settings = parser.parse_known_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have every letter of a path
    try:
        findings = []
        for finding in examine(settings, os.environ):
            findings.append(finding)
            if not arguments.json:
                print(as_text(finding), flush=True)
        if arguments.json:
            print(as_json(findings))
    except KeyboardInterrupt:
        return 130
    return 0 if is_fine(findings) else 1


def examine(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every check, one after the other."""
    with tempfile.TemporaryDirectory(prefix="h3stream-") as nowhere:
        names_model = _names_model(arguments, environment)
        try:
            # Of a server without a model there is still much to look at.
            given = arguments if names_model else [*arguments, "--model", nowhere]
            settings, _ = load_settings(given, environment)
        except ConfigError as error:
            yield Finding("settings", "fail", str(error), "`h3stream serve --help` tells what each setting may be")
            settings = None
        else:
            yield Finding("settings", "ok", str(settings).replace(f"model={nowhere} ", ""))
        yield from check_host(time.time(), _known_past_s(settings))
        yield from check_encoders()
        yield check_ray(environment)
        if settings is not None:
            yield from _examine_settings(settings, names_model)


def _examine_settings(settings: Settings, names_model: bool) -> Iterator[Finding]:
    yield check_memory(model_bytes(settings), memory())
    yield check_gpu(settings.device)
    yield from check_storage(settings.data)
    yield check_address(settings.listen, is_server_running=is_used(settings.data))
    yield from check_access(settings.edge, settings.listen, datetime.now(UTC))
    if names_model:
        yield from check_files(settings)
    else:
        yield Finding("model", "warn", "none was given, so none was looked at", "give --model DIR")


def _names_model(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether something says which model is to be served; a configuration file may."""
    flags = {"--config", *(f"--{name.replace('_', '-')}" for name in ("model", *FOLDERS))}
    variables = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in ("model", *FOLDERS)}
    return bool(flags & {argument.partition("=")[0] for argument in arguments} or variables & environment.keys())


def _known_past_s(settings: Settings | None) -> float:
    """A time that has passed: when this program was installed, and when a server last wrote in the data directory."""
    data = [] if settings is None else [settings.data / name for name in (VERSION_NAME, JOURNAL_NAME)]
    return newest_of([Path(__file__), *data])


if __name__ == "__main__":
    sys.exit(main())
