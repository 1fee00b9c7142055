"""Host memory for caches: reused, bounded, and ordinary where it cannot be page-locked."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError
from services.dit.refine.pinned import Block, HostPool

BLOCK = 1 << 12


class Allocator:
    """Memory that passes for page-locked, of which there is so much."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_left = num_blocks
        self.num_calls = 0

    def __call__(self, num_bytes: int) -> Tensor:
        self.num_calls += 1
        if self.num_left == 0:
            raise RuntimeError("cannot lock more")
        self.num_left -= 1
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_blocks_cover_what_is_asked_for() -> None:
    pool = HostPool(pinned=True, block_bytes=BLOCK, allocate=Allocator())
    assert [len(pool.take(size)) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def test_blocks_that_come_back_serve_the_next_store() -> None:
    allocator = Allocator()
    pool = HostPool(pinned=True, block_bytes=BLOCK, allocate=allocator)
    first = pool.take(3 * BLOCK)
    memory = {block.memory.data_ptr() for block in first}
    pool.give_back(first)
    assert pool.spare_bytes == 3 * BLOCK
    second = pool.take(4 * BLOCK)
    assert memory < {block.memory.data_ptr() for block in second}
    assert allocator.num_calls == 4
    pool.give_back(second)
    pool.trim()
    assert pool.spare_bytes == 0


@pytest.mark.parametrize(("bound", "kept"), [(0, 0), (BLOCK - 1, 0), (2 * BLOCK, 2), (9 * BLOCK, 3)])
def test_no_more_is_kept_than_the_bound(bound: int, kept: int) -> None:
    pool = HostPool(pinned=True, max_spare_bytes=bound, block_bytes=BLOCK, allocate=Allocator())
    blocks = pool.take(3 * BLOCK)
    pool.give_back(blocks)
    assert pool.spare_bytes == kept * BLOCK
    assert blocks == []  # whoever gave them back holds none of them any more


def test_ordinary_memory_is_used_once_page_locked_memory_ends_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    allocator = Allocator(num_blocks=2)
    pool = HostPool(pinned=True, block_bytes=BLOCK, allocate=allocator)
    with caplog.at_level(logging.WARNING):
        blocks = pool.take(4 * BLOCK) + pool.take(BLOCK)
    assert [block.is_pinned for block in blocks] == [True, True, False, False, False]
    assert allocator.num_calls == 3
    assert pool.fallback_reason == "page-locked memory could not be allocated: cannot lock more"
    assert [record.message for record in caplog.records] == [
        "the frozen cache falls back to pageable host memory: page-locked memory could not be allocated: cannot lock "
        "more"
    ]
    pool.give_back(blocks)
    assert pool.spare_bytes == 2 * BLOCK


def test_memory_is_ordinary_without_a_reason_where_that_was_asked_for() -> None:
    allocator = Allocator()
    pool = HostPool(pinned=False, block_bytes=BLOCK, allocate=allocator)
    (block,) = pool.take(10)
    assert (block.is_pinned, block.memory.nbytes) == (False, 10)
    assert (pool.fallback_reason, allocator.num_calls) == ("", 0)


def test_a_host_without_memory_is_told_and_nothing_stays_taken() -> None:
    with pytest.raises(DeviceMemoryError, match="no host memory for 1125899906842624 bytes of cached rows"):
        HostPool(pinned=False, block_bytes=1 << 60).take(1 << 50)
    size = 1 << 49  # the first block is there, and no other
    pool = HostPool(pinned=True, max_spare_bytes=size, block_bytes=size, allocate=Allocator(num_blocks=0))
    pool.give_back([Block(torch.empty(1), is_pinned=True)])
    with pytest.raises(DeviceMemoryError):
        pool.take(2 * size)
    assert pool.spare_bytes == size
