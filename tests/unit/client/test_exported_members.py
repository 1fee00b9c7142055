"""The public surface is what `__all__` says, no more and no less."""

from __future__ import annotations

import inspect
from types import ModuleType

import h3stream
from h3stream import adapters, errors, events, job, refine, request


def public_classes(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def test_everything_a_caller_can_meet_is_exported() -> None:
    of_servers = {"StartupError", "CheckpointError"}
    expected = public_classes(errors) - of_servers | public_classes(events) | public_classes(job)
    expected |= public_classes(request) - {"RequestOptions", "BranchOptions"} | public_classes(adapters)
    expected |= public_classes(refine) - {"RefineOptions"}
    expected |= {"AsyncClient", "AsyncGeneration", "Client", "Generation", "TlsOptions"}
    assert set(h3stream.__all__) == expected


def test_the_list_is_sorted_and_every_name_is_there_with_a_docstring() -> None:
    assert h3stream.__all__ == sorted(h3stream.__all__)
    assert [name for name in h3stream.__all__ if not getattr(h3stream, name).__doc__] == []


def test_nothing_else_looks_public() -> None:
    visible = {name for name, value in vars(h3stream).items() if not name.startswith("_") and inspect.isclass(value)}
    assert visible == set(h3stream.__all__)
