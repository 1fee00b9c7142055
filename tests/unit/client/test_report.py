"""What people read of what a server has."""

from __future__ import annotations

from dataclasses import replace

from h3stream.job import RemovedArtifact
from h3stream.report import adapter_table, artifact_table
from tests.fakes import ADAPTERS, EMPTY_JOB


def test_what_is_not_known_before_the_model_is_there_is_a_dash() -> None:
    loading = replace(ADAPTERS[1], num_bound_modules=0, sha256="")
    assert adapter_table((loading,))[1].split()[:5] == ["turbo", "0.75", "comfyui", "8-64", "-"]


def test_nothing_is_called_none() -> None:
    assert adapter_table(()) == ["none"]
    assert artifact_table(EMPTY_JOB) == ["none"]
    gone = RemovedArtifact("final.mp4", EMPTY_JOB.create_time, "it was too old")
    removed = replace(EMPTY_JOB, removed_artifacts=(gone,))
    assert artifact_table(removed) == ["none", "final.mp4 has been removed: it was too old"]
