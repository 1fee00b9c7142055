"""Tells what model files are: `python -m services.checkpoints PATH... [--json]`, which `h3stream inspect` runs.

Exit status: 0 all is fine, 1 something is wrong with a file, 2 nothing there or bad usage, 130 interrupted, 141 the
reader of the output has gone.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.checkpoints.report import as_json, as_table, exit_status, inspect


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="h3stream inspect", description="Tells what model files are, from their headers alone.", allow_abbrev=False
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="weight file or folder of any kind")
    parser.add_argument("--json", action="store_true", help="write JSON in place of a table")
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have every letter of a name
    try:
        findings = inspect(arguments.paths)
        print(as_json(findings) if arguments.json else as_table(findings), flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing is flushed into the pipe at exit
        return 141
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
