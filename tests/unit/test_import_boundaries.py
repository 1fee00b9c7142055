"""Dependencies point one way and stop where they should: once as written in the sources, once as really imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("core", "h3stream", "services", "orchestrator", "tools", "web")
WORKERS = ("text_encoder", "dit", "vae")

MAY_IMPORT = {
    "core": {"core"},
    "client/h3stream": {"h3stream", "grpc", "google"},
    "orchestrator": {"core", "h3stream", "services", "orchestrator", "grpc", "grpc_health", "google", "ray"},
    "services": {
        *("core", "h3stream", "services", "grpc", "grpc_health", "grpc_reflection", "google"),
        *("torch", "numpy", "av", "diffusers", "transformers", "tokenizers", "safetensors", "PIL"),
    },
    "web": {"h3stream", "services", "web", "grpc", "grpc_health", "starlette", "uvicorn"},
}
"""Folder -> packages beside the standard library that its files may import."""

STOPS_AT = {
    "ray": ("orchestrator/lanes.py", "orchestrator/doctor/ray_start.py"),
    "grpc": (
        "client/h3stream/*",
        "services/*/servicer.py",
        "services/common/authentication.py",
        "services/common/rpc.py",
        "services/common/worker.py",
        "services/common/process.py",
        "orchestrator/access/guard.py",
        "orchestrator/access/tls.py",
        "orchestrator/edge.py",
        "orchestrator/edge_health.py",
        "orchestrator/servicer.py",
        "orchestrator/worker_clients.py",
        "orchestrator/__main__.py",
        "web/upstream.py",
    ),
    "av": (
        "services/vae/media/*",
        "services/vae/artifacts/*",
        "services/dit/preview.py",
        "tools/train_tiny/measure/media.py",
    ),
    "PIL": ("services/vae/artifacts/*",),
    "torch": ("services/*", "tools/*"),
    "diffusers": ("services/*", "tools/*"),
    "transformers": ("services/text_encoder/*", "tools/*"),
    "starlette": ("web/*",),
    "uvicorn": ("web/gateway.py",),
}
"""Package -> the only files that may import it."""

WITHOUT_TORCH = (
    "services/*/config.py",
    "services/common/authentication.py",
    "services/checkpoints/*",
    "services/common/device.py",
    "services/common/files.py",
    "services/common/ledger.py",
    "services/common/listen.py",
    "services/common/logs.py",
    "services/common/options.py",
    "services/common/refusal.py",
    "services/common/rpc.py",
    "services/common/token.py",
    "services/vae/media/*",
    "services/vae/artifacts/*",
)
"""Files of the services that the orchestrator uses, or that work on bytes and arrays."""

ORCHESTRATOR_USES = (
    "services.common",
    "services.checkpoints.adapter_registry",
    "services.checkpoints.components",
    "services.checkpoints.header",
    "services.checkpoints.model_files",
    "services.checkpoints.printable",
    *(f"services.{worker}.config" for worker in WORKERS),
)
"""What the orchestrator may know of the services: the shell, the settings and what headers tell, never a model."""

READS_ENVIRONMENT = (
    *("*/__main__.py", "client/h3stream/cli.py", "web/gateway.py"),
    *("orchestrator/__init__.py", "orchestrator/edge_process.py"),
)
"""Entry points, and those who say what a library or a child finds in it; everything else is handed its settings."""


def sources() -> Iterator[str]:
    """Our files relative to the root, generated code left out."""
    for folder in (*MAY_IMPORT, "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("client/h3stream/v1/"):
                yield name


def imports(source: str) -> set[str]:
    """Every dotted name that a source imports anywhere in it, also from within functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def reads_environment(source: str) -> bool:
    """Whether a source names the process environment of `os`."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    tree = ast.walk(ast.parse(source))
    return bool(imports(source) & {f"os.{name}" for name in names}) or any(
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in tree
    )


def package(dotted: str) -> str:
    return dotted.partition(".")[0]


def is_below(dotted: str, parents: tuple[str, ...]) -> bool:
    return any(dotted == parent or dotted.startswith(f"{parent}.") for parent in parents)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


IMPORTS = {name: imports((ROOT / name).read_text(encoding="utf-8")) for name in sources()}


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import os.path, ray
from services.dit import worker
def f():
    from torch import nn
"""
    assert imports(source) == {"os.path", "ray", "services.dit.worker", "torch.nn"}


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_reading_the_environment_is_found(source: str) -> None:
    assert reads_environment(source)
    assert not reads_environment("import os\nos.path.join('environ')")


def test_the_sources_are_found() -> None:
    assert {"core/geometry.py", "client/h3stream/errors.py", "services/common/rpc.py"} <= set(IMPORTS)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | set(sys.stdlib_module_names)
    offences = {
        name: foreign
        for name, found in IMPORTS.items()
        if name.startswith(f"{folder}/") and (foreign := {dotted for dotted in found if package(dotted) not in allowed})
    }
    assert offences == {}


