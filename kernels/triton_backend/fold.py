"""Real-KV fingerprints: fold the bytes behind a block of slots, one lane a slot.

The fold of one source is serial in the words of a slot, so lanes are slots and the loop walks words. Sources start from
zero each and are combined at the end.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl

from ..layout import MAX_REAL_KV_SOURCES, PARTIAL_READ_BYTES, WORD_BYTES, RealKvHashMode
from .hashing import as_u64, splitmix64

if TYPE_CHECKING:
    from ..buffers import VerifyOrWriteContext


class FoldArgs(NamedTuple):
    """The sources of one context, flattened to kernel arguments.

    `sizes` holds (rows' stride in words, page size in slots, token stride in words, words to read) of each source, and
    `addresses` where each begins, padded to `MAX_REAL_KV_SOURCES`; `chunk` is the words of a slot that load together, a
    divisor of every source's words; `num_slots` is how many slots every source has bytes for.
    """

    num_sources: int
    paged: bool
    chunk: int
    num_slots: int
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]


MAX_CHUNK_WORDS: Final = 16
"""One line of 128 bytes."""

_NO_SOURCE: Final = (0, 1, 0, 0)
_NO_SOURCES: Final = FoldArgs(0, False, 2, 2**62, _NO_SOURCE * MAX_REAL_KV_SOURCES, (0,) * MAX_REAL_KV_SOURCES)

SOURCE_SIZES: Final = [
    f"{name}_{source}"
    for source in range(MAX_REAL_KV_SOURCES)
    for name in ("row_words", "page_size", "token_words", "num_words")
]
"""Names of the kernels' parameters for `FoldArgs.sizes`."""


def fold_args(context: VerifyOrWriteContext) -> FoldArgs:
    """Flatten a context's sources. Reads shapes and addresses only."""
    sources = context.real_kv_sources
    mode = context.real_kv_hash_mode
    if not sources or mode == RealKvHashMode.NONE:
        return _NO_SOURCES
    sizes: list[int] = []
    addresses: list[int] = []
    paged = False
    chunk = MAX_CHUNK_WORDS
    num_slots = 2**62
    for source in sources:
        tensor = source.tensor
        page_size = source.page_size
        paged = paged or page_size != 1
        num_slots = min(num_slots, tensor.shape[0] * page_size)
        read_bytes = PARTIAL_READ_BYTES if mode == RealKvHashMode.PARTIAL else source.read_bytes
        chunk = gcd(chunk, read_bytes // WORD_BYTES)
        addresses.append(tensor.data_ptr())
        sizes += (
            tensor.stride(0) * tensor.element_size() // WORD_BYTES,
            page_size,
            source.num_bytes_per_token // WORD_BYTES,
            read_bytes // WORD_BYTES,
        )
    missing = MAX_REAL_KV_SOURCES - len(sources)
    return FoldArgs(
        len(sources), paged, chunk, num_slots, (*sizes, *_NO_SOURCE * missing), (*addresses, *(0,) * missing)
    )


@triton.jit
def _halve(parts, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Split every [BLOCK, WIDTH] part in even and odd words. Parts stay ordered by their words' lowest bits."""
    evens = ()
    odds = ()
    for part in tl.static_range(len(parts)):
        even, odd = tl.split(tl.reshape(parts[part], [BLOCK, WIDTH // 2, 2]))
        evens = evens + (even,)  # noqa: RUF005
        odds = odds + (odd,)  # noqa: RUF005
    return evens + odds


@triton.jit
def _fold_words(acc, words, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Fold CHUNK words of each slot, in order.

    The words arrive as they were loaded, neighbours in neighbouring lanes. Splitting them down to columns hands every
    lane its own slot's words: one trip through shared memory, where loads by slot would touch 32 lines a warp.
    """
    parts = (words,)
    if CHUNK >= 16:
        parts = _halve(parts, BLOCK, 16)
    if CHUNK >= 8:
        parts = _halve(parts, BLOCK, 8)
    if CHUNK >= 4:
        parts = _halve(parts, BLOCK, 4)
    firsts = ()
    seconds = ()
    for part in tl.static_range(CHUNK // 2):
        first, second = tl.split(parts[part])
        firsts = firsts + (first,)  # noqa: RUF005
        seconds = seconds + (second,)  # noqa: RUF005
    for word in tl.static_range(CHUNK // 2):
        acc = splitmix64(acc ^ as_u64(firsts[word]))
    for word in tl.static_range(CHUNK // 2):
        acc = splitmix64(acc ^ as_u64(seconds[word]))
    return acc


@triton.jit
def _fold_source(
    slot,  # [BLOCK] int64, in range where `live`
    live,  # [BLOCK] bool
    address,  # of the source's first byte
    row_words,
    page_size,
    token_words,
    num_words,  # a multiple of CHUNK
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold the first `num_words` words of each slot in one source. Returns [BLOCK] uint64."""
    if PAGED:
        page = slot // page_size
        start = page * row_words + (slot - page * page_size) * token_words
    else:
        start = slot * row_words
    # Rows and tokens start at multiples of 16 bytes, so two words load as one.
    start = tl.multiple_of(start, 2)
    base_ptr = address.to(tl.int64).to(tl.pointer_type(tl.int64), bitcast=True)
    chunk_ptr = base_ptr + start[:, None] + tl.arange(0, CHUNK)[None, :]
    acc = tl.zeros([BLOCK], tl.uint64)
    words = tl.load(chunk_ptr, mask=live[:, None], other=0)
    for following in range(CHUNK, num_words, CHUNK):
        ahead = tl.load(chunk_ptr + following, mask=live[:, None], other=0)
        acc = _fold_words(acc, words, BLOCK, CHUNK)
        words = ahead
    return _fold_words(acc, words, BLOCK, CHUNK)


@triton.jit
def fold_sources(
    slot,
    live,
    row_words_0,
    page_size_0,
    token_words_0,
    num_words_0,
    row_words_1,
    page_size_1,
    token_words_1,
    num_words_1,
    row_words_2,
    page_size_2,
    token_words_2,
    num_words_2,
    row_words_3,
    page_size_3,
    token_words_3,
    num_words_3,
    address_0,
    address_1,
    address_2,
    address_3,
    NUM_SOURCES: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fingerprint of each live slot over all sources, in order. Returns [BLOCK] uint64, 0 without sources."""
    acc = tl.zeros([BLOCK], tl.uint64)
    if NUM_SOURCES >= 1:
        source_hash = _fold_source(
            slot, live, address_0, row_words_0, page_size_0, token_words_0, num_words_0, PAGED, CHUNK, BLOCK
        )
        acc = splitmix64(acc ^ source_hash)
    if NUM_SOURCES >= 2:
        source_hash = _fold_source(
            slot, live, address_1, row_words_1, page_size_1, token_words_1, num_words_1, PAGED, CHUNK, BLOCK
        )
        acc = splitmix64(acc ^ source_hash)
    if NUM_SOURCES >= 3:
        source_hash = _fold_source(
            slot, live, address_2, row_words_2, page_size_2, token_words_2, num_words_2, PAGED, CHUNK, BLOCK
        )
        acc = splitmix64(acc ^ source_hash)
    if NUM_SOURCES >= 4:
        source_hash = _fold_source(
            slot, live, address_3, row_words_3, page_size_3, token_words_3, num_words_3, PAGED, CHUNK, BLOCK
        )
        acc = splitmix64(acc ^ source_hash)
    return acc
