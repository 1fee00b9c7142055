"""Host memory in few large blocks, page-locked where that is possible, and kept for the next cache.

torch rounds page-locked allocations up to powers of two and keeps those that are freed. Blocks of such a size waste
nothing, and what is kept is the pool's to decide: it gives memory back to the system when told to.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError

log = logging.getLogger(__name__)

BLOCK_BYTES = 256 << 20


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
        keeps: bool = True,
        max_pinned_bytes: int = sys.maxsize,
        block_bytes: int = BLOCK_BYTES,
        allocate: Callable[[int], Tensor] = pinned_memory,
    ) -> None:
        """pinned: page-locked memory, until an allocation fails; from then on ordinary memory, for good.

        keeps: whether page-locked blocks that are given back stay for the next store.  max_pinned_bytes: most
        page-locked memory, taken or kept; what goes beyond it is ordinary.  block_bytes: a power of two.  allocate:
        makes page-locked memory; raises RuntimeError if it cannot.
        """
        self.fallback_reason = ""
        """Why memory is not page-locked although that was asked for; empty if it is."""
        self.pinned_bytes = 0
        """Page-locked bytes, taken or kept."""
        self.block_bytes = block_bytes
        self._pins, self._keeps, self._max_pinned_bytes = pinned, keeps, max_pinned_bytes
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
        """Takes blocks back of which nothing is in use any more; those that are not page-locked are let go."""
        self._spare += [block for block in blocks if block.is_pinned]
        if not self._keeps:
            self.trim()

    def trim(self) -> None:
        """Gives what is kept back to the system."""
        if self._spare:
            self.pinned_bytes -= self.spare_bytes
            self._spare.clear()
            if torch.accelerator.is_available():
                torch.accelerator.empty_host_cache()

    def _make(self, num_bytes: int) -> Block:
        """num_bytes: what is still needed."""
        size = self.block_bytes
        if self._pins and self.pinned_bytes + size > self._max_pinned_bytes:
            self._report(f"no more than {self._max_pinned_bytes} bytes may be page-locked")
        elif self._pins:
            try:
                memory = self._allocate(size)
            except RuntimeError as error:
                self._pins = False
                self._report(f"page-locked memory could not be allocated: {error}")
            else:
                self.pinned_bytes += size
                return Block(memory, is_pinned=True)
        return Block(torch.empty(min(size, num_bytes), dtype=torch.uint8), is_pinned=False)

    def _report(self, reason: str) -> None:
        if reason != self.fallback_reason:
            self.fallback_reason = reason
            log.warning("the frozen cache falls back to pageable host memory: %s", reason)
