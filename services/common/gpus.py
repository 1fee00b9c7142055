"""`python -m services.common.gpus`: what torch can do with the GPUs here, as one JSON object, for `h3stream doctor`.

{"torch": VERSION, "cuda": version of CUDA that torch was built with, or null,
 "gpus": [{"name": ..., "total_bytes": ..., "free_bytes": ...}], "problem": why none can be used, or null}
"""

from __future__ import annotations

import json
from typing import Any

import torch


def main() -> None:
    """Computes something on each GPU, for what is listed may still not work."""
    gpus: list[dict[str, Any]] = []
    problem = None
    try:
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            gpus.append({"name": name, "total_bytes": total, "free_bytes": free})
    except RuntimeError as error:  # torch says all that CUDA says in this way
        problem = str(error)
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "problem": problem}))


if __name__ == "__main__":
    main()
