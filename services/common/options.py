"""The settings of a process as command-line flags, and texts as their values.

What a setting means is told once, below its field, and read from there for `--help`. A field that is no part of its
dataclass's repr is a secret: it has no flag, since every user of a machine can read command lines, and no log is told
of it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from h3stream.errors import ConfigError
from services.common.config import AdapterSource

ADAPTER_SEPARATOR = ";"
"""Between adapters in one text. Not the colon that separates paths elsewhere: it precedes a strength."""

_FLAGS = {"model_directory": "--model", "adapters": "--adapter"}
"""Flags that are not their fields' names."""
_ADAPTERS = "tuple[AdapterSource, ...]"


def add_flags(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Adds a flag for each field of a settings dataclass, under whose name its text is parsed; None if it is absent."""
    texts = option_help(settings)
    for field in _told_fields(settings):
        flag = _FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
        options: dict[str, Any] = {"dest": field.name, "help": texts.get(field.name)}
        if field.type == "bool":
            parser.add_argument(flag, action="store_const", const="true", **options)
        elif field.type == _ADAPTERS:
            parser.add_argument(flag, action="append", metavar="[NAME=]PATH[:STRENGTH]", **options)
        else:
            metavar = "PATH" if str(field.type).startswith("Path") else field.name.upper()
            parser.add_argument(flag, metavar=metavar, **options)


def parse_values(settings: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a settings dataclass's fields, each from a text or from what a configuration file has in its place.

    Raises ConfigError, naming the setting, for what is no such value.
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(settings)}
    return {name: _parse(name, kinds[name], value) for name, value in values.items()}


def texts_of(settings: Any) -> dict[str, str]:
    """The values of a settings dataclass by name, as their flags take them; those that are not set are left out."""
    values = {field.name: getattr(settings, field.name) for field in _told_fields(settings)}
    return {name: _text(value) for name, value in values.items() if value is not None and value != ()}


def told(settings: Any) -> str:
    """The values of a settings dataclass for a log: name=value, quoted where a shell would need it."""
    return " ".join(f"{name}={shlex.quote(text)}" for name, text in texts_of(settings).items())


def option_help(settings: type[Any]) -> dict[str, str]:
    """For each field of a settings dataclass, inherited ones included, its docstring and its default.

    The text is ready for argparse. A field is left out where the sources are not installed.
    """
    docs = {name: text for cls in reversed(settings.__mro__) for name, text in _field_docs(cls).items()}
    return {
        field.name: _with_default(docs[field.name], field.default).replace("%", "%%")  # argparse formats with %
        for field in _told_fields(settings)
        if field.name in docs
    }


def _told_fields(settings: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(settings) if field.repr]


def _text(value: Any) -> str:
    return ADAPTER_SEPARATOR.join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(name: str, kind: str, value: Any) -> Any:
    try:
        return _PARSERS[kind](value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}, which is no {kind.removesuffix(' | None')}") from None


def _parse_bool(value: Any) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    except KeyError:
        raise ValueError from None


def _parse_int(value: Any) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError  # 2.5 in a configuration file is no 2
    return int(value)


def _parse_path(value: Any) -> Path:
    if value == "":
        raise ValueError  # pathlib would take it for the working directory
    return Path(value)


def _parse_adapters(value: Any) -> tuple[AdapterSource, ...]:
    texts = value.split(ADAPTER_SEPARATOR) if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"adapter is {value!r}; it must be a list of texts, each [NAME=]PATH[:STRENGTH]")
    return tuple(AdapterSource.parse(text.strip()) for text in texts if text.strip())


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "bool": _parse_bool,
    "int": _parse_int,
    "float": float,
    "str": str,
    "str | None": str,
    "Path": _parse_path,
    "Path | None": _parse_path,
    _ADAPTERS: _parse_adapters,
}
"""What makes the value of a field, by its type as it is written."""


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The strings below the fields that a class itself declares."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # no source, e.g. of a built-in class
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def _with_default(text: str, default: object) -> str:
    has_none = default is dataclasses.MISSING or default is None or default is False or default == ()
    return text if has_none else f"{text} Default: {default}."
