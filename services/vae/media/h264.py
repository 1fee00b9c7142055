"""H.264 byte streams: from start codes, as encoders write them, to length prefixes, as MP4 stores them."""

from __future__ import annotations

import re
import struct

NAL_IDR = 5
_NAL_SPS = 7
_NAL_PPS = 8
_STORED_ELSEWHERE = frozenset((_NAL_SPS, _NAL_PPS, 9, 12))
"""Not stored with a picture: parameter sets are in `avcC`; delimiters and filler say nothing in MP4."""

_HIGH_PROFILES = frozenset((100, 110, 122, 144))
"""Profiles whose `avcC` also states the chroma format and bit depths."""
_START_CODE = re.compile(rb"\x00\x00\x01")


def split_nal_units(stream: bytes) -> list[bytes]:
    """The NAL units of a byte stream with start codes (ITU-T H.264, annex B)."""
    # A zero byte before a start code belongs to the code; a NAL unit itself never ends with one.
    return [unit for piece in _START_CODE.split(stream)[1:] if (unit := piece.rstrip(b"\0"))]


def nal_type(unit: bytes) -> int:
    """The type of a NAL unit."""
    return unit[0] & 0x1F


def length_prefixed(units: list[bytes]) -> bytes:
    """A picture's NAL units as MP4 stores them, parameter sets left out."""
    return b"".join(struct.pack(">I", len(unit)) + unit for unit in units if nal_type(unit) not in _STORED_ELSEWHERE)


def decoder_configuration(extradata: bytes) -> bytes:
    """The AVCDecoderConfigurationRecord (content of `avcC`) for an encoder's parameter sets, 8-bit 4:2:0.

    Raises ValueError if a parameter set is missing.
    """
    units = split_nal_units(extradata)
    sps = [unit for unit in units if nal_type(unit) == _NAL_SPS]
    pps = [unit for unit in units if nal_type(unit) == _NAL_PPS]
    if not sps or not pps:
        raise ValueError(f"{len(sps)} sequence and {len(pps)} picture parameter sets in {len(extradata)} bytes")
    profile = sps[0][1:4]  # profile, constraints, level
    record = b"\x01" + profile + b"\xff"  # lengths of four bytes
    record += bytes((0xE0 | len(sps),)) + b"".join(struct.pack(">H", len(unit)) + unit for unit in sps)
    record += bytes((len(pps),)) + b"".join(struct.pack(">H", len(unit)) + unit for unit in pps)
    if profile[0] in _HIGH_PROFILES:
        record += b"\xfd\xf8\xf8\x00"  # 4:2:0, 8 bits of luma and of chroma, no extensions
    return record