@pytest.mark.parametrize("dependency", STOPS_AT)
def test_a_dependency_stops_where_it_should(dependency: str) -> None:
    users = [name for name, found in IMPORTS.items() if dependency in map(package, found)]
    assert [name for name in users if not matches(name, STOPS_AT[dependency])] == []


def test_torch_stays_out_of_settings_media_and_what_the_orchestrator_uses() -> None:
    users = [name for name, found in IMPORTS.items() if "torch" in map(package, found)]
    assert [name for name in users if matches(name, WITHOUT_TORCH)] == []


def test_the_orchestrator_knows_only_the_shell_and_the_settings_of_services() -> None:
    offences = {
        (name, dotted)
        for name, found in IMPORTS.items()
        for dotted in found
        if name.startswith("orchestrator/")
        and package(dotted) == "services"
        and not is_below(dotted, ORCHESTRATOR_USES)
    }
    assert offences == set()


def test_the_gateway_knows_of_the_services_only_where_they_may_listen() -> None:
    used = {
        dotted
        for name, found in IMPORTS.items()
        for dotted in found
        if name.startswith("web/") and package(dotted) == "services"
    }
    assert used == {"services.common.listen.check_tcp_address"}


@pytest.mark.parametrize("worker", [*WORKERS, "common", "checkpoints"])
def test_a_worker_knows_no_other_worker(worker: str) -> None:
    others = tuple(f"services.{other}" for other in WORKERS if other != worker)
    offences = {
        (name, dotted)
        for name, found in IMPORTS.items()
        for dotted in found
        if name.startswith(f"services/{worker}/") and is_below(dotted, others)
    }
    assert offences == set()


def test_only_entry_points_read_the_environment() -> None:
    readers = [name for name in IMPORTS if reads_environment((ROOT / name).read_text(encoding="utf-8"))]
    assert [name for name in readers if not matches(name, READS_ENVIRONMENT)] == []


def modules_of(folder: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of every module below a folder."""
    names = [name.removeprefix("client/") for name in IMPORTS if name.startswith(f"{folder}/")]
    dotted = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in names]
    return [name for name in dotted if name not in but]


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages, beside the standard library, that a fresh interpreter has loaded after importing modules."""
    program = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1])) - set(sys.stdlib_module_names)


def test_core_loads_the_standard_library_alone() -> None:
    assert loaded_by(modules_of("core")) == {"core"}


def test_the_sdk_loads_grpc_and_protobuf_alone() -> None:
    loaded = loaded_by(modules_of("client/h3stream"))
    # grpc itself loads those of its sister packages that are installed.
    own = {name for name in loaded if not name.startswith(("grpc", "cython", "_cython"))}
    assert own <= {"h3stream", "google", "typing_extensions"}
    assert "h3stream" in own


def test_the_orchestrator_loads_neither_a_model_library_nor_ray() -> None:
    loaded = loaded_by(modules_of("orchestrator", but=("orchestrator.lanes",)))
    assert loaded & {"torch", "diffusers", "transformers", "av", "ray", "safetensors", "tools"} == set()


def test_the_edge_loads_what_it_answers_with_and_no_more() -> None:
    loaded = loaded_by(["orchestrator.edge"])
    assert loaded & {"torch", "numpy", "diffusers", "transformers", "av", "ray", "safetensors", "tools"} == set()


def test_the_orchestrators_lanes_load_ray_but_no_model_library() -> None:
    loaded = loaded_by([name for name in modules_of("orchestrator") if name == "orchestrator.lanes"])
    assert loaded & {"torch", "diffusers", "transformers", "av"} == set()


def test_the_gateway_loads_neither_a_model_library_nor_the_orchestrator() -> None:
    loaded = loaded_by(modules_of("web"))
    assert loaded & {"torch", "numpy", "diffusers", "transformers", "av", "ray", "orchestrator"} == set()


def test_settings_of_workers_load_no_torch() -> None:
    loaded = loaded_by([name for name in modules_of("services") if name.endswith(".config")])
    assert loaded & {"torch", "numpy", "diffusers", "transformers", "av", "ray"} == set()


def test_whatever_looks_at_weight_files_loads_neither_torch_nor_numpy() -> None:
    loaded = loaded_by(modules_of("services/checkpoints"))
    assert loaded & {"torch", "numpy", "safetensors", "diffusers", "transformers", "av", "ray", "tools"} == set()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_loads_neither_ray_nor_the_orchestrator(worker: str) -> None:
    modules = [name for name in modules_of(f"services/{worker}") if name.endswith((".worker", ".servicer"))]
    assert loaded_by(modules) & {"ray", "orchestrator", "tools"} == set()
