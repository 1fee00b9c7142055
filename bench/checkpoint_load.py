"""What loading a published DiT takes, in time and memory, against reading every shard with safetensors and converting.

    python -m bench.checkpoint_load [--layers N]

Makes a DiT of random weights in the official layout, in shards, and loads it twice in processes of their own: as the
worker does, and plainly. The files are in the page cache in both cases. Both must give the same parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.checkpoints.model_files import open_dit
from services.common.weights import split_rows
from tools.convert_checkpoint import convert

MODEL = {
    "hidden_size": 1024,
    "num_attention_heads": 12,
    "ffn_dim": 4096,
    "text_dim": 1024,
    "time_embed_hidden_dim": 1024,
    "time_embed_dim": 512,
}
SHARD_BYTES = 100_000_000


def make_files(directory: Path, num_layers: int) -> Path:
    """An official DiT of random weights in shards."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    model = MiniMaxH3Transformer3DModel(**MODEL, num_layers=num_layers)
    for name, parameter in model.named_parameters():
        if not name.startswith(("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")):
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(directory / "transformer")
    convert(directory / "transformer", directory / "official", to="official", max_shard_bytes=SHARD_BYTES)
    return directory / "official"


def ours(path: Path) -> dict[str, Tensor]:
    """As the worker loads it."""
    from services.dit.weights import load_transformer

    return load_transformer(path, "auto").state_dict()


def plain(path: Path) -> dict[str, Tensor]:
    """Every shard read into one dictionary, then converted, then given to the module."""
    from diffusers import MiniMaxH3Transformer3DModel
    from safetensors.torch import load_file

    contents = open_dit(path).contents
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored.update(load_file(file))
    parameters = {}
    for key, rule in contents.key_map.items():
        if rule.targets:
            parameters.update(zip(rule.targets, split_rows(rule, stored[key]), strict=True))
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**MODEL, num_layers=contents.architecture.num_layers)
    model.load_state_dict(parameters, strict=True, assign=True)
    return dict(model.state_dict())


def measure(how: str, path: Path) -> None:
    """One load in this process: prints seconds, memory at its peak and what came out."""
    import diffusers  # noqa: F401 - imported before the clock starts
    from diffusers import MiniMaxH3Transformer3DModel  # noqa: F401 - a lazy attribute, which takes seconds

    torch.set_grad_enabled(False)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    started_s = time.perf_counter()
    state = {"ours": ours, "plain": plain}[how](path)
    for tensor in state.values():  # a mapped tensor has not been read before it is touched
        tensor.contiguous().view(-1).view(torch.uint8)[::4096].sum()
    seconds = time.perf_counter() - started_s
    peak = _memory("VmHWM") - before
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].contiguous().view(torch.uint8).numpy())
    size = sum(tensor.nbytes for tensor in state.values())
    print(json.dumps({"seconds": seconds, "peak": peak, "size": size, "digest": digest.hexdigest()}))


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Runs the benchmark, or one load of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8, help="blocks of the model")
    parser.add_argument("--measure", nargs=2, metavar=("HOW", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], Path(arguments.measure[1]))
        return
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory() as directory:
        path = make_files(Path(directory), arguments.layers)
        largest = max(tensor.info.num_bytes for tensor in open_dit(path).checkpoint.tensors.values())
        for _ in range(3):
            for how, found in results.items():
                command = [sys.executable, "-m", "bench.checkpoint_load", "--measure", how, str(path)]
                found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert len({result["digest"] for found in results.values() for result in found}) == 1, "different parameters"
    size = results["ours"][0]["size"]
    fastest = {how: min(result["seconds"] for result in found) for how, found in results.items()}
    peak = {how: max(result["peak"] for result in found) for how, found in results.items()}
    print(f"model {size / 1e6:.0f} MB, largest stored tensor {largest / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    print(f"time, ours / plain: {fastest['ours'] / fastest['plain']:.2f}")
    for how in results:
        print(f"peak memory, {how}: {peak[how] / size:.2f} of the model's size")


if __name__ == "__main__":
    main()
