"""What the frozen cache of a refinement weighs, and where it shall live.

Every size is printed in GiB. What is free is measured, and what is decided carried out, elsewhere.
Source: docs/reference/audio-refine.md §6, §7, §10.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.budget import GIB, ModelSize, gib

PRECISIONS = ("int4", "fp8", "bf16")
BACKENDS = ("vram", "ram", "disk")
INT4_GROUP = 128
"""Channels that share a scale."""
MARGIN_BYTES = 4 * GIB
"""Left free beside what is needed, on the device as in host memory, where the place is chosen and not asked for."""
HOST_OVERHEAD = 1.5
"""Host memory taken for each byte of a cache there, as the source measured it: 14.9 GB for 9.7 GB of rows."""
TRANSIENT_ELEMENT_BYTES = 4
"""Both halves of the feed-forward of a whole forward, in float32: what a build takes beside the cache."""


class NoRoomError(Exception):
    """No place that is allowed has room for the cache."""


class DiskNotAllowedError(Exception):
    """The disk was asked for and not allowed."""


@dataclass(frozen=True)
class CacheRoom:
    """What a cache needs, and what is free for it."""

    cache_bytes: int
    """All its rows as they are stored."""
    smallest_bytes: int
    """The same rows as `hidden` in int4, the smallest there is."""
    transient_bytes: int
    """Device memory that a build takes beside the cache."""
    free_device_bytes: int
    """Device memory that nobody holds."""
    available_host_bytes: int
    """Host memory that can be had without swapping."""
    allow_disk: bool
    """Whether it may live in files."""
    is_shared: bool = False
    """Whether it shall outlive the refinement, and so must not stay on the device."""

    @property
    def device_bytes(self) -> int:
        """What must be free on the device, and more."""
        return self.cache_bytes + self.transient_bytes + MARGIN_BYTES

    @property
    def host_bytes(self) -> int:
        """What must be available in host memory, and more."""
        return resident_bytes(self.cache_bytes) + MARGIN_BYTES


@dataclass(frozen=True)
class Choice:
    """Where a cache shall live."""

    backend: str
    reason: str
    """Why there, in a sentence."""


@dataclass(frozen=True)
class Request:
    """Room that is asked for before anything is allocated."""

    device_bytes: int
    host_bytes: int


def row_bytes(width: int, precision: str) -> int:
    """Bytes of one stored row of so many channels, its scales included."""
    if precision == "int4":
        return -(-width // INT4_GROUP) * (INT4_GROUP // 2 + 2)
    return width + 4 if precision == "fp8" else 2 * width


def bytes_per_row(contents: str, precision: str, model: ModelSize) -> int:
    """Bytes that a row of the sequence takes in the cache, over all blocks."""
    one_block = row_bytes(model.hidden, precision) if contents == "hidden" else 2 * row_bytes(model.inner, precision)
    return model.num_layers * one_block


def transient_bytes(num_rows: int, model: ModelSize) -> int:
    """Device memory that a build of so many rows, frozen or not, takes beside the cache."""
    return num_rows * 2 * model.ffn * TRANSIENT_ELEMENT_BYTES


def working_bytes(num_rows: int, contents: str, model: ModelSize) -> int:
    """Device memory that a cached step takes beside the cache: the rows of a block, decoded, and their K and V."""
    keys_and_values = 2 * model.inner
    decoded = model.hidden if contents == "hidden" else 0
    return num_rows * (decoded + keys_and_values) * model.compute_bytes


def staging_bytes(backend: str, cache_bytes: int, model: ModelSize) -> int:
    """Device memory that a cache takes that is kept elsewhere: two blocks of it, one read while the next arrives."""
    return 0 if backend == "vram" else -(-2 * cache_bytes // model.num_layers)


def resident_bytes(cache_bytes: int) -> int:
    """Host memory that a cache there is expected to take."""
    return int(HOST_OVERHEAD * cache_bytes)


def build_request(requested: str, room: CacheRoom, margin_gb: float) -> Request:
    """Room to ask for before a build.  requested: the backend as asked for.  margin_gb: `vram_margin_gb`, in GiB."""
    on_device = room.cache_bytes if requested in ("auto", "vram") and not room.is_shared else 0
    in_host = resident_bytes(room.cache_bytes) if requested in ("auto", "ram") else 0
    return Request(room.transient_bytes + on_device + _margin(margin_gb), in_host)


def choose_backend(requested: str, room: CacheRoom) -> Choice:
    """Where a cache shall live: where it was asked to, or the first place that has room.

    requested: "auto", "vram", "ram" or "disk".
    Raises NoRoomError, which says all that was looked at, and DiskNotAllowedError.
    """
    if requested == "disk" and not room.allow_disk:
        raise DiskNotAllowedError(
            "the cache's backend is disk, which is not used unless allow_disk is true: every build writes all "
            f"{gib(room.cache_bytes)} of it; allow it, or choose auto, vram or ram"
        )
    if requested != "auto":
        return Choice(requested, f"{requested} was asked for, for {gib(room.cache_bytes)}")
    if not room.is_shared and room.device_bytes < room.free_device_bytes:
        return Choice("vram", f"the device has room for the cache: {_device_sum(room)}")
    if room.host_bytes < room.available_host_bytes:
        return Choice("ram", f"{_without_device(room)}; host memory has room for it: {_host_sum(room)}")
    if room.allow_disk:
        reason = f"{_without_device(room)}, nor has host memory: {_host_sum(room)}; every build writes all of it"
        return Choice("disk", reason)
    raise NoRoomError(
        f"no room for the frozen cache of {gib(room.cache_bytes)}. On the device, {_device_sum(room)}"
        f"{', and a shared cache cannot stay there' if room.is_shared else ''}. In host memory, {_host_sum(room)}. On "
        f"disk, which is not allowed, every build would write all {gib(room.cache_bytes)}. What would do: allow_disk; "
        f"{_smaller(room)}; or no cache, which is slower and exact"
    )


def _device_sum(room: CacheRoom) -> str:
    return (
        f"more than {gib(room.device_bytes)} must be free ({gib(room.cache_bytes)} of cache, "
        f"{gib(room.transient_bytes)} that its build takes beside it, {gib(MARGIN_BYTES)} of margin), and "
        f"{gib(room.free_device_bytes)} are"
    )


def _host_sum(room: CacheRoom) -> str:
    return (
        f"more than {gib(room.host_bytes)} must be available ({HOST_OVERHEAD:g} times the cache for what is taken with "
        f"it, and {gib(MARGIN_BYTES)} of margin), and {gib(room.available_host_bytes)} are"
    )


def _without_device(room: CacheRoom) -> str:
    if room.is_shared:
        return "a shared cache cannot stay on the device"
    return f"the device has no room for the cache: {_device_sum(room)}"


def _smaller(room: CacheRoom) -> str:
    if room.smallest_bytes < room.cache_bytes:
        return f"contents hidden with precision int4, {gib(room.smallest_bytes)}"
    return "a shorter clip or a smaller canvas (contents hidden with precision int4, the smallest, is what this is)"


def _margin(margin_gb: float) -> int:
    return int(margin_gb * GIB)
