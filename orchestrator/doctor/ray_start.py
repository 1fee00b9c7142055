"""`python -m orchestrator.doctor.ray_start DIR`: starts Ray as the server does, has it do one thing and stops it.

A program of its own, so that it can be given up: a Ray that does not start may wait for minutes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Ends with status 0 if Ray works; else the last line on standard error says why it does not."""
    import ray  # not at the top: Ray reads the environment when it is imported, and others import this module

    # As RayCluster in orchestrator/lanes.py, in a directory that the caller removes.
    ray.init(
        address="local",
        _temp_dir=sys.argv[1],
        num_cpus=1,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )
    answer = ray.get(ray.remote(num_cpus=0)(_answer).remote())
    ray.shutdown()
    sys.exit(None if answer == _answer() else f"a task of Ray's answered {answer!r}")


def _answer() -> str:
    return "as expected"


if __name__ == "__main__":
    main()
