"""Writes the Python stubs of `protos/` into the SDK, or checks that those committed are current.

python -m tools.make_protos            writes client/h3stream/v1/*_pb2*.py and .pyi
python -m tools.make_protos --check    changes nothing; ends with status 1 and names each file that is not current
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
STUBS = ROOT / "client"
PACKAGE = Path("h3stream/v1")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_protos", description="Stubs of protos/ for the SDK.")
    parser.add_argument("--check", action="store_true", help="change nothing, only tell whether the stubs are current")
    if parser.parse_args().check:
        stale = stale_stubs()
        if stale:
            sys.exit(f"not current: {', '.join(stale)}; run `make protos`")
    else:
        write_stubs()


def write_stubs() -> None:
    """Replaces the committed stubs by those of the protos."""
    fresh = generate_stubs()
    for name in _committed_stubs().keys() - fresh.keys():
        (STUBS / PACKAGE / name).unlink()
    for name, content in fresh.items():
        (STUBS / PACKAGE / name).write_bytes(content)


def stale_stubs() -> list[str]:
    """Names of committed stubs that are missing, left over or different from what the protos give, sorted."""
    fresh, committed = generate_stubs(), _committed_stubs()
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def generate_stubs() -> dict[str, bytes]:
    """Stubs of every proto, file name to content. Files without a service have no gRPC stubs."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        run_protoc(
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out={output}",
        )
        stubs = {path.name: path.read_bytes() for path in (output / PACKAGE).iterdir()}
    for proto in proto_files():
        if "\nservice " not in proto.read_text(encoding="utf-8"):
            for suffix in ("py", "pyi"):
                stubs.pop(f"{proto.stem}_pb2_grpc.{suffix}", None)
    return stubs


def proto_files() -> list[Path]:
    """The contract's files, sorted."""
    return sorted((PROTOS / PACKAGE).glob("*.proto"))


def run_protoc(*options: str) -> None:
    """Runs the protoc of grpcio-tools over the contract. Ends the process with protoc's message if that fails."""
    well_known = resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{well_known}", *options]
    result = subprocess.run([*command, *map(str, proto_files())], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(result.stderr)


def _committed_stubs() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (STUBS / PACKAGE).glob("*_pb2*")}


if __name__ == "__main__":
    main()
