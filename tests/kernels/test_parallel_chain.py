"""The parallel chain: one hash in every form, the serial faults found, and a buffer of the other chain told once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from strategies import SEEDS, Draw, WriteCase, assert_same_words, clean_buffer, clone, verify_plan_of, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels import FailReason, VerifyOrWriteContext, hashing, parallel_chain
from kvcanary_trace.kernels.layout import CHAIN_NAMES, SlotField, ViolationField
from kvcanary_trace.kernels.torch_backend import host_parallel, tensor_chain

Entry = tuple[int, int, int, int]
OTHER = {"serial": "parallel", "parallel": "serial"}


def verified(context: VerifyOrWriteContext, entries: list[Entry]) -> list[tuple[int, FailReason]]:
    """(slot, reasons) of every violation that a launch reports."""
    context = replace(clone(context), violation_ring=torch.zeros(len(entries) + 4, 8, dtype=torch.int64))
    kernels.launch_canary_verify_kernel(
        context=context, plan=verify_plan_of(Draw(0, "cpu"), entries), check_verify_expected_token=True
    )
    rows = context.violation_ring[: int(context.violation_write_index)].tolist()
    return [(row[ViolationField.SLOT], FailReason(row[ViolationField.FAIL_REASON])) for row in rows]


def chained_buffer(chain: str, length: int = 40) -> tuple[VerifyOrWriteContext, list[Entry]]:
    """A buffer without sources that one launch filled with three chains, and its entries."""
    seed = next(
        seed
        for seed in range(900)
        if len(clean_buffer(seed, kernels.launch_canary_write_kernel, many=True)[2]) >= length
        and write_case(seed, many=True).context.real_kv_hash_mode == 0
    )
    _, context, entries = clean_buffer(seed, kernels.launch_canary_write_kernel, many=True, chain=chain)  # type: ignore[arg-type]
    return context, entries


# --- one hash, in every form ----------------------------------------------------------------------------------------


def test_the_anchors_differ() -> None:
    """Neither chain takes the other's heads for its own."""
    assert parallel_chain.PARALLEL_ANCHOR_HASH == oracle.splitmix64(oracle.PARALLEL_ANCHOR) != hashing.ANCHOR_HASH


