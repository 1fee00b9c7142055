"""Stores of the frozen cache: the same bits from every place, copies ahead of the reader, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError, UnsupportedError
from services.dit.refine import staged
from services.dit.refine.codecs import make_codec
from services.dit.refine.pinned import HostPool
from services.dit.refine.record import RecordLayout
from services.dit.refine.scratch import PREFIX
from services.dit.refine.staged import DiskRecords, RecordFiles
from services.dit.refine.stores import BACKENDS, RecordStore, Store, StoreShape, make_store

ROOT = Path(__file__).parents[5]
CPU = torch.device("cpu")
LAYERS, TENSORS, ROWS, WIDTH = 5, 2, 70, 200
SHAPE = StoreShape(LAYERS, TENSORS, ROWS, WIDTH, "int4", CPU)
WAYS_OUT = "What would do: .*backend ram, or vram .*contents hidden with precision int4.*no cache.*on_no_room exact"
WAIT_S = 20.0
"""How long a thread may take before a test gives up."""


def values(seed: int = 0, shape: StoreShape = SHAPE) -> Tensor:
    """Rows of every tensor of every layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.num_layers, shape.num_tensors, shape.rows, shape.width, generator=generator)


def build(store: Store, rows: Tensor) -> None:
    for layer, tensors in enumerate(rows):
        for tensor, x in enumerate(tensors):
            store.write(layer, tensor, x)
    store.seal()


