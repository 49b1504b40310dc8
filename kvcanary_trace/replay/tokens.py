"""Token ids of requests whose text nobody published: equal block hashes give equal tokens, anything else is private.

Ids lie in [1, 2^31): far past any real vocabulary, so that two different blocks share no token by chance.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .workloads import Request

__all__ = ["request_tokens"]

_BLOCK_SALT: Final = np.uint64(0x9E3779B97F4A7C15)
_OWN_SALT: Final = np.uint64(0xD1B54A32D192ED03)


def request_tokens(request: Request, number: int) -> npt.NDArray[np.int32]:
    """[input_len + output_len] int32: prompt and generated tokens of request `number`, the same at every call."""
    tokens = np.empty(request.total_len, np.int32)
    hashed = min(len(request.block_hashes) * request.block_size, request.input_len)
    if hashed:
        offset = np.arange(hashed, dtype=np.uint64)
        block = offset // np.uint64(request.block_size)
        hashes = request.block_hashes.astype(np.uint64)[block.astype(np.intp)]
        tokens[:hashed] = _ids(_mixed(hashes * _BLOCK_SALT + _BLOCK_SALT) ^ (offset % np.uint64(request.block_size)))
    own = np.arange(hashed, request.total_len, dtype=np.uint64)
    seed = _mixed(np.array([number], np.uint64) * _OWN_SALT + _OWN_SALT)
    tokens[hashed:] = _ids(seed ^ own)
    return tokens


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijective mixer on 64-bit words."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(32))
    return mixed


def _ids(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    ids: npt.NDArray[np.int32] = (_mixed(x) >> np.uint64(33)).clip(1).astype(np.int32)
    return ids