@settings(max_examples=100, deadline=None)
@given(a=SEEDS, b=SEEDS, c=SEEDS)
def test_steps_agree(a: int, b: int, c: int) -> None:
    """Python integers, numpy's words, torch's, and the oracle's."""
    words = [oracle.splitmix64(x + 1) for x in (a, b, c)]
    want = oracle.parallel_step(*words)
    assert parallel_chain.step_int(words[0], *(oracle.int64(word) for word in words[1:])) == want
    tensors = [torch.tensor([oracle.int64(word)]) for word in words]
    assert parallel_chain.step_tensor(*tensors).item() == oracle.int64(want)
    record = np.zeros((1, 4), dtype=np.uint64)
    record[0, [SlotField.PREV_HASH, SlotField.TOKEN, SlotField.POSITION]] = np.array(words, dtype=np.uint64)
    out = np.empty(1, dtype=np.uint64)
    host_parallel.successors(record, out, out.copy())
    assert int(out[0]) == want


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 66, 127, 1000, 4097, 20_011])
@pytest.mark.parametrize("num_reqs", [1, 3])
def test_a_scan_is_a_walk(count: int, num_reqs: int) -> None:
    """Both paths of the torch backend store what a walk stores, around every size where they work differently."""
    rng = np.random.default_rng(count)
    counts = np.array([count] + [max(1, count // (3 + req)) for req in range(num_reqs - 1)])
    offsets = counts.cumsum() - counts
    seeds, tokens, positions = (
        rng.integers(0, 2**64, size=size, dtype=np.uint64) for size in (num_reqs, counts.sum(), counts.sum())
    )
    want = []
    for seed, first, length in zip(seeds.tolist(), offsets.tolist(), counts.tolist(), strict=True):
        value = seed
        for at in range(first, first + length):
            want.append(value)
            value = parallel_chain.step_int(value, int(tokens[at]), int(positions[at]))
    out = np.empty_like(tokens)
    host_parallel.chain_hashes(seeds, counts, offsets, tokens, positions, out)
    assert out.tolist() == want
    steps = np.arange(len(out)) - offsets.repeat(counts)
    columns = (steps, seeds.repeat(counts), tokens, positions)
    got = tensor_chain.chain_hashes(*(torch.from_numpy(column.view(np.int64)) for column in columns), parallel=True)
    assert got.numpy().view(np.uint64).tolist() == want


def test_no_record_is_a_fixed_point() -> None:
    """Token 0 at position 0, where the mixer alone would give 0 for ever."""
    assert parallel_chain.step_int(0, 0, 0) != 0
    assert len({parallel_chain.step_int(0, 0, position) for position in range(1000)}) == 1000


# --- contexts -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_path")
def test_a_context_declares_its_chain() -> None:
    """Serial unless said; a context that knows no chain is SGLang's, and serial; another word is refused."""
    case = write_case(3, many=True)
    serial = case.run(kernels.launch_canary_write_kernel)
    assert case.context.chain == "serial"

    class Theirs:
        def __init__(self, context: VerifyOrWriteContext) -> None:
            for name in type(context).__slots__:
                if name != "chain":
                    setattr(self, name, getattr(context, name))

    theirs = Theirs(clone(case.context))
    kernels.launch_canary_write_kernel(context=theirs, plan=case.plan, **case.inputs)  # type: ignore[arg-type]
    assert torch.equal(theirs.canary_buf, serial.canary_buf)  # type: ignore[attr-defined]
    ours = WriteCase(replace(clone(case.context), chain="parallel"), case.plan, case.inputs, serial=False)
    assert not torch.equal(ours.run(kernels.launch_canary_write_kernel).canary_buf, serial.canary_buf)
    before = clone(case.context)
    wrong = replace(case.context, chain="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kv-canary: chain must be 'serial' or 'parallel', got 'tree'"):
        kernels.launch_canary_write_kernel(context=wrong, plan=case.plan, **case.inputs)
    with pytest.raises(ValueError, match="chain must be 'serial' or 'parallel', got 'tree'"):
        verified(wrong, [(1, -1, 0, -1)])
    assert_same_words(case.context, before)


# --- faults ---------------------------------------------------------------------------------------------------------


def _wrong_predecessor(words: torch.Tensor, entries: list[Entry], at: int) -> list[Entry]:
    slot, token, position, _ = entries[at]
    return [*entries[:at], (slot, token, position, entries[at + 5][0]), *entries[at + 1 :]]


def _flip(field: SlotField) -> Callable[[torch.Tensor, list[Entry], int], list[Entry]]:
    def fault(words: torch.Tensor, entries: list[Entry], at: int) -> list[Entry]:
        words[entries[at - 1][0], field] += 1
        return entries[: at - 1] + entries[at:]  # the record itself is not looked at, only its successor

    return fault


def _swapped_records(words: torch.Tensor, entries: list[Entry], at: int) -> list[Entry]:
    first, second = entries[at][0], entries[at + 1][0]
    words[[first, second]] = words[[second, first]]
    return entries


FAULTS: dict[str, tuple[Callable[[torch.Tensor, list[Entry], int], list[Entry]], int]] = {
    "another predecessor": (_wrong_predecessor, 0),
    "the predecessor's token changed": (_flip(SlotField.TOKEN), -1),
    "the predecessor's position changed": (_flip(SlotField.POSITION), -1),
    "neighbouring records swapped": (_swapped_records, 0),
}


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("chain", CHAIN_NAMES)
@pytest.mark.parametrize(("fault", "shift"), FAULTS.values(), ids=FAULTS)
def test_faults_break_either_chain(chain: str, fault: Any, shift: int) -> None:
    """Wrong predecessor, token, position and order: a chain-hash mismatch at the slot behind the fault."""
    context, entries = chained_buffer(chain)
    assert verified(context, entries) == []
    at = next(at for at in range(3, len(entries) - 6) if all(entries[k][3] == entries[k - 1][0] for k in (at, at + 1)))
    slot = entries[at][0]
    spoilt = fault(context.canary_buf.view(torch.int64), list(entries), at)
    found = dict(verified(context, spoilt))
    assert FailReason.VERIFY_CHAIN_HASH_MISMATCH in found[slot]
    assert not any(FailReason.VERIFY_WRONG_CHAIN in reasons for reasons in found.values())


# --- the other chain's buffer ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_a_buffer_of_the_other_chain_is_told_once(chain: str) -> None:
    """One row, by the first record that has a predecessor to follow, in each launch anew."""
    context, entries = chained_buffer(chain)
    read = replace(context, chain=OTHER[chain])  # type: ignore[arg-type]
    entries = [(0, -1, 0, -1), *entries]
    first = next(slot for slot, _, _, prev in entries if slot != 0 and prev != 0)
    for _ in range(2):
        assert verified(read, entries) == [(first, FailReason.VERIFY_WRONG_CHAIN)]
    assert verified(context, entries) == []


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_a_plan_without_heads_tells_it_too(chain: str) -> None:
    """A sliding window's entries begin in the middle of a chain: their predecessors say which."""
    context, entries = chained_buffer(chain)
    inner = [entry for entry in entries if entry[3] > 0]
    read = replace(context, chain=OTHER[chain])  # type: ignore[arg-type]
    assert verified(read, inner) == [(inner[0][0], FailReason.VERIFY_WRONG_CHAIN)]


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_faults_in_a_buffer_of_the_other_chain_are_still_told(chain: str) -> None:
    """Positions, and records that follow neither chain, have their rows; the other chain's comes last."""
    context, entries = chained_buffer(chain)
    inner = [entry for entry in entries if entry[3] > 0]
    read = replace(context, chain=OTHER[chain])  # type: ignore[arg-type]
    told = (inner[0][0], FailReason.VERIFY_WRONG_CHAIN)
    for at in (0, 4):
        slot, token, position, prev = inner[at]
        moved = [*inner[:at], (slot, token, position - 1, prev), *inner[at + 1 :]]
        assert verified(read, moved) == [(slot, FailReason.VERIFY_POSITION_MISMATCH), told]
    context.canary_buf.view(torch.int64)[slot, SlotField.PREV_HASH] ^= 1
    found = verified(read, inner)
    assert (slot, FailReason.VERIFY_CHAIN_HASH_MISMATCH) in found
    assert sum(FailReason.VERIFY_WRONG_CHAIN in reasons for _, reasons in found) == 1


@pytest.mark.usefixtures("torch_path")
def test_a_chain_that_goes_on_under_the_other_is_told_once() -> None:
    """Half a buffer written before the declaration changed."""
    context, entries = chained_buffer("serial")
    inner = [entry for entry in entries if entry[3] > 0]
    words = context.canary_buf.view(torch.int64)
    for slot, _, _, prev in inner[len(inner) // 2 :]:
        words[slot, SlotField.PREV_HASH] = oracle.int64(oracle.successor(words, prev, True))
    assert verified(replace(context, chain="parallel"), inner) == [(inner[0][0], FailReason.VERIFY_WRONG_CHAIN)]
    late = next(slot for slot, _, _, prev in inner[len(inner) // 2 :])
    assert verified(context, inner)[0] == (late, FailReason.VERIFY_WRONG_CHAIN)


def test_many_wrong_chunks_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host checks in chunks: only the first one reports."""
    from kvcanary_trace.kernels.torch_backend import host_verify

    monkeypatch.setattr(host_verify, "CHUNK", 5)
    monkeypatch.setattr(host_verify, "_GATHER_MAX_ENTRIES", 2)
    context, entries = chained_buffer("parallel")
    assert len(verified(replace(context, chain="serial"), entries)) == 1
