"""The parallel chain on the host: maps of all records at once, then a scan in square blocks."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..layout import SlotField
from ..parallel_chain import maps_, scan_int
from .host_arrays import I64, U64

_LIST_MAX_MAPS: Final = 64
"""Up to here Python integers (about 0.2 µs a map) beat numpy's cost per step (about 6 µs)."""


def successors(records: U64, out: U64, tmp: U64) -> None:
    """What the record after each stores as its chain hash; as `host_chain.successors`."""
    multipliers = np.empty_like(out)
    maps_(records[:, SlotField.TOKEN], records[:, SlotField.POSITION], multipliers, out, tmp)
    np.multiply(multipliers, records[:, SlotField.PREV_HASH], multipliers)
    np.add(out, multipliers, out)


def chain_hashes(seeds: U64, counts: I64, offsets: I64, tokens: U64, positions: U64, out: U64) -> None:
    """What every token of every request stores; as `host_chain.chain_hashes`, requests lying one after another.

    Token i is the map of the record before it, and a request's first token the constant map to its seed. So one scan
    over the batch does all chains: nothing of an earlier request gets past a constant.
    """
    multipliers, tmp = np.empty_like(out), np.empty_like(out)
    maps_(tokens[:-1], positions[:-1], multipliers[1:], out[1:], tmp[1:])
    multipliers[offsets] = 0
    out[offsets] = seeds
    _scan(multipliers, out)


def _scan(multipliers: U64, addends: U64) -> None:
    """Turn `addends` into what each map gives after all before it, from 0 on. `multipliers` is used up.

    Rows of a square walk side by side, their ends are scanned alike, and what comes before a row is then put in front.
    """
    num_maps = len(addends)
    if num_maps <= _LIST_MAX_MAPS:
        addends[:] = scan_int(multipliers.tolist(), addends.tolist())
        return
    width = int(np.sqrt(num_maps) / 2)
    rows = num_maps // width
    square = rows * width
    # One row of the transposed square is one step of every walk, in one piece.
    mul = np.ascontiguousarray(multipliers[:square].reshape(rows, width).T)
    add = np.ascontiguousarray(addends[:square].reshape(rows, width).T)
    tmp = np.empty(rows, dtype=np.uint64)
    for step in range(1, width):
        np.multiply(mul[step], add[step - 1], tmp)
        np.add(add[step], tmp, add[step])
        np.multiply(mul[step], mul[step - 1], mul[step])
    ends = add[-1].copy()
    _scan(mul[-1].copy(), ends)
    add[:, 1:] += mul[:, 1:] * ends[:-1]
    addends[:square] = add.T.reshape(-1)
    last = slice(square - 1, num_maps)  # what is left is less than a row
    addends[last] = scan_int([0, *multipliers[square:].tolist()], addends[last].tolist())
