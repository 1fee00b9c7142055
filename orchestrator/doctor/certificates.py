"""When a certificate is valid, read from its DER: the standard library tells it only of connections.

Source: RFC 5280 §4.1 (Certificate, Validity), X.690 §8.1 (identifier and length octets).
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def validity_periods(pem: str) -> list[tuple[datetime, datetime]]:
    """From when and until when each certificate of a PEM file is valid. Raises ValueError if one is none."""
    return [_validity(ssl.PEM_cert_to_DER_cert(found)) for found in _PEM.findall(pem)]


def _validity(der: bytes) -> tuple[datetime, datetime]:
    try:
        (_, certificate), *_ = _elements(der)
        (_, to_be_signed), *_ = _elements(certificate)
        fields = [field for field in _elements(to_be_signed) if field[0] != _VERSION]
        _, _, _, (tag, validity), *_ = fields  # serial number, algorithm, issuer, validity
        first, last = _elements(validity)
    except (IndexError, ValueError) as error:
        raise ValueError("it is no X.509 certificate") from error
    if tag != _SEQUENCE:
        raise ValueError("it is no X.509 certificate")
    return _time(*first), _time(*last)


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of the elements that follow each other in some DER."""
    elements = []
    position = 0
    while position < len(data):
        tag, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            num_octets = length & 0x7F
            length = int.from_bytes(data[position : position + num_octets])
            position += num_octets
        if position + length > len(data):
            raise ValueError("it is cut off")
        elements.append((tag, data[position : position + length]))
        position += length
    return elements


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = f"{'20' if text < '50' else '19'}{text}"
    elif tag != _GENERALIZED_TIME:
        raise ValueError("it is no X.509 certificate")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
