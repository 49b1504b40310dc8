"""How many bits of the parallel chain survive a fault, counted; and how many of a plain affine map do, to see it fail.

The chain is arithmetic modulo 2**64 without right shifts, so the lowest `w` bits of a hash are the same chain modulo
2**w: a model that is small enough to collide. If two orders agree in `w` bits with probability p, then w + log2(p) bits
are lost, and what a whole hash loses is what any model loses. `docs/parallel-chain.md` has the proofs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcanary_trace.kernels.parallel_chain import maps_, scan_int

Words = np.ndarray[Any, np.dtype[np.uint64]]
Maps = tuple[Words, Words]
Definition = Callable[[Words, Words], Maps]

WORD_BITS, BAR_REORDERED_BITS = 64, 48
FARTHEST_SWAP = 16  # records as far apart as 2**16 change places
LENGTH = 2 ** (FARTHEST_SWAP + 2)
MIN_COUNT = 64  # a collision rate is believed from so many on


def ours(tokens: Words, positions: Words) -> Maps:
    multipliers, addends, tmp = (np.empty_like(tokens) for _ in range(3))
    maps_(tokens, positions, multipliers, addends, tmp)
    return multipliers, addends


def plain(tokens: Words, positions: Words) -> Maps:
    """The same addends under one multiplier for all records: what the chain must not be."""
    return np.full_like(tokens, 0xD1342543DE82EF95), ours(tokens, positions)[1]


def same_multiplier_for_a_token(tokens: Words, positions: Words) -> Maps:
    """A multiplier that knows the token and not the position: a run of one token is a plain affine map again."""
    return ours(tokens, np.zeros_like(positions))[0], ours(tokens, positions)[1]


def after(first: Maps, second: Maps) -> Maps:
    """`first`, then `second`."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def cut(maps: Maps, begin: int, length: int) -> Maps:
    return maps[0][begin : begin + length], maps[1][begin : begin + length]


def lost_bits(differences: Words) -> float:
    """The largest w + log2(share of differences that are 0 modulo 2**w), over the w that enough of them reach."""
    low = differences & (~differences + np.uint64(1))  # the lowest bit that is set
    low[low == 0] = np.uint64(1) << np.uint64(63)
    bits = np.log2(low.astype(np.float64)).astype(int)
    counts = np.bincount(bits, minlength=WORD_BITS)[::-1].cumsum()[::-1]
    return max(
        (w + float(np.log2(count / len(bits))) for w, count in enumerate(counts.tolist()) if count >= MIN_COUNT),
        default=0.0,
    )


def records(kind: str) -> tuple[Words, Words]:
    """Tokens and positions of a long chain: structured inputs are the ones that weak mixing would show on."""
    positions = np.arange(LENGTH, dtype=np.uint64)
    rng = np.random.default_rng(5)
    tokens = {
        "random tokens": rng.integers(0, 150_000, LENGTH, dtype=np.uint64),
        "one token": np.zeros(LENGTH, dtype=np.uint64),
        "two tokens": positions & np.uint64(1),
        "counting": positions,
    }[kind]
    return tokens, positions


def swap_losses(maps: Maps, start: int) -> list[float]:
    """For each k, bits lost when two records 2**k apart change places, over all places in the chain."""
    between = np.ones(LENGTH, dtype=np.uint64), np.zeros(LENGTH, dtype=np.uint64)  # of 2**k - 1 records
    power, losses = maps, []  # of 2**k records
    for k in range(FARTHEST_SWAP + 1):
        count = LENGTH - 2 ** (k + 1)
        x, y = cut(maps, 0, count), cut(maps, 2**k, count)
        middle = cut(between, 1, count)
        results = []
        for first, last in ((x, y), (y, x)):
            multiplier, addend = after(after(first, middle), last)
            results.append(multiplier * np.uint64(start) + addend)
        losses.append(lost_bits(results[0] - results[1]))
        between = after(cut(between, 0, count), cut(power, 2**k - 1, count))
        power = after(cut(power, 0, count), cut(power, 2**k, count))
    return losses


# --- reorderings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random tokens", "one token", "two tokens", "counting"])
def test_a_swap_at_any_distance_loses_two_bits(kind: str) -> None:
    """The bar is 16 bits lost; the bound log2(3) = 1.6, whatever the distance."""
    losses = swap_losses(ours(*records(kind)), start=0x123456789ABCDEF)
    assert max(losses) < 2.5 < WORD_BITS - BAR_REORDERED_BITS, losses


def test_one_multiplier_for_all_fails() -> None:
    """Two bits and one more per doubling: below 48 bits from swaps 2**15 apart on."""
    losses = swap_losses(plain(*records("random tokens")), start=1)
    assert all(loss >= k + 2 for k, loss in enumerate(losses)), losses
    assert WORD_BITS - losses[15] < BAR_REORDERED_BITS


