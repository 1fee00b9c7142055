"""A clip whose worker was lost is decoded again from the beginning by a fresh one, to the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.artifacts import WORKER_ARTIFACTS
from core.geometry import chunk_table
from h3stream.errors import InvalidRequestError, UnsupportedError
from services.common.verbs import VerbCancelled
from services.vae.config import VaeConfig
from services.vae.worker import FinishedClip, Media, VaeWorker
from tests.unit.services.vae.harness import latents, make_clip, run_clip

CLIP = make_clip(39, 64, 64)
NUM_CHUNKS = len(chunk_table(CLIP.num_frames))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The last bits of a sum depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def never() -> bool:
    return False


def fresh(model_directory: Path, artifact_root: Path | None = None) -> VaeWorker:
    worker = VaeWorker(VaeConfig(model_directory, device="cpu", artifact_root=artifact_root))
    worker.weights.enter()
    return worker


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(
    model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Media], FinishedClip, Path]:
    directory = tmp_path_factory.mktemp("undisturbed") / "job"
    worker = fresh(model_directory)
    media = run_clip(worker, CLIP, "s", directory).media
    return media, worker.finish("s"), directory


@pytest.mark.parametrize("num_done", range(NUM_CHUNKS + 1))
def test_a_fresh_worker_makes_the_same_bytes_over_what_the_lost_one_left(
    model_directory: Path,
    tmp_path: Path,
    undisturbed: tuple[list[Media], FinishedClip, Path],
    num_done: int,
) -> None:
    expected, finished, directory = undisturbed
    assert files(directory).keys() == WORKER_ARTIFACTS.keys()
    lost = fresh(model_directory)
    lost.open_session("s", CLIP, tmp_path)
    sent: list[Media] = []
    for index in range(num_done):
        lost.decode_chunk("s", index, *latents(lost, "s", index), sent.append, never)
    assert lost.num_decoded_chunks("s") == num_done
    # It is gone without a word: its open files stay as they are.
    again = fresh(model_directory)
    media = run_clip(again, CLIP, "s", tmp_path).media
    assert media == expected
    assert media[: len(sent)] == sent
    assert again.finish("s") == finished
    assert files(tmp_path) == files(directory)


@pytest.mark.parametrize("num_forwards", [1, 2])
def test_a_session_that_broke_off_starts_anew_when_it_is_opened_again(
    worker: VaeWorker, tmp_path: Path, undisturbed: tuple[list[Media], FinishedClip, Path], num_forwards: int
) -> None:
    expected, finished, directory = undisturbed
    worker.open_session("s", CLIP, tmp_path)
    worker.decode_chunk("s", 0, *latents(worker, "s", 0), print, never)
    answers = iter([False] * num_forwards + [True])
    with pytest.raises(VerbCancelled):
        worker.decode_chunk("s", 1, *latents(worker, "s", 1), print, lambda: next(answers))
    with pytest.raises(UnsupportedError, match="ended half-way through a chunk; open a new one"):
        worker.decode_chunk("s", 1, *latents(worker, "s", 1), print, never)
    assert worker.open_session("s", CLIP, tmp_path) == ""
    assert worker.num_decoded_chunks("s") == 0
    media: list[Media] = []
    for index in range(NUM_CHUNKS):
        worker.decode_chunk("s", index, *latents(worker, "s", index), media.append, never)
        worker.open_session("s", CLIP, tmp_path)  # changes nothing
    assert media == expected
    assert worker.finish("s") == finished
    assert files(tmp_path) == files(directory)


@pytest.mark.parametrize(
    "place",
    ["elsewhere", "root/../elsewhere", "root/link", "root/link/below", "rootless", "root/link/" + "x" * 300],
)
def test_artifacts_are_written_below_the_root_alone_and_nothing_is_told_of_what_is_there(
    model_directory: Path, tmp_path: Path, place: str
) -> None:
    root = tmp_path / "root"
    for directory in (root, tmp_path / "elsewhere", tmp_path / "rootless"):
        directory.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    worker = fresh(model_directory, root)
    with pytest.raises(InvalidRequestError) as raised:
        worker.open_session("s", CLIP, tmp_path / place)
    assert raised.value.message == "artifact_directory lies outside of the folder that this worker may read and write"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_path_with_a_nul_is_none(worker: VaeWorker) -> None:
    with pytest.raises(InvalidRequestError, match="artifact_directory holds a NUL"):
        worker.open_session("s", CLIP, Path("/tmp/a\0b"))


def test_artifacts_go_below_the_root(
    model_directory: Path, tmp_path: Path, undisturbed: tuple[list[Media], FinishedClip, Path]
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "root")
    worker = fresh(model_directory, tmp_path / "way")
    run_clip(worker, CLIP, "s", tmp_path / "root" / "job")
    assert worker.finish("s") == undisturbed[1]
