"""What the frozen cache weighs and where it shall live, held to the reference's tables and decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.budget import GIB, ModelSize
from core.cache_policy import (
    CacheRoom,
    DiskNotAllowedError,
    NoRoomError,
    build_request,
    bytes_per_row,
    choose_backend,
    gib,
    row_bytes,
    staging_bytes,
    transient_bytes,
    working_bytes,
)
from core.geometry import num_clip_rows

POLICY: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "audio_refine" / "policy.json").read_text()
)
H3 = ModelSize(num_layers=50, num_heads=56, head_dim=128, hidden=5376, ffn=14336, compute_bytes=2)


def room(**changes: Any) -> CacheRoom:
    """The cache of the reference's worked example, with no room for it anywhere."""
    sizes = {"cache": 10, "smallest": 5, "transient": 8, "free_device": 16, "available_host": 19}
    gibs = {name: changes.pop(name, size) for name, size in sizes.items()}
    fields = {f"{name}_bytes": int(size * GIB) for name, size in gibs.items()}
    return CacheRoom(**fields, **{"allow_disk": False, **changes})


@pytest.mark.parametrize("name", POLICY["bytes_per_row_50_blocks"])
def test_a_row_takes_the_bytes_of_the_reference(name: str) -> None:
    assert bytes_per_row(*name.split("."), H3) == POLICY["bytes_per_row_50_blocks"][name]  # type: ignore[call-arg]


@pytest.mark.parametrize("clip", POLICY["sizes"])
def test_a_cache_takes_the_bytes_of_the_reference(clip: str) -> None:
    rows = num_clip_rows(124, 1344, 768) + 300 if "frames" in clip else int(clip)
    for name, expected in POLICY["sizes"][clip].items():
        contents, precision = name.split(".")
        assert rows * bytes_per_row(contents, precision, H3) == expected


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 400), ("fp8", 204), ("int4", 132)])
def test_a_ragged_row_fills_its_last_group(precision: str, expected: int) -> None:
    assert row_bytes(200, precision) == expected


def test_a_build_takes_the_feed_forward_of_all_rows_in_float32() -> None:
    assert transient_bytes(75_216, H3) == 75_216 * 28_672 * 4
    assert gib(transient_bytes(75_216, H3)) == "8.03 GiB"


@pytest.mark.parametrize("case", POLICY["backend_choices"], ids=lambda case: "-".join(map(str, case.values())))
def test_the_place_is_the_references(case: dict[str, Any]) -> None:
    needs = room(
        cache=case["cache_gib"],
        transient=case["transient_gib"],
        free_device=case["free_vram_gib"],
        available_host=case["ram_available_gib"],
        allow_disk=case["allow_disk"],
    )
    if case["expected"] == "error: does not fit":
        with pytest.raises(NoRoomError):
            choose_backend(case["requested"], needs)
    elif case["expected"] == "error: disk not allowed":
        with pytest.raises(DiskNotAllowedError, match="allow"):
            choose_backend(case["requested"], needs)
    else:
        assert choose_backend(case["requested"], needs).backend == case["expected"]


def test_what_is_exactly_as_much_as_needed_is_not_enough() -> None:
    at_the_limit = room(free_device=22, available_host=0)
    with pytest.raises(NoRoomError):
        choose_backend("auto", at_the_limit)
    one_more = replace(at_the_limit, free_device_bytes=at_the_limit.free_device_bytes + 1)
    assert choose_backend("auto", one_more).backend == "vram"
    at_the_limit = room(available_host=19)
    one_more = replace(at_the_limit, available_host_bytes=at_the_limit.available_host_bytes + 1)
    assert choose_backend("auto", one_more).backend == "ram"


def test_the_error_names_all_that_was_looked_at_in_one_unit_and_what_would_do() -> None:
    with pytest.raises(NoRoomError) as caught:
        choose_backend("auto", room())
    message = str(caught.value)
    on_device, in_host, on_disk = (
        message[message.index(start) :] for start in ("On the device", "In host memory", "On disk")
    )
    assert message.startswith("no room for the frozen cache of 10.00 GiB. ")
    for size in ("22.00 GiB", "10.00 GiB of cache", "8.00 GiB", "4.00 GiB of margin", "16.00 GiB are"):
        assert size in on_device.split("In host memory")[0]
    for size in ("19.00 GiB must", "1.5 times the cache", "4.00 GiB of margin", "19.00 GiB are"):
        assert size in in_host.split("On disk")[0]
    assert "every build would write all 10.00 GiB" in on_disk
    assert "allow_disk; contents hidden with precision int4, 5.00 GiB; or no cache" in on_disk
    assert " GB" not in message


def test_the_smallest_cache_is_not_told_to_become_smaller() -> None:
    with pytest.raises(NoRoomError, match=r"a shorter clip or a smaller canvas \(contents hidden with precision int4"):
        choose_backend("auto", room(smallest=10))


def test_auto_says_why_it_does_not_take_the_place_before() -> None:
    assert "the device has room" in choose_backend("auto", room(free_device=23)).reason
    in_host = choose_backend("auto", room(available_host=64))
    assert in_host.backend == "ram"
    assert "the device has no room for the cache: more than 22.00 GiB" in in_host.reason
    assert "64.00 GiB are" in in_host.reason
    on_disk = choose_backend("auto", room(allow_disk=True))
    assert on_disk.backend == "disk"
    assert "nor has host memory: more than 19.00 GiB" in on_disk.reason
    assert "every build writes all of it" in on_disk.reason


def test_a_shared_cache_never_stays_on_the_device() -> None:
    assert choose_backend("auto", room(free_device=1000, available_host=64, is_shared=True)).backend == "ram"
    with pytest.raises(NoRoomError, match="a shared cache cannot stay there"):
        choose_backend("auto", room(free_device=1000, is_shared=True))


def test_the_margin_asked_for_pads_requests_and_is_not_the_margin_of_auto() -> None:
    needs = room()
    assert build_request("auto", needs, 1.5).device_bytes == int((10 + 8 + 1.5) * GIB)
    assert build_request("vram", needs, 0.0).device_bytes == 18 * GIB
    assert build_request("ram", needs, 1.0).device_bytes == 9 * GIB
    assert build_request("disk", needs, 1.0).host_bytes == 0
    assert build_request("ram", needs, 1.0).host_bytes == 15 * GIB
    assert build_request("auto", replace(needs, is_shared=True), 1.0).device_bytes == 9 * GIB


def test_a_cached_step_works_in_the_rows_of_one_block() -> None:
    assert working_bytes(38_000, "kv", H3) == 38_000 * 2 * 7168 * 2
    assert working_bytes(38_000, "hidden", H3) == 38_000 * (5376 + 2 * 7168) * 2


def test_a_cache_kept_elsewhere_takes_two_blocks_of_itself_on_the_device() -> None:
    size = 38_000 * bytes_per_row("hidden", "int4", H3)
    assert staging_bytes("vram", size, H3) == 0
    assert staging_bytes("ram", size, H3) == staging_bytes("disk", size, H3) == size // 25


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.00 GiB"), (GIB // 2, "0.50 GiB"), (GIB // 1000, "0.001 GiB"), (9 * GIB, "9.00 GiB")]
)
def test_sizes_are_told_in_gib_and_small_ones_are_not_nothing(num_bytes: int, text: str) -> None:
    assert gib(num_bytes) == text
