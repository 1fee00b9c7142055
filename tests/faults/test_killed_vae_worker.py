"""A VAE worker that is killed while it decodes, and one in another process that decodes the clip again."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import grpc

from tests import vae_model
from tests.faults.worker_processes import (
    WorkerAtWork,
    decoded_chunks,
    decoded_clip,
    decoding,
    start_vae,
    vae_opening,
)


def test_another_process_makes_the_same_bytes_over_what_the_killed_one_left(tmp_path: Path) -> None:
    model = vae_model.write_model_directory(tmp_path / "model")
    artifacts = tmp_path / "jobs"
    artifacts.mkdir()
    workers: list[WorkerAtWork] = []

    def start() -> WorkerAtWork:
        directory = tmp_path / str(len(workers))
        directory.mkdir()
        workers.append(start_vae(model, directory, artifacts))
        return workers[-1]

    doomed, other = start(), start()
    for worker in workers:
        worker.wait()
    expected = decoded_clip(doomed, "whole", artifacts / "whole")
    doomed.ask("OpenSession", vae_opening("s", artifacts / "s"))
    sent = b"".join(decoded_chunks(doomed, "s", range(1)))

    def decode() -> None:
        with suppress(grpc.RpcError):  # it may be done before the worker dies
            doomed.ask("DecodeChunk", *decoding("s", 1))

    decoding_on = threading.Thread(target=decode)
    decoding_on.start()
    doomed.kill()
    decoding_on.join()
    assert any(path.name.startswith(".") for path in (artifacts / "s").iterdir())
    found = decoded_clip(other, "s", artifacts / "s")
    assert found[""].startswith(sent)
    assert found == expected
    assert other.stop() == 0
