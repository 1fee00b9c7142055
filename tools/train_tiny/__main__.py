"""Makes the tiny model anew: every part from the procedural world, deterministically from a seed.

    python -m tools.train_tiny DIR [--work DIR] [--seed N] [--device DEVICE]

About 80 minutes on two cores: one trains the text encoder and then the DiT, the other the video decoder. A run that was
stopped goes on from its last checkpoints when it is started again with the same `--work`, to the same bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import signal
import sys
from pathlib import Path

from tools.train_tiny.parts import autoencoders, text_and_dit


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description="Trains the tiny model.")
    parser.add_argument("directory", type=Path, help="model directory to write; one that is there is replaced")
    parser.add_argument("--work", type=Path, default=Path("var/train-tiny"), help="checkpoints and scratch files")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--device", default="cpu", help='where the DiT is trained, such as "cuda"')
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    if directory.exists() and not (directory / "model_index.json").is_file():
        sys.exit(f"train_tiny: {directory} exists and is no model directory; remove it or choose another")
    work: Path = arguments.work / f"seed-{arguments.seed}"
    model = work / "model"
    model.mkdir(parents=True, exist_ok=True)
    lanes = [
        multiprocessing.get_context("spawn").Process(target=lane, args=(model, work, arguments.seed, *more))
        for lane, more in ((text_and_dit, (arguments.device,)), (autoencoders, ()))
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the lanes end, too
    try:
        for process in lanes:
            process.start()
        # The one that fails first ends the other, which can go on from its checkpoint later.
        while any(process.is_alive() for process in lanes) and not any(process.exitcode for process in lanes):
            for process in lanes:
                process.join(timeout=1.0)
    finally:
        for process in lanes:
            if process.pid is not None:
                process.terminate()
                process.join()
    if any(process.exitcode for process in lanes):
        sys.exit("train_tiny: stopped; started again it goes on from the last checkpoints")

    from tools.train_tiny.card import write_card

    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory)
    write_card(directory, arguments.seed, {})
    total = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"{directory}: {total / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
