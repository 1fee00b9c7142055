from __future__ import annotations

import pytest

from services.vae.media.h264 import decoder_configuration, length_prefixed, nal_type, split_nal_units

SPS = bytes.fromhex("6764001eacb422d350101014000003000400000300c23c58ba80")
PPS = bytes.fromhex("68ef3cb0")


def test_units_are_split_at_both_kinds_of_start_code() -> None:
    stream = b"\0\0\0\1" + SPS + b"\0\0\0\1" + PPS + b"\0\0\1" + b"\x65\x88\x80"
    units = split_nal_units(stream)
    assert units == [SPS.rstrip(b"\0"), PPS, b"\x65\x88\x80"]
    assert [nal_type(unit) for unit in units] == [7, 8, 5]


def test_a_picture_is_stored_without_parameter_sets() -> None:
    units = [b"\x09\xf0", SPS, PPS, b"\x06\x05", b"\x65\x88\x84"]
    assert length_prefixed(units) == b"\0\0\0\2\x06\x05" + b"\0\0\0\3\x65\x88\x84"


def test_the_decoder_configuration_repeats_profile_and_level() -> None:
    record = decoder_configuration(b"\0\0\0\1" + SPS[:4] + b"\xac" + b"\0\0\0\1" + PPS)
    assert record[:6] == bytes((1, 0x64, 0x00, 0x1E, 0xFF, 0xE1))
    assert record[6:] == b"\0\5" + SPS[:4] + b"\xac" + b"\1\0\4" + PPS + b"\xfd\xf8\xf8\0"


def test_baseline_has_no_chroma_fields() -> None:
    sps = b"\x67\x42\xc0\x1e\x01"
    assert decoder_configuration(b"\0\0\1" + sps + b"\0\0\1" + PPS).endswith(PPS)


@pytest.mark.parametrize("stream", [b"", b"\0\0\1" + PPS, b"\0\0\1" + SPS])
def test_missing_parameter_sets_are_an_error(stream: bytes) -> None:
    with pytest.raises(ValueError, match="parameter sets"):
        decoder_configuration(stream)