def read_all(store: Store, shape: StoreShape = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a pass reads, through one reused buffer."""
    store.start()
    out = torch.empty(shape.rows, shape.width, dtype=dtype)
    found = []
    for layer in range(shape.num_layers):
        for tensor in range(shape.num_tensors):
            store.read(layer, tensor, out)
            found.append(out.clone())
    return torch.stack(found).view(shape.num_layers, shape.num_tensors, shape.rows, shape.width)


def in_and_out(rows: Tensor, precision: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the codec alone makes of rows."""
    codec = make_codec(precision)
    flat = rows.flatten(0, 2)
    payload, scales = codec.payload(*flat.shape), codec.scales(*flat.shape)
    codec.encode(flat, payload, scales)
    out = torch.empty(flat.shape, dtype=dtype)
    codec.decode(payload, scales, out)
    return out.view(rows.shape)


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = make_store(request.param, SHAPE, directory=tmp_path, pinned=False)
    yield made
    made.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tensors", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
def test_every_place_hands_out_the_same_bits(
    precision: str, num_tensors: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    shape = StoreShape(LAYERS, num_tensors, ROWS, WIDTH, precision, CPU)
    rows = values(shape=shape)
    expected = in_and_out(rows, precision, dtype)
    for backend in BACKENDS:
        store = make_store(backend, shape, directory=tmp_path, pinned=False)
        build(store, rows)
        for _ in range(3):
            assert torch.equal(read_all(store, shape, dtype), expected), backend
        store.free()


def test_a_build_begun_anew_replaces_the_one_before(store: Store) -> None:
    build(store, values(1))
    read_all(store)
    build(store, values(2))
    assert torch.equal(read_all(store), in_and_out(values(2), "int4"))


@pytest.mark.parametrize("num_written", [1, 3, LAYERS * TENSORS])
def test_a_build_given_up_is_never_read_and_can_begin_anew(store: Store, num_written: int) -> None:
    build(store, values(1))
    for index in range(num_written):
        store.write(*divmod(index, TENSORS), values(2)[divmod(index, TENSORS)])
    with pytest.raises(AssertionError, match="not sealed"):
        store.start()
    build(store, values(3))
    assert torch.equal(read_all(store), in_and_out(values(3), "int4"))


@pytest.mark.parametrize("num_read", [0, 1, 2, 5])
def test_a_pass_given_up_is_followed_by_a_whole_one_or_by_a_build(store: Store, num_read: int) -> None:
    build(store, values(1))
    out = torch.empty(ROWS, WIDTH)
    for _ in range(2):
        store.start()
        for index in range(num_read):
            store.read(*divmod(index, TENSORS), out)
    assert torch.equal(read_all(store), in_and_out(values(1), "int4"))
    store.start()
    for index in range(num_read):
        store.read(*divmod(index, TENSORS), out)
    build(store, values(2))
    assert torch.equal(read_all(store), in_and_out(values(2), "int4"))


@pytest.mark.parametrize("num_read", [0, 3, LAYERS * TENSORS])
def test_a_parked_store_holds_nothing_on_the_device_and_can_be_read_and_built_again(
    store: Store, num_read: int
) -> None:
    build(store, values(1))
    store.start()
    for index in range(num_read):
        store.read(*divmod(index, TENSORS), OUT)
    store.park()
    if store.backend != "vram":
        assert store.stats.num_device_bytes == 0
    with pytest.raises(AssertionError, match="before a pass was started"):
        store.read(0, 0, OUT)
    assert torch.equal(read_all(store), in_and_out(values(1), "int4"))
    store.park()
    build(store, values(2))
    assert torch.equal(read_all(store), in_and_out(values(2), "int4"))


def unsealed(store: Store) -> None:
    for index in range(LAYERS * TENSORS):
        store.write(*divmod(index, TENSORS), values()[divmod(index, TENSORS)])


def sealed(store: Store) -> None:
    build(store, values())


def started(store: Store) -> None:
    sealed(store)
    store.start()


def freed(store: Store) -> None:
    sealed(store)
    store.free()


def empty(store: Store) -> None:
    pass


X, OUT = torch.zeros(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
MISUSES: list[tuple[Callable[[Store], None], Callable[[Store], None], str]] = [
    (empty, lambda s: s.write(0, 1, X), "tensor 1 is written, but 0 is next"),
    (empty, lambda s: s.write(1, 0, X), "tensor 2 is written, but 0 is next"),
    (empty, lambda s: s.write(0, 0, X[1:]), "69, 200.* rows to write"),
    (empty, lambda s: s.write(LAYERS, 0, X), "layer 5 of 5"),
    (empty, lambda s: s.write(0, 2, X), "tensor 2 of 2"),
    (empty, lambda s: s.seal(), "a build of 0 of 10 tensors"),
    (empty, lambda s: s.start(), "not sealed"),
    (empty, lambda s: s.read(0, 0, OUT), "before a pass was started"),
    (unsealed, lambda s: s.start(), "not sealed"),
    (unsealed, lambda s: s.read(0, 0, OUT), "before a pass was started"),
    (unsealed, lambda s: s.write(4, 1, X), "tensor 9 is written, but 10 is next"),
    (sealed, lambda s: s.seal(), "sealed already"),
    (sealed, lambda s: s.write(0, 1, X), "after the build was sealed"),
    (sealed, lambda s: s.read(0, 0, OUT), "before a pass was started"),
    (started, lambda s: s.read(0, 1, OUT), "tensor 1 is read, but 0 is next"),
    (started, lambda s: s.read(1, 0, OUT), "tensor 2 is read, but 0 is next"),
    (started, lambda s: s.read(0, 0, OUT[:, 1:]), "room for .70, 199"),
    (freed, lambda s: s.write(0, 0, X), "write of a store that was freed"),
    (freed, lambda s: s.seal(), "seal of a store that was freed"),
    (freed, lambda s: s.start(), "start of a store that was freed"),
    (freed, lambda s: s.read(0, 0, OUT), "read of a store that was freed"),
]


@pytest.mark.parametrize(("prepare", "misuse", "told"), MISUSES)
def test_calls_out_of_order_are_refused(
    store: Store, prepare: Callable[[Store], None], misuse: Callable[[Store], None], told: str
) -> None:
    prepare(store)
    with pytest.raises(AssertionError, match=told):
        misuse(store)


def test_a_store_tells_what_it_holds_and_moves(store: Store) -> None:
    size = LAYERS * TENSORS * ROWS * make_codec("int4").bytes_per_row(WIDTH)
    assert store.stats.num_bytes == size
    build(store, values())
    read_all(store)
    read_all(store)
    stats = store.stats
    if store.backend == "vram":
        assert stats.num_bytes_written == stats.num_bytes_moved == stats.num_host_bytes == 0
        assert size <= stats.num_device_bytes < 1.1 * size
    else:
        assert size <= stats.num_bytes_written < 1.1 * size
        assert stats.num_bytes_moved == 2 * stats.num_bytes_written
        assert stats.num_device_bytes == 2 * stats.num_bytes_written // LAYERS
        assert stats.num_host_bytes == (stats.num_bytes_written if store.backend == "ram" else 0)
    store.free()
    assert store.stats.num_device_bytes == store.stats.num_host_bytes == 0


def test_freeing_twice_changes_nothing(store: Store, tmp_path: Path) -> None:
    store.free()
    store.free()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_place_and_a_missing_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'tape'; there are vram, ram, disk"):
        make_store("tape", SHAPE, directory=tmp_path, pinned=False)
    with pytest.raises(UnsupportedError, match="no directory for it"):
        make_store("disk", SHAPE, directory=None, pinned=False)


# Host memory.


@pytest.mark.parametrize("block_bytes", [1 << 8, 1 << 12, 1 << 20])
def test_records_lie_across_the_borders_of_blocks(block_bytes: int) -> None:
    store = make_store("ram", SHAPE, directory=None, pinned=False, pool=HostPool(pinned=False, block_bytes=block_bytes))
    build(store, values())
    assert torch.equal(read_all(store), in_and_out(values(), "int4"))
    store.free()


def test_a_store_that_is_let_go_gives_its_blocks_back() -> None:
    pool = HostPool(pinned=True, block_bytes=1 << 14, allocate=lambda size: torch.empty(size, dtype=torch.uint8))
    store = make_store("ram", SHAPE, directory=None, pinned=True, pool=pool)
    build(store, values())
    size = store.stats.num_host_bytes
    assert pool.spare_bytes == 0
    del store
    gc.collect()
    assert pool.spare_bytes == size > 0


def test_a_store_says_why_its_memory_is_not_page_locked() -> None:
    def refuse(size: int) -> Tensor:
        raise RuntimeError("locked-memory limit")

    pool = HostPool(pinned=True, allocate=refuse)
    store = make_store("ram", SHAPE, directory=None, pinned=True, pool=pool)
    assert store.fallback_reason == "page-locked memory could not be allocated: locked-memory limit"
    build(store, values())
    assert torch.equal(read_all(store), in_and_out(values(), "int4"))
    store.free()
    assert make_store("ram", SHAPE, directory=None, pinned=False).fallback_reason == ""


# The disk.


class WatchedFiles(RecordFiles):
    """Files that tell which layers were read, by which thread, and that can be told to fail."""

    log: ClassVar[list[tuple[int, str]]]
    was_read: ClassVar[list[threading.Event]]
    fails_at: ClassVar[int | None] = None

    def write(self, layer: int, record: Tensor) -> None:
        if layer == self.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(layer, record)

    def read(self, layer: int, record: Tensor) -> None:
        super().read(layer, record)
        self.log.append((layer, threading.current_thread().name))
        self.was_read[layer].set()


@pytest.fixture
def files() -> type[WatchedFiles]:
    """Of one test's own."""
    return type("Files", (WatchedFiles,), {"log": [], "was_read": [threading.Event() for _ in range(LAYERS)]})


def disk_store(directory: Path, files: type[RecordFiles]) -> RecordStore:
    layout = RecordLayout(make_codec("int4"), TENSORS, ROWS, WIDTH)
    records = DiskRecords(layout, LAYERS, CPU, directory, pinned=False, make_files=files)
    return RecordStore("disk", SHAPE, layout, records)


def test_a_thread_reads_one_layer_ahead_of_the_reader(files: type[WatchedFiles], tmp_path: Path) -> None:
    store = disk_store(tmp_path, files)
    rows = values()
    build(store, rows)
    expected = in_and_out(rows, "int4")
    assert files.log == []
    store.start()
    assert files.was_read[0].wait(WAIT_S)  # before anybody asked for it
    out = torch.empty(ROWS, WIDTH)
    for layer in range(LAYERS):
        for tensor in range(TENSORS):
            store.read(layer, tensor, out)
            assert torch.equal(out, expected[layer, tensor])
            # The next layer comes while this one is in use, and does not touch it; no other one does.
            if layer + 1 < LAYERS:
                assert files.was_read[layer + 1].wait(WAIT_S)
            assert [read for read, _ in files.log] == list(range(min(layer + 2, LAYERS)))
    assert threading.current_thread().name not in {name for _, name in files.log}
    store.free()


def test_there_is_one_file_per_kind_of_tensor_which_holds_all_layers(tmp_path: Path) -> None:
    store = make_store("disk", SHAPE, directory=tmp_path, pinned=False)
    build(store, values())
    (directory,) = tmp_path.iterdir()
    assert re.fullmatch(rf"{PREFIX}{os.getpid()}-[0-9]+-\w+", directory.name)
    codec = make_codec("int4")
    payload, scales = codec.payload(ROWS, WIDTH), codec.scales(ROWS, WIDTH)
    assert scales is not None
    codec.encode(values()[3, 1], payload, scales)
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.name != "owner.lock"}
    assert sizes == {
        name: LAYERS * size
        for tensor in range(TENSORS)
        for name, size in ((f"{tensor}.payload", payload.nbytes), (f"{tensor}.scales", scales.nbytes))
    }
    stored = (directory / "1.payload").read_bytes()
    assert stored[3 * payload.nbytes : 4 * payload.nbytes] == payload.numpy().tobytes()
    store.free()


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_disk_that_fails_fails_the_build_with_the_reason(
    layer: int, files: type[WatchedFiles], tmp_path: Path
) -> None:
    files.fails_at = layer
    store = disk_store(tmp_path, files)
    with pytest.raises(DeviceMemoryError, match=r"files fail: No space left on device\. " + WAYS_OUT):
        build(store, values())
    store.free()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_became_too_short_fails_the_pass_with_the_reason(tmp_path: Path) -> None:
    store = make_store("disk", SHAPE, directory=tmp_path, pinned=False)
    build(store, values())
    (path,) = tmp_path.glob("*/1.payload")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DeviceMemoryError, match=r"layer 4 of 1\.payload ends 1 bytes early\. " + WAYS_OUT):
        read_all(store)
    store.free()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceMemoryError, match=r"no directory for the cache below .*Not a directory.*\. " + WAYS_OUT):
        make_store("disk", SHAPE, directory=tmp_path / "file" / "x", pinned=False)


