"""Seeded cases for plan, verify and write, for every backend and for the peer; and their hypothesis strategies.

A case is a function of its seed alone. Tensors are made on the device that is asked for; outputs start poisoned, and
buffers stand between guard rows, so that a word that a kernel forgot, or should not have touched, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvcanary_trace.kernels import RealKvHashMode, RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan
from kvcanary_trace.kernels.layout import CanaryLaunchTag, ChainName

POISON = -0x5A5A5A5A5A5A5A5B
POISON_32 = -0x5A5A5A5B
POISON_BYTE = 0xA5

Make = TypeVar("Make")


def clone(value: Any) -> Any:
    """A deep copy of plans, contexts and tensors; strided views keep their strides."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return value  # sources: nothing writes to them
    if isinstance(value, VerifyPlan | WritePlan | VerifyOrWriteContext):
        parts = {name: clone(getattr(value, name)) for name in type(value).__slots__}
        return type(value)(**parts)
    return value


def words(value: Any) -> dict[str, Tensor]:
    """Every tensor of a plan or a context, on the CPU, by name."""
    names = type(value).__slots__
    return {name: getattr(value, name).cpu() for name in names if isinstance(getattr(value, name), Tensor)}


def assert_same_words(got: Any, want: Any, *, label: str = "", unordered_ring: bool = False) -> None:
    """Two plans or two contexts agree in every word. `unordered_ring`: violation rows as a multiset."""
    got_words, want_words = words(got), words(want)
    assert got_words.keys() == want_words.keys()
    for name, wanted in want_words.items():
        given = got_words[name]
        if name == "violation_ring" and unordered_ring:
            given, wanted = (torch.tensor(sorted(ring.tolist())) for ring in (given, wanted))
        assert torch.equal(given, wanted), f"{label} {name}: got {given.tolist()}, want {wanted.tolist()}"


