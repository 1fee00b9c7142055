"""Converts the weights of a part of the model from one published layout to another.

    python -m tools.convert_checkpoint SRC DST --to diffusers|official|comfyui|transformers
        [--layout auto|diffusers|official|comfyui] [--dtype BF16|F16|F32] [--max-shard-bytes N] [--force]

SRC is a file or folder of any layout; what it is follows from its headers. DST becomes a single file for the comfyui
layout, else a folder with its configuration, and appears only once it is whole. No more than a few megabytes of weights
are in memory at a time. The same source and options write the same bytes. Metadata of the source's files is not kept.

Of the DiT and the video VAE the layouts hold the same numbers, so that going back and forth gives every bit again. The
audio VAE's weight norm is folded in ComfyUI's file: what was folded cannot be told from it, but computes the same. The
text encoder loses what H3 does not read on the way to ComfyUI's layout, which has no names for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TextIO, get_args

from h3stream.errors import ConfigError, StartupError
from services.checkpoints.dit_modules import DitLayout
from services.checkpoints.layout import Layout
from services.checkpoints.printable import printable
from services.checkpoints.source import open_checkpoint
from tools.convert.content import num_bytes
from tools.convert.plan import DTYPES, check_result, make_plan
from tools.convert.writing import check_disk, lay_out, small_files, whole_or_not_at_all, write_heads, write_weights

DEFAULT_SHARD_BYTES = 5_000_000_000
"""Shards of about the size of the published ones."""


def convert(
    source: Path,
    destination: Path,
    to: Layout,
    *,
    layout: str = "auto",
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    force: bool = False,
    report: Callable[[int, int], None] = lambda written, total: None,
) -> tuple[str, ...]:
    """Converts a file or folder; returns what the user should know about the result, in sentences.

    to, layout, dtype: as in `tools.convert.plan.make_plan`.  max_shard_bytes: of a folder's files, at least 1;
    `DEFAULT_SHARD_BYTES` if None.  force: whether a destination that exists is replaced.  report: told how
    many bytes of weights are written, and how many there are, from time to time.
    Raises CheckpointError for a source that cannot be read or converted, ConfigError for a destination or an option
    that will not do. Nothing is left of a conversion that fails.
    """
    destination = Path(os.path.abspath(destination))
    plan = make_plan(source, to, layout=layout, dtype=dtype)
    if max_shard_bytes is not None and (max_shard_bytes < 1 or not plan.is_folder):
        why = "must be at least 1" if plan.is_folder else f"is for folders; the {to} layout is one file"
        raise ConfigError(f"--max-shard-bytes {max_shard_bytes} {why}")
    if not plan.is_folder and destination.suffix != ".safetensors":
        raise ConfigError(f"{destination}: the {to} layout is one file; its name must end in .safetensors")
    if destination in Path(os.path.abspath(source)).parents:
        raise ConfigError(f"{destination} is the folder that {source} lies in; choose another")
    files = lay_out(plan, (max_shard_bytes or DEFAULT_SHARD_BYTES) if plan.is_folder else None)
    sizes = (*(file.size_bytes for file in files), *map(len, small_files(plan, files).values()))
    total = sum(map(num_bytes, plan.tensors.values()))
    with whole_or_not_at_all(destination, force=force) as made:
        check_disk(destination, sum(sizes))
        write_heads(made, plan, files)
        notes = check_result(plan, source, open_checkpoint(made), destination.parent)
        write_weights(made, plan, files, lambda written: report(written, total))
    return plan.notes + notes


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert_checkpoint", description="Converts weights to another layout.", allow_abbrev=False
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="weight file, or folder of one part of a model")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder, or for comfyui file, to write")
    parser.add_argument("--to", required=True, choices=get_args(Layout), help="layout to write")
    parser.add_argument(
        "--layout", default="auto", choices=("auto", *get_args(DitLayout)), help="layout of a DiT that does not tell"
    )
    dtypes = sorted({dtype for known in DTYPES.values() for dtype in known})
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the weights; without it they keep theirs")
    parser.add_argument("--max-shard-bytes", type=int, metavar="N", help="size of a folder's files")
    parser.add_argument("--force", action="store_true", help="replace a file or folder that is already there")
    arguments = vars(parser.parse_args(argv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: nothing half-written is left
    source, destination = arguments["source"], arguments["destination"]
    try:
        with _Progress(sys.stderr) as progress:
            notes = convert(**arguments, report=progress.report)
    except StartupError as error:
        sys.exit(f"convert_checkpoint: {printable(str(error), 4000)}")
    except KeyboardInterrupt:
        print("convert_checkpoint: interrupted; nothing has been written", file=sys.stderr)
        sys.exit(130)
    print(f"{destination}: {source} in the {arguments['to']} layout")
    for note in notes:
        print(f"note: {note}")


class _Progress:
    """A line that counts, if there is a terminal to show it."""

    def __init__(self, output: TextIO) -> None:
        self._output = output if output.isatty() else None
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None and self._next_s > 0:
            print(file=self._output)

    def report(self, written: int, total: int) -> None:
        """Shows how far it is, a few times a second."""
        now_s = time.monotonic()
        if self._output is None or (now_s < self._next_s and written < total):
            return
        self._next_s = now_s + 0.2
        line = f"\r{written / 1e9:.2f} of {total / 1e9:.2f} GB ({written / total:.0%})"
        print(line, end="", file=self._output, flush=True)


if __name__ == "__main__":
    main()
