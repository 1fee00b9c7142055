"""The server of a command: where it is, who the command is to it, and how it is known."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from h3stream.access import Tls, TlsOptions
from h3stream.aio import AsyncClient
from h3stream.errors import ConfigError
from h3stream.options import server_address

SERVER_VARIABLE, KEY_VARIABLE, TLS_VARIABLE = "H3STREAM_SERVER", "H3STREAM_API_KEY", "H3STREAM_TLS"
TLS_FILES = {"ca": "H3STREAM_TLS_CA", "cert": "H3STREAM_CLIENT_CERT", "key": "H3STREAM_CLIENT_KEY"}
"""Variables that name files of TlsOptions, by its fields."""
DEFAULT_SERVER = "127.0.0.1:50051"
_TRUTHS = {"": None, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True)
class Endpoint:
    """A server, and how it is called."""

    address: str
    """"HOST:PORT" or "unix:PATH"."""
    api_key: str | None = field(default=None, repr=False)
    """Sent with every call."""
    tls: Tls = None
    """As in AsyncClient."""

    def client(self) -> AsyncClient:
        """A client of the server. Raises ConfigError for a key that no call can carry and files that do not do."""
        return AsyncClient(self.address, api_key=self.api_key, tls=self.tls)

    @property
    def options(self) -> str:
        """What names the server on a command line; the key is not among it."""
        words = ["--server", self.address, *(["--tls"] if self.tls is True else [])]
        for name in TLS_FILES if isinstance(self.tls, TlsOptions) else ():
            if (path := getattr(self.tls, name)) is not None:
                words += [f"--tls-{name}", str(path)]
        return shlex.join(words)


def add_server_option(command: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Adds what names the server of a command that needs one, and how it is called."""
    command.add_argument(
        "--server",
        type=server_address,
        default=environment.get(SERVER_VARIABLE) or DEFAULT_SERVER,
        metavar="HOST:PORT",
        help=f"the server, also as unix:PATH (default: ${SERVER_VARIABLE}, else {DEFAULT_SERVER})",
    )
    _add_access_options(command)


def add_server_options(command: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Adds what names the server of a command that can start one, and how it is called."""
    place = command.add_mutually_exclusive_group()
    place.add_argument(
        "--server",
        type=server_address,
        default=environment.get(SERVER_VARIABLE) or None,
        metavar="HOST:PORT",
        help=f"a running server, also as unix:PATH (default: ${SERVER_VARIABLE}, else start one for this command)",
    )
    place.add_argument("--model", type=Path, metavar="DIR", help="model directory for the server that is started")
    _add_access_options(command)


def endpoint_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Endpoint:
    """The server that the arguments name. Raises ConfigError for a file or a variable that does not do."""
    return Endpoint(arguments.server, _api_key(arguments.api_key_file, environment), _tls(arguments, environment))


def _add_access_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("access", "How a running server is called.")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file that holds the API key and nothing else (default: the key in ${KEY_VARIABLE})",
    )
    group.add_argument(
        "--tls",
        action="store_true",
        help=f"the server speaks TLS, as any of the following says too (default: ${TLS_VARIABLE})",
    )
    texts = {
        "ca": "certificates that vouch for the server, in place of the system's",
        "cert": "certificate of this client, for a server that asks for one",
        "key": "its private key",
    }
    for name, variable in TLS_FILES.items():
        group.add_argument(
            f"--tls-{name}", type=Path, metavar="FILE", help=f"{texts[name]}, in PEM form (default: ${variable})"
        )


def _api_key(path: Path | None, environment: Mapping[str, str]) -> str | None:
    if path is None:
        return environment.get(KEY_VARIABLE) or None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is no text file") from None


def _tls(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Tls:
    given = {name: getattr(arguments, f"tls_{name}") for name in TLS_FILES}
    text = environment.get(TLS_VARIABLE, "").lower()
    if text not in _TRUTHS:
        rule = f"it must be one of {', '.join(filter(None, _TRUTHS))}"
        raise ConfigError(f"{TLS_VARIABLE} is {text!r:.80}; {rule}")
    wish = _TRUTHS[text]
    if wish is False and not arguments.tls and not any(given.values()):
        return None
    files = {name: given[name] or environment.get(variable) or None for name, variable in TLS_FILES.items()}
    if any(files.values()):
        return TlsOptions(**files)
    return True if arguments.tls or wish else None
