"""Host memory in few large blocks, page-locked where that is possible, and kept for the next cache.

torch rounds page-locked allocations up to powers of two and keeps those that are freed. Blocks of such a size waste
nothing, and what is kept is the pool's to decide: it gives memory back to the system when told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError

log = logging.getLogger(__name__)

BLOCK_BYTES = 256 << 20
MAX_SPARE_BYTES = 4 << 30
"""Page-locked memory kept for the next store: locking it anew takes about a second, and nobody else can have it."""


@dataclass(frozen=True, eq=False)
class Block:
    """A piece of host memory."""

    memory: Tensor
    """uint8, one-dimensional."""
    is_pinned: bool
    """Whether it is page-locked, so that copies to and from a GPU need not wait."""


def pinned_memory(num_bytes: int) -> Tensor:
    """Page-locked memory, uint8. Raises RuntimeError if there is none."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    if not memory.is_pinned():
        raise RuntimeError("the allocator returned memory that is not page-locked")
    return memory


class HostPool:
    """Blocks of host memory, which stores take and give back."""

    def __init__(
        self,
        *,
        pinned: bool,
        max_spare_bytes: int = MAX_SPARE_BYTES,
        block_bytes: int = BLOCK_BYTES,
        allocate: Callable[[int], Tensor] = pinned_memory,
    ) -> None:
        """pinned: page-locked memory, until an allocation fails; from then on ordinary memory, for good.

        max_spare_bytes: most page-locked memory that is kept for the next store.  block_bytes: a power of two.
        allocate: makes page-locked memory; raises RuntimeError if it cannot.
        """
        self.fallback_reason = ""
        """Why memory is not page-locked although that was asked for; empty if it is."""
        self.block_bytes = block_bytes
        self._pins = pinned
        self._max_spare = max_spare_bytes // block_bytes
        self._allocate = allocate
        self._spare: list[Block] = []

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for the next store: the system counts them as used, and here they are free."""
        return len(self._spare) * self.block_bytes

    def take(self, num_bytes: int) -> list[Block]:
        """Blocks of the pool's size that together have so many bytes; the last may have fewer of its own.

        Raises DeviceMemoryError, with nothing taken, if the host has no such memory.
        """
        blocks: list[Block] = []
        try:
            for start in range(0, num_bytes, self.block_bytes):
                blocks.append(self._spare.pop() if self._spare else self._make(num_bytes - start))
        except (RuntimeError, MemoryError) as error:
            self.give_back(blocks)
            raise DeviceMemoryError(f"no host memory for {num_bytes} bytes of cached rows: {error}") from error
        return blocks

    def give_back(self, blocks: list[Block]) -> None:
        """Takes blocks back, of which nothing is in use any more; those that are not page-locked are let go."""
        self._spare += [block for block in blocks if block.is_pinned]
        blocks.clear()
        self._shrink(self._max_spare)

    def trim(self) -> None:
        """Gives what is kept back to the system."""
        self._shrink(0)

    def _shrink(self, num_blocks: int) -> None:
        if len(self._spare) > num_blocks:
            del self._spare[num_blocks:]
            if torch.accelerator.is_available():
                torch.accelerator.empty_host_cache()

    def _make(self, num_bytes: int) -> Block:
        """num_bytes: what is still needed."""
        size = self.block_bytes
        if self._pins:
            try:
                return Block(self._allocate(size), is_pinned=True)
            except RuntimeError as error:
                self._pins = False
                self.fallback_reason = f"page-locked memory could not be allocated: {error}"
                log.warning("the frozen cache falls back to pageable host memory: %s", self.fallback_reason)
        return Block(torch.empty(min(size, num_bytes), dtype=torch.uint8), is_pinned=False)
