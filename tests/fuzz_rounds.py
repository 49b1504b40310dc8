"""Fuzzed rounds of plan, write and verify on the Triton backend, and how they differ from the torch backend's.

A round is two steps of a small engine: requests arrive and are written, then are verified and extended, in place. The
device's plans come from the device, and what a step leaves behind is what the next one reads. Outputs are poisoned
before each launch. A module of its own, so that processes of a pool can import it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from strategies import POISON, POISON_32, Draw, clone, random_context, words

from kvcanary_trace import kernels
from kvcanary_trace.kernels import VerifyOrWriteContext, VerifyPlan, WritePlan
from kvcanary_trace.kernels.backend import use_backend
from kvcanary_trace.kernels.layout import CHAIN_NAMES

RING_ROWS = 512
LAYOUTS = 6
"""Kinds of buffer and sources: each is a set of kernels to compile, so the rounds share a few."""
CONTEXT_WORDS = ("canary_buf", "violation_write_index", "slot_run_counter", "kernel_run_counter")


class Round:
    """A batch in its first two steps. The same seed gives the same round on any device."""

    def __init__(self, seed: int, device: str) -> None:
        self.draw = draw = Draw(seed, device)
        self.bs = draw.pick(1, 2, draw.int(1, 12), draw.int(13, 70))
        longest = draw.pick(1, 5, 40, 120) if self.bs < 13 else draw.pick(1, 20)
        self.prefix = draw.ints(0, longest, self.bs)
        self.extend = draw.ints(0, draw.pick(1, 1, longest), self.bs)
        lengths = self.prefix + self.extend
        width = int(lengths.max()) + 1
        total = int(lengths.sum())
        num_slots = total + draw.int(2, 40)
        slots = draw.rng.permutation(np.arange(1, num_slots))[:total]
        table = np.zeros((self.bs + 2, width), dtype=np.int64)
        self.rows = draw.rng.permutation(np.arange(1, self.bs + 1))
        for row, length, first in zip(self.rows, lengths, np.cumsum(lengths) - lengths, strict=True):
            table[row, :length] = slots[first : first + length]
        self.table = table
        self.window = draw.pick(0, 0, draw.int(1, longest + 2))
        # The mapping keeps slots apart: two requests that wrote one slot would race.
        self.mapping = np.arange(num_slots + 1) if self.window or draw.chance(0.3) else None
        if self.mapping is not None:
            self.mapping[1:-1] = draw.rng.permutation(self.mapping[1:-1])
            self.mapping[-1] = -1
        self.req_to_token = draw.tensor(table, torch.int32)
        self.tokens = draw.ints(0, 2**17, *table.shape)
        self.padding = draw.pick(0, 0, 5)
        self.spoil = draw.pick(0, 0, 1, 3)
        self.chain = draw.pick(*CHAIN_NAMES)
        ring = draw.tensor(np.full((RING_ROWS, 8), POISON))
        self.context = replace(
            random_context(Draw(seed % LAYOUTS, device), num_slots, self.chain),
            enable_chain_position_assert=draw.tensor([draw.pick(0, 1, 1)], torch.int32),
            violation_ring=ring,
            violation_write_index=draw.tensor([draw.pick(0, 0, RING_ROWS - 3)], torch.int32),
        )
        self.capacities = [draw.pick(total + 1, total + 9, max(1, total // 2)) for _ in range(2)]
        self.overflow = draw.pick("skip", "rotate")
        self.cursor = draw.tensor([draw.int(0, 5)])

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Run both steps on the backend in use. Yields the name of every launch and what it left behind."""
        yield from self._step("first", np.zeros_like(self.prefix), self.prefix, self.capacities[0])
        records = self.context.canary_buf.view(torch.int64)
        for _ in range(self.spoil):
            slot, word, bit = self.draw.int(0, len(records) - 1), self.draw.int(0, 3), self.draw.int(0, 62)
            records[slot, word] ^= 1 << bit
        yield from self._step("second", self.prefix, self.extend, self.capacities[1])

    def _step(self, step: str, prefix: np.ndarray, extend: np.ndarray, capacity: int) -> Iterator[tuple[str, Any]]:
        draw, padding = self.draw, np.zeros(self.padding, dtype=np.int64)
        device = draw.device
        verify_plan = VerifyPlan.allocate(verify_capacity=capacity, device=device)
        write_plan = WritePlan.allocate(write_req_capacity=self.bs + self.padding, device=device)
        for plan in (verify_plan, write_plan):
            for name in type(plan).__slots__:
                tensor = getattr(plan, name)
                tensor.fill_(POISON if tensor.dtype == torch.int64 else POISON_32)
        kernels.launch_canary_plan_kernels(
            verify_plan_out=verify_plan,
            write_plan_out=write_plan,
            req_pool_indices=draw.tensor(np.concatenate((self.rows, padding))),
            prefix_lens=draw.tensor(np.concatenate((prefix, padding + 7))),
            extend_seq_lens=draw.tensor(np.concatenate((extend, padding))),
            req_to_token=self.req_to_token,
            swa_window_size=self.window,
            full_to_swa_index_mapping=None if self.mapping is None else draw.tensor(self.mapping),
            verify_capacity=capacity,
            req_to_verify_expected_tokens=draw.tensor(self.tokens, torch.int32),
            req_to_verify_expected_tokens_valid_lens=draw.tensor(np.concatenate((prefix, padding))),
            kv_token_id_vs_position_offset=0,
            overflow=self.overflow,
            rotate_cursor=self.cursor if self.overflow == "rotate" else None,
        )
        yield f"{step} plan", (clone(verify_plan), clone(write_plan), self.cursor.clone())
        at = [(row, int(p) + i) for row, p, e in zip(self.rows, prefix, extend, strict=True) for i in range(int(e))]
        where = tuple(np.array(at, dtype=np.int64).reshape(-1, 2).T)
        slots, tokens, positions = self.table[where], self.tokens[where], where[1].copy()
        if self.mapping is not None:
            slots = self.mapping[slots]
        wants = {"enable_write_input_assert": False, "expected_input_tokens": None, "expected_input_positions": None}
        if draw.chance(0.5):
            wrong = draw.rng.random(len(tokens)) < draw.pick(0, 0.02)
            wants = {
                "enable_write_input_assert": True,
                "expected_input_tokens": draw.tensor(np.where(wrong, tokens + 1, tokens)),
                "expected_input_positions": draw.tensor(np.where(wrong & (tokens % 2 == 0), 0, positions)),
            }
        skipped = draw.rng.random(len(slots)) < draw.pick(0, 0, 0.1)
        # SGLang verifies before it writes; a round that writes first reads back within the step what it wrote.
        verify_first = draw.chance(0.5)
        if verify_first:
            yield from self._verify(step, verify_plan)
        kernels.launch_canary_write_kernel(
            context=self.context,
            plan=write_plan,
            input_ids=draw.tensor(tokens),
            positions=draw.tensor(positions),
            out_cache_loc=draw.tensor(np.where(skipped, -1, slots)),
            **wants,
        )
        yield f"{step} write", clone(self.context)
        if not verify_first:
            yield from self._verify(step, verify_plan)

    def _verify(self, step: str, plan: VerifyPlan) -> Iterator[tuple[str, Any]]:
        kernels.launch_canary_verify_kernel(
            context=self.context, plan=plan, check_verify_expected_token=self.draw.chance(0.5)
        )
        yield f"{step} verify", clone(self.context)


