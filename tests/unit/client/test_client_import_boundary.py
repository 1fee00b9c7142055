"""The SDK stands on grpcio and protobuf alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = ["h3stream", "h3stream.cli", "h3stream.embedded"]


@pytest.mark.parametrize("module", MODULES)
def test_importing_the_sdk_loads_nothing_but_grpc_and_protobuf(module: str, tmp_path: Path) -> None:
    program = (
        "import sys, json, grpc.aio, google.protobuf.message; before = set(sys.modules)\n"
        f"import {module}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    foreign = {name for name in json.loads(loaded.stdout) if name not in sys.stdlib_module_names}
    assert foreign <= {"google", "grpc", "h3stream"}
