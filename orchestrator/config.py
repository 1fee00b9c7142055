"""The settings of the service: one typed object, filled from the environment, a file and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.budget import VIDEO_BIT_RATE
from core.request import preview_violations
from h3stream.errors import ConfigError
from h3stream.request import PreviewSpec
from orchestrator.edge_settings import EdgeSettings
from services.checkpoints.components import FOLDERS, Part
from services.common.config import AdapterSource
from services.common.device import check_device
from services.common.listen import check_tcp_address
from services.common.options import add_flags, parse_values, texts_of, told
from services.dit.config import DEFAULT_SHARED_CACHE_BYTES, check_dit_layout

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "H3STREAM_"
CLIENT_VARIABLES = (
    *("H3STREAM_SERVER", "H3STREAM_API_KEY", "H3STREAM_TLS", "H3STREAM_TLS_CA"),
    *("H3STREAM_CLIENT_CERT", "H3STREAM_CLIENT_KEY"),
)
"""Variables with that prefix which only the command line of the client reads."""
WORKER_TRANSPORTS = ("unix", "tcp")
AUDIT_NAME = "audit.jsonl"
"""File in the data directory that says who called what, where callers are authenticated."""


@dataclass(frozen=True)
class Settings:
    """Everything that two deployments may set differently."""

    data: Path
    """Directory for jobs: event logs, artifacts, the residency ledger. Unless set, `h3stream` in the user's own data
    directory."""
    model: Path | None = None
    """Model directory in the published diffusers layout or the official one. Not needed where every part is given by
    itself."""
    dit: Path | None = None
    """File or folder of the DiT in any published layout, in place of the model directory's."""
    dit_layout: str = "auto"
    """Layout of the DiT: "diffusers", "official" or "comfyui"; "auto" tells it from the names of its tensors and how
    they are split over files. The official and ComfyUI's have the same names and shapes and differ in the order of
    rows."""
    video_vae: Path | None = None
    """File or folder of the video VAE in any published layout, in place of the model directory's."""
    audio_vae: Path | None = None
    """File or folder of the audio VAE in any published layout, in place of the model directory's."""
    text_encoder: Path | None = None
    """File or folder of the text encoder in any published layout, ComfyUI's NVFP4 file included, in place of the model
    directory's."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, in place of the model directory's. ComfyUI's folders have none."""
    adapter: tuple[AdapterSource, ...] = ()
    """Adapter (LoRA) as [NAME=]PATH[:STRENGTH], beside those in the model directory's `adapters/`; may be given several
    times, in the environment separated by semicolons, in a file as a list. NAME is what requests call it, else its
    file's name; STRENGTH is used where a request gives none, else 1. Streaming needs RAVEN's."""
    allow_partial_adapters: bool = False
    """Take adapters of which some modules are not in the DiT, with a warning; without it they are refused."""
    shared_cache_bytes: int = DEFAULT_SHARED_CACHE_BYTES
    """Bytes that frozen caches which refinements share may take between two of them, on each lane; the least recently
    used is freed first. 0 keeps none."""
    no_pinned_caches: bool = False
    """Keep frozen caches in ordinary host memory, not in page-locked memory, which some drivers do not bear."""
    listen: str = "127.0.0.1:50051"
    """Address of VideoService, "HOST:PORT"; port 0 takes any free one."""
    insecure: bool = False
    """Allow listening beyond loopback although callers are not authenticated."""
    keys: Path | None = None
    """File of API keys, client certificates and tenants (docs/access.md); every caller must then be one of them. Read
    again when it changes."""
    tls_cert: Path | None = None
    """PEM file of the certificate to show callers, followed by those that lead to its root; needs tls_key. Read again
    when it changes."""
    tls_key: Path | None = None
    """PEM file of that certificate's private key, which no other user may read."""
    tls_client_ca: Path | None = None
    """PEM file of authorities (mTLS): every caller must then show a certificate of theirs."""
    log_format: str = "text"
    """How the log is written: "text", or "json", an object on each line."""
    device: str = "auto"
    """Compute device of the workers; "auto" takes the lane's GPU, else the CPU."""
    threads: int = 0
    """CPU threads of each worker; 0: one per core. Only one worker computes at a time."""
    lanes: int = 1
    """Lanes, each three workers pinned to one GPU (or to one slot of the host where there is none)."""
    worker_transport: str = "unix"
    """How the orchestrator reaches its workers: "unix" sockets, or "tcp" on loopback."""
    max_queued_jobs: int = 16
    """Jobs that may wait for a lane; the next one is refused. Where the access file names several tenants, one that has
    no limit of its own may have half of them, rounded up."""
    kept_jobs: int = 64
    """Finished jobs of all tenants whose events and artifacts are kept; the oldest of the tenant that has the most is
    removed first."""
    kept_age_s: float = 0.0
    """Seconds that artifacts are kept after their job has ended; 0: as long as the job."""
    kept_bytes: int = 0
    """Bytes that the listed artifacts of all finished jobs may take; the oldest of the tenant that has the most bytes
    are removed first, the newest job's never. Event logs, each as large as its job's stream, do not count: kept_jobs
    bounds them. 0: any number."""
    video_bit_rate: int = VIDEO_BIT_RATE
    """Bits per second of the H.264 track, on average."""
    preview_max_side: int = 256
    """Longer side, in pixels, of the stills of a request that says nothing about them: 16 to 512, or 0 for none."""
    preview_every_steps: int = 1
    """Noise forwards from one still to the next, where a request says nothing about them."""
    drain_s: float = 30.0
    """How long running jobs may go on after SIGTERM; what is left then goes on at the next start."""

    def __post_init__(self) -> None:
        self._check_files()
        check_device(self.device)
        _at_least("shared_cache_bytes", self.shared_cache_bytes, 0)
        _at_least("threads", self.threads, 0)
        _at_least("lanes", self.lanes, 1)
        _at_least("max_queued_jobs", self.max_queued_jobs, 0)
        _at_least("kept_jobs", self.kept_jobs, 1)
        _at_least("kept_age_s", self.kept_age_s, 0)
        _at_least("kept_bytes", self.kept_bytes, 0)
        _at_least("drain_s", self.drain_s, 0)
        for violation in preview_violations(self.preview):
            raise ConfigError(violation.description.replace("preview.", "preview_", 1))
        if self.worker_transport not in WORKER_TRANSPORTS:
            raise ConfigError(f"worker_transport is {self.worker_transport!r}; it must be one of {WORKER_TRANSPORTS}")
        check_tcp_address(
            self.listen, insecure=self.insecure or self.edge.authenticates, remedy="give keys or tls_client_ca"
        )

    @property
    def parts(self) -> dict[Part, Path | None]:
        """For each part of the model what is in place of the model directory's; None for the directory's own."""
        return {part: getattr(self, part) for part in FOLDERS}

    @property
    def preview(self) -> PreviewSpec:
        """Stills of a request that says nothing about them."""
        return PreviewSpec(self.preview_max_side, self.preview_every_steps)

    @property
    def edge(self) -> EdgeSettings:
        """The settings of the process that callers reach. Raises ConfigError."""
        authenticates = self.keys is not None or self.tls_client_ca is not None
        return EdgeSettings(
            keys=self.keys,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            audit=self.data / AUDIT_NAME if authenticates else None,
            log_format=self.log_format,
        )

    def public(self, *, with_paths: bool) -> dict[str, str]:
        """The settings by name, for GetServerInfo; there are no secrets among them.

        with_paths: those that name files too, which are only the operator's business.
        """
        texts = texts_of(self)
        if with_paths:
            return texts
        files = {name for name in texts if isinstance(getattr(self, name), Path)} | {"adapter"}
        return {name: text for name, text in texts.items() if name not in files}

    def __str__(self) -> str:
        """The settings for a log."""
        return told(self)

    def _check_files(self) -> None:
        if self.model is None:
            if missing := [f"--{part.replace('_', '-')}" for part, path in self.parts.items() if path is None]:
                raise ConfigError(
                    f"model is not set: give --model DIR or {ENVIRONMENT_PREFIX}MODEL, or every part by itself "
                    f"(still missing: {', '.join(missing)})"
                )
        elif not self.model.is_dir():
            raise ConfigError(f"model: {self.model} is not a directory")
        for part, path in self.parts.items():
            if path is not None and not os.path.exists(path):
                raise ConfigError(f"{part}: {path} does not exist")
        check_dit_layout(self.dit_layout)