def differences(got: Any, want: Any) -> list[str]:
    """Names of the words in which what two backends left behind differs; ring rows as multisets."""
    if isinstance(want, tuple):
        pairs = [
            (name, given, words(theirs)[name])
            for ours, theirs in zip(got[:2], want[:2], strict=True)
            for name, given in words(ours).items()
        ]
        pairs.append(("rotate_cursor", got[2].cpu(), want[2]))
        return [name for name, given, wanted in pairs if not torch.equal(given, wanted)]
    wrong = [name for name in CONTEXT_WORDS if not torch.equal(getattr(got, name).cpu(), getattr(want, name))]
    rings = [Counter(map(tuple, context.violation_ring.tolist())) for context in (got, want)]
    # A ring that is full holds any part of what there was to report.
    if int(want.violation_write_index) <= RING_ROWS and rings[0] != rings[1]:
        wrong.append("violation_ring")
    return wrong


def fuzz(first: int, last: int, device: str, limit_s: float) -> tuple[int, int, int, list[str]]:
    """Rounds of seeds [first, last), as many as `limit_s` lets begin.

    Returns:
        Rounds run, launches made in them, violations met, and what differed.
    """
    torch.set_num_threads(1)
    launches, violations, found = 0, 0, []
    end = time.monotonic() + limit_s
    for seed in range(first, last):
        if time.monotonic() > end:
            return seed - first, launches, violations, found
        with use_backend("triton"):
            got = list(Round(seed, device).steps())
        counter = 0
        with use_backend("torch"):
            want = list(Round(seed, "cpu").steps())
        for (name, ours), (_, theirs) in zip(got, want, strict=True):
            launches += 1
            if wrong := differences(ours, theirs):
                found.append(f"seed {seed}, {name}: {', '.join(wrong)}")
                break
            if isinstance(theirs, VerifyOrWriteContext):
                counter = int(theirs.violation_write_index)
        violations += counter
    return last - first, launches, violations, found
