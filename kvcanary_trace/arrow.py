"""Arrow arrays straight from numpy buffers, and back.

`pa.array` and `pa.scalar` import pandas where it is installed: a second of the interpreter lock in the drain thread,
and an error when the interpreter is already on its way out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def integers(values: Ints, missing: Flags | None = None, arrow_type: pa.DataType | None = None) -> pa.Array:
    """[n] int64 as an Arrow array of `arrow_type` (int64 when None, or any 64-bit type); null where `missing`."""
    arrow_type = pa.int64() if arrow_type is None else arrow_type
    data = pa.py_buffer(np.ascontiguousarray(values, dtype=np.int64))
    return pa.Array.from_buffers(arrow_type, len(values), [_validity(missing), data])


def words(array: pa.Array, null: int) -> Ints:
    """[n] int64 of an Arrow array of integers, times or booleans; `null` where it is null."""
    if array.type != pa.int64():
        array = array.cast(pa.int64())
    count, offset = len(array), array.offset
    if not count:
        return np.empty(0, dtype=np.int64)
    validity, data = array.buffers()
    values: Ints = np.frombuffer(data, dtype=np.int64)[offset : offset + count]
    if not array.null_count:
        return values
    valid = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), count=offset + count, bitorder="little")[offset:]
    return np.where(valid == 1, values, null)


def flags(values: Flags, missing: Flags | None = None) -> pa.Array:
    """[n] booleans; null where `missing`."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [_validity(missing), _bits(values)])


def strings(values: Sequence[str | None]) -> pa.Array:
    """[n] strings; None is null."""
    texts = [b"" if value is None else value.encode("utf-8", "replace") for value in values]
    offsets = np.zeros(len(texts) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    missing = np.array([value is None for value in values], dtype=np.bool_)
    buffers = [_validity(missing), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def named(names: Sequence[str], values: Ints, *, other: str | None = None) -> pa.Array:
    """[n] numbers as names; a number without a name is `other`, or null when that is None."""
    known = (values >= 0) & (values < len(names))
    index = np.where(known, values, len(names))
    if other is not None:
        return strings([*names, other]).take(integers(index))
    return strings([*names, None]).take(integers(index))


def _validity(missing: Flags | None) -> pa.Buffer | None:
    return None if missing is None or not missing.any() else _bits(~missing)


def _bits(values: Flags) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