def test_a_disk_without_room_is_told_before_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            DeviceMemoryError,
            match=rf"no room for \d+ bytes of cached rows below .*: File too large\. {WAYS_OUT}",
        ):
            make_store("disk", SHAPE, directory=tmp_path, pinned=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_in_the_middle_of_a_build_leaves_nothing(tmp_path: Path) -> None:
    program = """
import sys, torch
from pathlib import Path
from services.dit.refine.stores import StoreShape, make_store
shape = StoreShape(2, 1, 64, 256, "bf16", torch.device("cpu"))
store = make_store("disk", shape, directory=Path(sys.argv[1]), pinned=False)
store.write(0, 0, torch.ones(64, 256))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_sweeps_what_a_dead_one_left_and_spares_those_that_live(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}{2**22 + 1}-1-x"  # no process has so large an id
    left.mkdir()
    stores = [make_store("disk", SHAPE, directory=tmp_path, pinned=False) for _ in range(2)]
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2
    for seed, store in enumerate(stores):
        build(store, values(seed))
    for seed, store in enumerate(stores):
        assert torch.equal(read_all(store), in_and_out(values(seed), "int4"))
        store.free()


@pytest.mark.parametrize("num_written", [0, 3, LAYERS * TENSORS])
def test_a_store_that_is_let_go_leaves_no_files_and_no_thread(num_written: int, tmp_path: Path) -> None:
    store = make_store("disk", SHAPE, directory=tmp_path, pinned=False)
    for index in range(num_written):
        store.write(*divmod(index, TENSORS), values()[divmod(index, TENSORS)])
    del store
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(staged.THREAD_NAME)]
    for thread in threads:  # it may hold the last layer that it was told to write
        thread.join(WAIT_S)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_memory_on_the_device_is_two_layers_however_many_there_are() -> None:
    shape = StoreShape(40, 1, ROWS, WIDTH, "int4", CPU)
    store = make_store("ram", shape, directory=None, pinned=False)
    assert store.stats.num_device_bytes < store.stats.num_bytes / 15
    store.free()