def test_one_multiplier_for_a_token_fails_on_a_run() -> None:
    """It holds where tokens differ, and is the plain map where they do not."""
    assert max(swap_losses(same_multiplier_for_a_token(*records("random tokens")), start=1)) < 3.5
    assert WORD_BITS - swap_losses(same_multiplier_for_a_token(*records("one token")), start=1)[15] < BAR_REORDERED_BITS


@pytest.mark.parametrize("bits", [16, 20, 24])
def test_birthdays_among_reorderings(bits: int) -> None:
    """Random orders of one sequence: pairs that agree in the lowest bits are few times what chance would give."""
    rng = np.random.default_rng(bits)
    length, orders = 48, 2**14
    tokens, positions = rng.integers(0, 150_000, length, dtype=np.uint64), np.arange(length, dtype=np.uint64)
    multipliers, addends = ours(tokens, positions)
    order = rng.permuted(np.tile(np.arange(length), (orders, 1)), axis=1)
    value = np.full(orders, 7, dtype=np.uint64)
    for step in order.T:
        value = multipliers[step] * value + addends[step]
    _, counts = np.unique(value & np.uint64(2**bits - 1), return_counts=True)
    pairs = int((counts * (counts - 1) // 2).sum())
    assert pairs / (orders * (orders - 1) / 2) < 4 * 2.0**-bits + 12 / orders**2, pairs
    assert len(np.unique(value)) == orders


# --- everything else ------------------------------------------------------------------------------------------------


def _faults() -> dict[str, Callable[[Maps, Words, Words, np.random.Generator], tuple[Maps, Maps]]]:
    def token(maps: Maps, tokens: Words, positions: Words, rng: np.random.Generator) -> tuple[Maps, Maps]:
        return maps, ours(tokens + rng.integers(1, 9, LENGTH, dtype=np.uint64), positions)

    def position(maps: Maps, tokens: Words, positions: Words, rng: np.random.Generator) -> tuple[Maps, Maps]:
        return maps, ours(tokens, positions + rng.integers(1, 9, LENGTH, dtype=np.uint64))

    def dropped(maps: Maps, tokens: Words, positions: Words, rng: np.random.Generator) -> tuple[Maps, Maps]:
        return maps, (np.ones(LENGTH, dtype=np.uint64), np.zeros(LENGTH, dtype=np.uint64))

    def repeated(maps: Maps, tokens: Words, positions: Words, rng: np.random.Generator) -> tuple[Maps, Maps]:
        return maps, after(maps, maps)

    def tokens_swapped(maps: Maps, tokens: Words, positions: Words, rng: np.random.Generator) -> tuple[Maps, Maps]:
        other = np.where(tokens[1:] == tokens[:-1], tokens[1:] + np.uint64(1), tokens[1:])
        first, second = tokens[:-1], other
        right = after(ours(first, positions[:-1]), ours(second, positions[1:]))
        return right, after(ours(second, positions[:-1]), ours(first, positions[1:]))

    return {
        "another token": token,
        "another position": position,
        "a record dropped": dropped,
        "a record repeated": repeated,
        "neighbours' tokens swapped": tokens_swapped,
    }


@pytest.mark.parametrize("kind", ["random tokens", "one token"])
@pytest.mark.parametrize("fault", _faults().values(), ids=_faults())
def test_other_faults_lose_nothing(fault: Any, kind: str) -> None:
    """A record that occurs on one side alone: every model of w bits collides with probability 2**-w."""
    tokens, positions = records(kind)
    rng = np.random.default_rng(9)
    start = rng.integers(0, 2**64, LENGTH, dtype=np.uint64)
    right, wrong = fault(ours(tokens, positions), tokens, positions, rng)
    start = start[: len(right[0])]
    differences = (right[0] * start + right[1]) - (wrong[0] * start + wrong[1])
    assert lost_bits(differences) < 0.5
    assert not (differences == 0).any()


def test_another_predecessor_loses_nothing() -> None:
    """The hash after a record of another request, as verify would meet it: other prefix, token and position."""
    tokens, positions = records("random tokens")
    multipliers, addends = ours(tokens, positions)
    value = np.array(scan_int(multipliers[:70_000].tolist(), addends[:70_000].tolist()), dtype=np.uint64)
    assert lost_bits(value[1:] - value[:-1]) < 0.5
    assert lost_bits(value[4097:] - value[:-4097]) < 0.5
    assert len(np.unique(value)) == len(value)


def test_known_weakness_of_even_repetition() -> None:
    """One and the same record 2**k times over, or not at all: k - 1 bits go, and six more at the worst. Documented."""
    maps = ours(*records("random tokens"))
    power, losses = maps, []
    for _ in range(6):
        power = after(power, power)
        losses.append(lost_bits(power[0] * np.uint64(3) + power[1] - np.uint64(3)))
    assert all(k <= loss < k + 8 for k, loss in enumerate(losses, 1)), losses
