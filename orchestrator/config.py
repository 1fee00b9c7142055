"""The settings of the service: one typed object, filled from the environment, a file and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.budget import VIDEO_BIT_RATE
from h3stream.errors import ConfigError
from services.common.listen import check_tcp_address
from services.common.options import option_help

ENVIRONMENT_PREFIX = "H3STREAM_"
WORKER_TRANSPORTS = ("unix", "tcp")


@dataclass(frozen=True)
class Settings:
    """Everything that two deployments may set differently."""

    model: Path
    """Model directory in the published diffusers layout."""
    data: Path
    """Directory for jobs: event logs, artifacts, the residency ledger. Unless set, `h3stream` in the user's own data
    directory."""
    listen: str = "127.0.0.1:50051"
    """Address of VideoService, "HOST:PORT"; port 0 takes any free one."""
    insecure: bool = False
    """Allow listening beyond loopback although callers are not authenticated."""
    device: str = "auto"
    """Compute device of the workers; "auto" takes the lane's GPU, else the CPU."""
    threads: int = 0
    """CPU threads of each worker; 0: one per core. Only one worker computes at a time."""
    lanes: int = 1
    """Lanes, each three workers pinned to one GPU (or to one slot of the host where there is none)."""
    worker_transport: str = "unix"
    """How the orchestrator reaches its workers: "unix" sockets, or "tcp" on loopback."""
    max_queued_jobs: int = 16
    """Jobs that may wait for a lane; the next one is refused."""
    kept_jobs: int = 64
    """Finished jobs whose events and artifacts are kept; the oldest is removed first."""
    adapter: Path | None = None
    """RAVEN adapter file; none: the only one in the model directory's `adapters/`."""
    video_bit_rate: int = VIDEO_BIT_RATE
    """Bits per second of the H.264 track, on average."""
    drain_s: float = 30.0
    """How long running jobs may go on after SIGTERM before they are cancelled."""

    def __post_init__(self) -> None:
        if not self.model.is_dir():
            raise ConfigError(f"model: {self.model} is not a directory")
        _at_least("threads", self.threads, 0)
        _at_least("lanes", self.lanes, 1)
        _at_least("max_queued_jobs", self.max_queued_jobs, 0)
        _at_least("kept_jobs", self.kept_jobs, 1)
        _at_least("drain_s", self.drain_s, 0)
        if self.worker_transport not in WORKER_TRANSPORTS:
            raise ConfigError(f"worker_transport is {self.worker_transport!r}; it must be one of {WORKER_TRANSPORTS}")
        check_tcp_address(self.listen, insecure=self.insecure)

    def public(self) -> dict[str, str]:
        """The settings by name, for GetServerInfo; there are no secrets among them."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items() if value is not None}


def load_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Settings, argparse.Namespace]:
    """Settings from the environment, the file named by --config and the flags, the later winning.

    Returns them with the parsed flags, which also hold what is no setting. Raises ConfigError for anything unknown.
    """
    parser = argparse.ArgumentParser(
        prog="h3stream serve",
        description="Serves h3stream.v1.VideoService.",
        epilog=f"Every option can also be set as {ENVIRONMENT_PREFIX}NAME or in the TOML file of --config.",
    )
    parser.add_argument("--config", type=Path, help="TOML file of settings")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop when standard input closes (for an embedding program)"
    )
    texts = option_help(Settings)
    for field in dataclasses.fields(Settings):
        text = texts.get(field.name)
        name = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(name, action="store_const", const="true", help=text)
        else:
            parser.add_argument(name, metavar=field.name.upper(), help=text)
    flags = parser.parse_args(arguments)

    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    for name in fields:
        if (text := environment.get(ENVIRONMENT_PREFIX + name.upper())) is not None:
            values[name] = text
    if flags.config is not None:
        values.update(_read_file(flags.config, fields.keys()))
    values.update({name: value for name in fields if (value := getattr(flags, name)) is not None})
    if "model" not in values:
        raise ConfigError(f"model is not set: give --model DIR or {ENVIRONMENT_PREFIX}MODEL")
    values.setdefault("data", Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "h3stream")
    return Settings(**{name: _parse(name, str(fields[name].type), value) for name, value in values.items()}), flags


def _read_file(path: Path, known: Any) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"config file {path}: {error}") from error
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"config file {path}: unknown settings {unknown}; known are {sorted(known)}")
    return values


def _parse(name: str, kind: str, value: Any) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        return {"int": int, "float": float, "str": str}.get(kind, Path)(value)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}, which is no {kind}") from None


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")
