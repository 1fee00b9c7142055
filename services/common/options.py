"""What the settings of a process mean, for its `--help`: told once, below each field, and read from there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any


def option_help(settings: type[Any]) -> dict[str, str]:
    """For each field of a settings dataclass, inherited ones included, its docstring and its default.

    The text is ready for argparse. A field is left out where the sources are not installed.
    """
    docs = {name: text for cls in reversed(settings.__mro__) for name, text in _field_docs(cls).items()}
    return {
        field.name: _with_default(docs[field.name], field.default).replace("%", "%%")  # argparse formats with %
        for field in dataclasses.fields(settings)
        if field.name in docs
    }


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
    has_none = default is dataclasses.MISSING or default is None or default is False
    return text if has_none else f"{text} Default: {default}."
