"""Hash chains on the host: serial along a request, side by side across requests."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..hashing import absorb, chain_hash, splitmix64_
from ..layout import SlotField
from .host_arrays import I64, U64

_LOCKSTEP_MIN_REQS: Final = 14
"""Requests from which one numpy step (about 12 µs) beats a Python loop (about 0.9 µs a token)."""


def successors(records: U64, out: U64, tmp: U64) -> None:
    """What the slot after each record stores as its chain hash.

    Args:
        records: [n, >= 4] words of `SlotField`.
        out: [n] uint64, out.
        tmp: [n] uint64, scratch.
    """
    np.copyto(out, records[:, SlotField.PREV_HASH])
    splitmix64_(out, tmp)
    absorb(out, records[:, SlotField.TOKEN], tmp)
    absorb(out, records[:, SlotField.POSITION], tmp)


def chain_hashes(seeds: U64, counts: I64, offsets: I64, tokens: U64, positions: U64, out: U64) -> None:
    """Walk every request's chain.

    Args:
        seeds: [num_reqs] uint64, hash that a request's first token stores.
        counts: [num_reqs] int64, tokens per request, at least 1.
        offsets: [num_reqs] int64, a request's first token.
        tokens: [num_tokens] uint64, token ids.
        positions: [num_tokens] uint64.
        out: [num_tokens] uint64. Out, the hash that each token stores.
    """
    longest = int(counts.max())
    if longest == 1:
        out[offsets] = seeds
    elif len(counts) < _LOCKSTEP_MIN_REQS:
        for seed, count, first in zip(seeds.tolist(), counts.tolist(), offsets.tolist(), strict=True):
            _walk(seed, first, first + count, tokens, positions, out)
    else:
        _lockstep(seeds, counts, offsets, tokens, positions, out)


def _walk(seed: int, first: int, last: int, tokens: U64, positions: U64, out: U64) -> None:
    hashes: list[int] = []
    chain_hash(seed, tokens[first:last].tolist(), positions[first:last].tolist(), hashes)
    out[first:last] = hashes


def _lockstep(seeds: U64, counts: I64, offsets: I64, tokens: U64, positions: U64, out: U64) -> None:
    """One step of all requests at a time, longest first, so that those still going are always the first ones."""
    order = np.argsort(-counts, kind="stable")
    seeds, counts, offsets = seeds[order], counts[order], offsets[order]
    # Where the vectors get too short to pay, requests are finished one by one.
    steps = int(counts[_LOCKSTEP_MIN_REQS - 1])
    together = np.minimum(counts, steps)
    live = np.searchsorted(-together, -np.arange(steps), side="left")  # requests with more than that many tokens
    starts = np.concatenate(([0], np.cumsum(live)))
    rank = np.repeat(np.arange(len(counts)), together)
    step = np.arange(len(rank)) - np.repeat(np.cumsum(together) - together, together)
    source = step + offsets[rank]
    place = starts[step] + rank  # tokens by step, then by rank: every step is one slice
    tokens_by_step, positions_by_step, hashes = (np.empty(len(rank), dtype=np.uint64) for _ in range(3))
    tokens_by_step[place] = tokens[source]
    positions_by_step[place] = positions[source]

    num_live = live.tolist()
    hashes[: num_live[0]] = seeds
    begin, tmp = 0, np.empty(len(counts), dtype=np.uint64)
    for now, following in zip(num_live, [*num_live[1:], 0], strict=True):
        nxt = begin + now
        if not following:
            break
        x = hashes[nxt : nxt + following]
        x[:] = hashes[begin : begin + following]
        _advance(x, tokens_by_step[begin : begin + following], positions_by_step[begin : begin + following], tmp)
        begin = nxt
    out[source] = hashes[place]

    for i in np.flatnonzero(counts > steps).tolist():
        first, last = int(offsets[i]), int(offsets[i] + counts[i])
        _walk(int(out[first + steps - 1]), first + steps - 1, last, tokens, positions, out)


def _advance(x: U64, tokens: U64, positions: U64, tmp: U64) -> None:
    tmp = tmp[: len(x)]
    splitmix64_(x, tmp)
    absorb(x, tokens, tmp)
    absorb(x, positions, tmp)