def load_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Settings, argparse.Namespace]:
    """Settings from the environment, the file named by --config and the flags, the later winning.

    Returns them with the parsed flags, which also hold what is no setting. A variable that is no setting is told in the
    log. Raises ConfigError, naming where a value comes from, for anything else unknown and for values that cannot be.
    """
    parser = argparse.ArgumentParser(
        prog="h3stream serve",
        description="Serves h3stream.v1.VideoService.",
        epilog=f"Every option can also be set as {ENVIRONMENT_PREFIX}NAME or in the TOML file of --config.",
        allow_abbrev=False,  # `h3stream serve` looks for whole names
    )
    parser.add_argument("--config", type=Path, help="TOML file of settings")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop when standard input closes (for an embedding program)"
    )
    add_flags(parser, Settings)
    flags = parser.parse_args(arguments)

    data_home = Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    values: dict[str, Any] = {"data": data_home / "h3stream"}
    origins: dict[str, str] = {}
    variables = {ENVIRONMENT_PREFIX + field.name.upper(): field.name for field in dataclasses.fields(Settings)}
    _tell_unknown(environment, variables)
    for variable, name in variables.items():
        if variable in environment:
            values[name], origins[name] = environment[variable], variable
    if flags.config is not None:
        in_file = _read_file(flags.config, list(variables.values()))
        values.update(in_file)
        origins.update(dict.fromkeys(in_file, f"config file {flags.config}"))
    for name in variables.values():
        if (value := getattr(flags, name)) is not None:
            values[name], origins[name] = value, f"--{name.replace('_', '-')}"
    try:
        return Settings(**parse_values(Settings, values)), flags
    except ConfigError as error:
        raise _with_origin(error, origins) from error


def _tell_unknown(environment: Mapping[str, str], variables: Collection[str]) -> None:
    """Warns of variables that look like settings and are none; what another program reads may be among them."""
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in (*variables, *CLIENT_VARIABLES):
            (nearest,) = difflib.get_close_matches(name, variables, n=1, cutoff=0)
            log.warning("the variable %s is no setting and changes nothing; the nearest one is %s", name, nearest)


def _with_origin(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """The error with where its value comes from; what is said of a setting begins with the setting's name."""
    found = re.match(r"\w+", str(error))
    origin = origins.get(found.group()) if found is not None else None
    return error if origin is None else ConfigError(f"{origin}: {error}")


def _read_file(path: Path, known: Sequence[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"config file {path}: {error}") from error
    if unknown := sorted(values.keys() - set(known)):
        raise ConfigError(f"config file {path}: unknown settings {unknown}; known are {sorted(known)}")
    return values


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")