class Draw:
    """Small conveniences over numpy's generator."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = torch.device(device)

    def int(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, *options: Any) -> Any:
        return options[self.int(0, len(options) - 1)]

    def ints(self, low: int, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(low, high + 1, size=shape, dtype=np.int64)

    def wild(self, *shape: int) -> np.ndarray:
        """Any int64 (but the very last, whose successor is none)."""
        return self.rng.integers(-(2**63), 2**63 - 1, size=shape, dtype=np.int64)

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(dtype).to(self.device)


# --- plan -----------------------------------------------------------------------------------------------------------


@dataclass
class PlanCase:
    """Arguments of one plan launch without its outputs, and the sizes of those."""

    inputs: dict[str, Any]
    write_req_capacity: int
    demand: int

    def outputs(self) -> tuple[VerifyPlan, WritePlan]:
        """Fresh, poisoned plans."""
        device = self.inputs["req_pool_indices"].device
        verify_plan = VerifyPlan.allocate(verify_capacity=self.inputs["verify_capacity"], device=device)
        write_plan = WritePlan.allocate(write_req_capacity=self.write_req_capacity, device=device)
        for plan in (verify_plan, write_plan):
            for name in type(plan).__slots__:
                tensor = getattr(plan, name)
                tensor.fill_(POISON if tensor.dtype == torch.int64 else POISON_32)
        return verify_plan, write_plan

    def run(self, launch: Callable[..., None], **more: Any) -> tuple[VerifyPlan, WritePlan]:
        """The plans that a launcher fills."""
        verify_plan, write_plan = self.outputs()
        launch(verify_plan_out=verify_plan, write_plan_out=write_plan, **self.inputs, **more)
        return verify_plan, write_plan


def plan_case(seed: int, *, device: torch.device | str = "cpu", out_of_map: bool = False) -> PlanCase:
    """A batch with padding rows, odd lengths, windows, maps, expected tokens and every kind of capacity.

    `out_of_map`: some slot of some entry lies outside the map.
    """
    draw = Draw(seed, device)
    max_reqs, width = draw.int(2, 9), draw.pick(1, 7, 33, 90)
    bs = draw.pick(0, 1, 2, draw.int(1, 12))
    num_slots = draw.int(2, 60)
    rows = draw.ints(1, max_reqs - 1, bs)
    rows[draw.rng.random(bs) < draw.pick(0, 0.3, 1.0 if draw.chance(0.2) else 0.0)] = 0
    prefix_lens = draw.ints(-2, width, bs)
    if draw.chance(0.2):
        prefix_lens[:] = width
    extend_lens = draw.ints(-2, draw.pick(1, 1, 30), bs)
    table = draw.ints(draw.pick(-1, 0), num_slots - 1, max_reqs, width)
    table[draw.rng.random(table.shape) < draw.pick(0, 0.1)] = 0
    window = draw.pick(-1, 0, 1, draw.int(1, width + 4))
    mapping = None
    if window > 0 or draw.chance(0.3) or out_of_map:
        mapping = draw.ints(draw.pick(-1, 0), num_slots, num_slots)
        mapping[-1] = -1
    starts = np.maximum(prefix_lens - window, 0) if window > 0 else np.zeros_like(prefix_lens)
    counts = np.where(rows != 0, np.maximum(prefix_lens - starts, 0), 0)
    if out_of_map:
        if not counts.any():
            return plan_case(seed + 1_000_003, device=device, out_of_map=True)
        req = int(draw.rng.choice(np.flatnonzero(counts)))
        table[rows[req], prefix_lens[req] - 1 - draw.int(0, int(counts[req]) - 1)] = num_slots + draw.int(0, 5)
    demand = int(counts.sum())
    capacity = draw.pick(max(demand, 1), demand + draw.int(1, 9), max(1, demand - 1), max(1, demand // 3), 1)
    pool = valid_lens = None
    if draw.chance(0.5):
        pool_width = draw.int(1, width + 3)
        pool = draw.tensor(draw.ints(-1, 2**31 - 1, max_reqs, pool_width), torch.int32)
        valid_lens = draw.tensor(draw.ints(-1, pool_width, bs))
    return PlanCase(
        inputs={
            "req_pool_indices": draw.tensor(rows),
            "prefix_lens": draw.tensor(prefix_lens),
            "extend_seq_lens": draw.tensor(extend_lens),
            "req_to_token": draw.tensor(table, torch.int32),
            "swa_window_size": window,
            "full_to_swa_index_mapping": None if mapping is None else draw.tensor(mapping),
            "verify_capacity": capacity,
            "req_to_verify_expected_tokens": pool,
            "req_to_verify_expected_tokens_valid_lens": valid_lens,
            "kv_token_id_vs_position_offset": draw.pick(-1, 0, 0, 1),
        },
        write_req_capacity=max(1, bs + draw.pick(0, 0, draw.int(1, 6))),
        demand=demand,
    )


# --- contexts -------------------------------------------------------------------------------------------------------

_DTYPES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random_source(draw: Draw, num_slots: int) -> RealKvSource:
    """A source of any dtype and page size, its rows packed, strided, wider than needed or all the same."""
    page_size = draw.pick(1, 1, 2, 3, 4, 16)
    token_bytes = 16 * draw.int(1, 5)
    read_bytes = 16 * draw.int(1, token_bytes // 16)
    rows = -(-num_slots // page_size)
    row_bytes = page_size * token_bytes
    trailing, gap = 16 * draw.pick(0, 0, 1, 3), 16 * draw.pick(0, 0, 2)
    data = draw.ints(0, 255, rows, row_bytes + trailing + gap).astype(np.uint8)
    data[draw.rng.random(rows) < 0.1] = 0
    dtype = draw.pick(*_DTYPES)
    tensor = torch.from_numpy(data).to(draw.device).view(dtype)
    tensor = tensor[:, : (row_bytes + trailing) // tensor.element_size()]
    if draw.chance(0.05):
        tensor = tensor[:1].expand(rows, -1)
    return RealKvSource(tensor=tensor, page_size=page_size, num_bytes_per_token=token_bytes, read_bytes=read_bytes)


def random_context(draw: Draw, num_slots: int, chain: ChainName = "serial") -> VerifyOrWriteContext:
    """A poisoned buffer, ring and counters; sources and mode as they come."""
    slot_bytes = draw.pick(32, 32, 32, 40, 64)
    ring_rows = draw.pick(0, 1, 3, 8, 64, 64)
    counter = draw.pick(0, 0, 0, draw.int(0, ring_rows + 2))
    guarded = draw.tensor(draw.wild(num_slots + 2, slot_bytes // 8)).view(torch.uint8)
    ring = draw.tensor(np.full((ring_rows + 2, 8), POISON))[1:-1]
    sources = tuple(random_source(draw, num_slots) for _ in range(draw.pick(0, 1, 1, 2, 3, 4)))
    return VerifyOrWriteContext(
        canary_buf=guarded[1:-1],
        kernel_kind=CanaryLaunchTag(draw.int(0, 11)),
        violation_ring=ring,
        violation_write_index=draw.tensor([counter], torch.int32),
        slot_run_counter=draw.tensor([draw.int(0, 2**40)]),
        kernel_run_counter=draw.tensor([draw.int(0, 2**40)]),
        real_kv_sources=sources,
        real_kv_hash_mode=RealKvHashMode(draw.pick(0, 1, 1, 2)),
        enable_chain_position_assert=draw.tensor([draw.pick(0, 1, 1)], torch.int32),
        chain=chain,
    )


# --- write ----------------------------------------------------------------------------------------------------------


@dataclass
class WriteCase:
    """Arguments of one write launch."""

    context: VerifyOrWriteContext
    plan: WritePlan
    inputs: dict[str, Any]
    serial: bool
    """Whether the result depends on the order of requests: a device races there."""
    slots: list[list[int]] = field(default_factory=list)

    def run(self, launch: Callable[..., None], **changed: Any) -> VerifyOrWriteContext:
        """The context after a launch on a copy of it."""
        context = clone(self.context)
        launch(**{"context": context, "plan": self.plan, **self.inputs, **changed})
        return context


def write_case(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    serial: bool = False,
    many: bool = False,
    chain: ChainName = "serial",
) -> WriteCase:
    """Chains with and without seeds, skipped tokens, wrong tokens and positions, short plans.

    Args:
        serial: Requests may share slots, or be seeded from slots that others store into.
        many: More requests than a dozen, of very different lengths.
        chain: What the context declares; the rest of the case is the same.
    """
    draw = Draw(seed, device)
    bs = draw.int(14, 40) if many else draw.pick(0, 1, 1, 2, draw.int(2, 8))
    longest = draw.pick(1, 1, 4, 40) if many else draw.pick(1, 3, 17)
    counts = draw.ints(0, longest, bs)
    if draw.chance(0.3):
        counts[:] = 1
    total = int(counts.sum())
    num_slots = total + bs + draw.int(3, 12)
    context = random_context(draw, num_slots, chain)
    free = draw.rng.permutation(np.arange(1, num_slots))
    slots = free[:total].copy()
    seeds = np.where(draw.rng.random(bs) < 0.3, -draw.int(1, 3), free[total : total + bs])
    if bs and draw.chance(0.3):
        seeds[draw.int(0, bs - 1)] = 0
    if serial and total:
        slots[draw.rng.random(total) < 0.3] = draw.pick(0, int(slots[0]))
        seeds = np.where(draw.rng.random(bs) < 0.6, slots[draw.ints(0, total - 1, bs)], seeds)
    slots[draw.rng.random(total) < draw.pick(0, 0, 0.2)] = -draw.int(1, 2)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    tail = draw.pick(0, 0, 4)
    ids = draw.ints(0, 2**17, total + tail) if draw.chance(0.8) else draw.wild(total + tail)
    positions = _positions(draw, context, counts, offsets, seeds, tail)
    wants = {"enable_write_input_assert": False, "expected_input_tokens": None, "expected_input_positions": None}
    if draw.chance(0.5):
        share = draw.pick(0, 0.1, 0.6)
        want_ids = np.where(draw.rng.random(len(ids)) < share, draw.ints(-1, 9, len(ids)), ids)
        want_positions = np.where(draw.rng.random(len(ids)) < share, draw.ints(-1, 9, len(ids)), positions)
        wants = {
            "enable_write_input_assert": True,
            "expected_input_tokens": draw.tensor(want_ids),
            "expected_input_positions": draw.tensor(want_positions),
        }
    spare = draw.pick(0, 0, 3) + (0 if bs else 1)
    plan = WritePlan(
        write_offsets=draw.tensor(np.concatenate((offsets, np.zeros(spare, dtype=np.int64)))),
        write_seed_slot_indices=draw.tensor(np.concatenate((seeds, np.full(spare, POISON)))),
        write_num_valid_reqs=draw.tensor([draw.pick(bs, bs, bs, draw.int(0, bs))], torch.int32),
    )
    loc = np.concatenate((slots, np.full(tail, draw.pick(0, -1), dtype=np.int64)))
    inputs = {
        "input_ids": draw.tensor(ids),
        "positions": draw.tensor(positions),
        "out_cache_loc": draw.tensor(loc),
        **wants,
    }
    per_req = [part.tolist() for part in np.split(slots, offsets[1:-1])] if bs else []
    return WriteCase(context, plan, inputs, serial=serial, slots=per_req)


def _positions(
    draw: Draw, context: VerifyOrWriteContext, counts: np.ndarray, offsets: np.ndarray, seeds: np.ndarray, tail: int
) -> np.ndarray:
    """Positions that mostly go on from the seeds' stored ones; the seeds' records are made to fit."""
    positions = draw.ints(0, 50, int(offsets[-1]) + tail)
    records = context.canary_buf.view(torch.int64)
    for req, (count, seed) in enumerate(zip(counts.tolist(), seeds.tolist(), strict=True)):
        first = draw.int(0, 1000)
        if seed >= 0:
            records[seed, 1] = first - draw.pick(1, 1, 1, 2)
        positions[offsets[req] : offsets[req] + count] = np.arange(first, first + count)
    noise = draw.rng.random(len(positions)) < draw.pick(0, 0, 0.15)
    return np.where(noise, draw.ints(-2, 60, len(positions)), positions)


# --- verify ---------------------------------------------------------------------------------------------------------


@dataclass
class VerifyCase:
    """Arguments of one verify launch."""

    context: VerifyOrWriteContext
    plan: VerifyPlan
    check_verify_expected_token: bool

    def run(self, launch: Callable[..., None], **changed: Any) -> VerifyOrWriteContext:
        """The context after a launch on a copy of it."""
        context = clone(self.context)
        arguments = {
            "context": context,
            "plan": self.plan,
            "check_verify_expected_token": self.check_verify_expected_token,
        }
        launch(**{**arguments, **changed})
        return context


def verify_plan_of(
    draw: Draw,
    columns: list[tuple[int, int, int, int]],
    *,
    spare: int = 0,
    num_valid: int | None = None,
    enable: int = 1,
) -> VerifyPlan:
    """A plan of (slot, token, position, previous slot) entries, followed by poison."""
    table = np.full((len(columns) + max(spare, 0 if columns else 1), 4), POISON, dtype=np.int64)
    if columns:
        table[: len(columns)] = columns
    slots, tokens, positions, prev_slots = (draw.tensor(table[:, i].copy()) for i in range(4))
    return VerifyPlan(
        verify_slot_indices=slots,
        verify_expected_tokens=tokens,
        verify_expected_positions=positions,
        verify_prev_slot_indices=prev_slots,
        verify_num_valid=draw.tensor([len(columns) if num_valid is None else num_valid], torch.int32),
        enable=draw.tensor([enable], torch.int32),
    )


def clean_buffer(
    seed: int,
    write: Callable[..., None],
    *,
    device: torch.device | str = "cpu",
    many: bool = False,
    chain: ChainName = "serial",
) -> tuple[Draw, VerifyOrWriteContext, list[tuple[int, int, int, int]]]:
    """A buffer that `write` filled with chains, and the entries that describe it: no violation until one is planted."""
    case = write_case(seed, device=device, many=many, chain=chain)
    context = case.run(write)
    draw = Draw(seed ^ 0x5EED, device)
    ids, positions = case.inputs["input_ids"].tolist(), case.inputs["positions"].tolist()
    entries, at = [], 0
    num_reqs = int(case.plan.write_num_valid_reqs[0])
    for req, slots in enumerate(case.slots):
        prev_slot = int(case.plan.write_seed_slot_indices[req])
        for slot in slots:
            if slot >= 0 and req < num_reqs:
                entries.append((slot, ids[at], positions[at], prev_slot))
                prev_slot = slot
            at += 1
    context.violation_write_index.zero_()
    context.violation_ring.fill_(POISON)
    return draw, context, entries


def verify_case(
    seed: int,
    write: Callable[..., None],
    *,
    device: torch.device | str = "cpu",
    many: bool = False,
    chain: ChainName = "serial",
) -> VerifyCase:
    """Entries of a written buffer, shuffled, repeated, spoilt, with dummy slots and unknown predecessors among them."""
    draw, context, entries = clean_buffer(seed, write, device=device, many=many, chain=chain)
    num_slots = context.canary_buf.shape[0]
    if draw.chance(0.3):
        draw.rng.shuffle(entries)
    spoil = draw.pick(0, 0.1, 0.5)
    columns = []
    for slot, token, position, prev_slot in entries:
        row = [slot, token, position, prev_slot]
        if draw.chance(spoil):
            place = draw.int(0, 3)
            row[place] = [draw.int(0, num_slots - 1), draw.pick(-1, 5), draw.int(-1, 50), draw.int(-3, num_slots - 1)][
                place
            ]
        columns.append(tuple(row))
    for _ in range(draw.pick(0, 0, 3)):
        filler = (
            draw.pick(0, draw.int(0, num_slots - 1)),
            -1,
            draw.int(0, 9),
            draw.pick(-1, 0, draw.int(0, num_slots - 1)),
        )
        columns.insert(draw.int(0, len(columns)), filler)
    if draw.chance(0.3):
        records = context.canary_buf.view(torch.int64)
        records[draw.int(0, num_slots - 1), draw.int(0, 3)] ^= 1 << draw.int(0, 62)
    num_valid = draw.pick(len(columns), len(columns), draw.int(0, len(columns)), len(columns) + 3)
    spare = draw.pick(0, 4)
    plan = verify_plan_of(
        draw,
        columns,
        spare=spare,
        num_valid=min(num_valid, len(columns)) if spare or not columns else num_valid,
        enable=draw.pick(1, 1, 1, 1, 0, 2),
    )
    counter = draw.pick(0, 0, draw.int(0, context.violation_ring.shape[0] + 2))
    context.violation_write_index.fill_(counter)
    return VerifyCase(context, plan, check_verify_expected_token=draw.chance(0.5))


SEEDS = st.integers(0, 2**32 - 1)
"""Hypothesis' way in: every case is a function of its seed."""
