"""The wire format of Protocol Buffers, as much of it as a Perfetto trace needs."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

__all__ = ["boolean", "double", "fixed64", "message", "text", "varint"]

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_MASK: Final = (1 << 64) - 1
_SMALL: Final = tuple(bytes([value]) for value in range(128))


def _raw(value: int) -> bytes:
    """A number in 7-bit groups, the lowest first; negative ones as 64-bit two's complement."""
    value &= _MASK
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint(field: int, value: int) -> bytes:
    """A field of type int32, int64, uint32, uint64 or enum."""
    return _raw(field << 3 | _VARINT) + _raw(value)


def boolean(field: int, value: bool) -> bytes:
    """A field of type bool."""
    return varint(field, int(value))


def fixed64(field: int, value: int) -> bytes:
    """A field of type fixed64."""
    return _raw(field << 3 | _FIXED64) + struct.pack("<Q", value)


def double(field: int, value: float) -> bytes:
    """A field of type double."""
    return _raw(field << 3 | _FIXED64) + struct.pack("<d", value)


def text(field: int, value: str) -> bytes:
    """A field of type string; what UTF-8 cannot hold becomes a question mark."""
    data = value.encode("utf-8", "replace")
    return _raw(field << 3 | _BYTES) + _raw(len(data)) + data


def message(field: int, parts: Iterable[bytes]) -> bytes:
    """A field that is a message of its own."""
    data = b"".join(parts)
    return _raw(field << 3 | _BYTES) + _raw(len(data)) + data
