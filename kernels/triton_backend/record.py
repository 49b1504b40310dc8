"""Probe and publish on the device: a plan's demand into a scratch row, and the finished row into a ring in host memory.

The probe runs right after the plan, because the plan's inputs are the caller's and do not outlive the call (a
captured graph reuses their memory). Publish runs after the group's last launch. Neither reads anything back, so both
work inside a captured CUDA graph, where no Python runs at replay: the step's number comes from a device cell that the
host copies into the stream before each step, and a forward's number is counted on the device.

Between them, marks take the device's clock before and after each launch where a session asks for device times. The mark
after a launch also says in host memory how far the device has got, which is still readable when its context has died.

Inside the interpreter there is neither inline assembly nor a device clock: fences fall away (programs run one after
another) and times stay unmeasured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from ..layout import (
    MAX_REQS_PER_LAUNCH,
    NOT_MEASURED,
    PADDING_REQ_POOL_IDX,
    PROBE_WORDS,
    PROGRESS_SHIFT,
    Phase,
    ProbeWord,
    progress_code,
)
from .device import INTERPRETED, skipped_entries
from .launch import launch

if TYPE_CHECKING:
    from ..hooks import PlanCall

_PADDING: tl.constexpr = tl.constexpr(PADDING_REQ_POOL_IDX)
_WORDS: tl.constexpr = tl.constexpr(PROBE_WORDS)
_NOT_MEASURED: tl.constexpr = tl.constexpr(NOT_MEASURED)
_MAX_PREFIX: tl.constexpr = tl.constexpr(2**48)
_MAX_EXTEND: tl.constexpr = tl.constexpr(2**37)
"""Lengths are clamped here, far past any row of slots, so that the sum of 4096 absurd ones never wraps."""

_COUNT_BITS: tl.constexpr = tl.constexpr(MAX_REQS_PER_LAUNCH.bit_length())
_COUNT_MASK: tl.constexpr = tl.constexpr((1 << MAX_REQS_PER_LAUNCH.bit_length()) - 1)
_LAST: tl.constexpr = tl.constexpr(int(ProbeWord.SEQ_END))

_STEP: tl.constexpr = tl.constexpr(int(ProbeWord.STEP))
_FORWARD: tl.constexpr = tl.constexpr(int(ProbeWord.FORWARD))
_RUNNER: tl.constexpr = tl.constexpr(int(ProbeWord.RUNNER))
_GROUP: tl.constexpr = tl.constexpr(int(ProbeWord.GROUP))
_KIND: tl.constexpr = tl.constexpr(int(ProbeWord.KIND))
_TIME_NS: tl.constexpr = tl.constexpr(int(ProbeWord.TIME_NS))
_BS: tl.constexpr = tl.constexpr(int(ProbeWord.BS))
_BS_LAUNCHED: tl.constexpr = tl.constexpr(int(ProbeWord.BS_LAUNCHED))
_WRITE_REQ_CAPACITY: tl.constexpr = tl.constexpr(int(ProbeWord.WRITE_REQ_CAPACITY))
_WRITE_ENTRIES: tl.constexpr = tl.constexpr(int(ProbeWord.WRITE_ENTRIES))
_VERIFY_DEMAND: tl.constexpr = tl.constexpr(int(ProbeWord.VERIFY_DEMAND))
_VERIFY_PLANNED: tl.constexpr = tl.constexpr(int(ProbeWord.VERIFY_PLANNED))
_VERIFY_CAPACITY: tl.constexpr = tl.constexpr(int(ProbeWord.VERIFY_CAPACITY))
_VERIFY_ENABLED: tl.constexpr = tl.constexpr(int(ProbeWord.VERIFY_ENABLED))
_VERIFY_CHECKED: tl.constexpr = tl.constexpr(int(ProbeWord.VERIFY_CHECKED))
_ENTRIES_SKIPPED: tl.constexpr = tl.constexpr(int(ProbeWord.ENTRIES_SKIPPED))
_PREFIX_LEN_MAX: tl.constexpr = tl.constexpr(int(ProbeWord.PREFIX_LEN_MAX))
_PREFIX_LEN_SUM: tl.constexpr = tl.constexpr(int(ProbeWord.PREFIX_LEN_SUM))
_SEQ_LEN_MAX: tl.constexpr = tl.constexpr(int(ProbeWord.SEQ_LEN_MAX))
_REQ_TO_TOKEN_WIDTH: tl.constexpr = tl.constexpr(int(ProbeWord.REQ_TO_TOKEN_WIDTH))
_VIOLATIONS: tl.constexpr = tl.constexpr(int(ProbeWord.VIOLATIONS))
_VIOLATION_RING_CAPACITY: tl.constexpr = tl.constexpr(int(ProbeWord.VIOLATION_RING_CAPACITY))
_PLAN_NS: tl.constexpr = tl.constexpr(int(ProbeWord.PLAN_NS))
_PROGRESS_SHIFT: tl.constexpr = tl.constexpr(PROGRESS_SHIFT)

STATE_WORDS: Final = 3
"""Words of a group's state on the device: step and forward of its last row, and the time of its last mark in ns."""

_MARK: tl.constexpr = tl.constexpr(2)
_PHASE_WORD: Final = {Phase.VERIFY: int(ProbeWord.VERIFY_NS), Phase.WRITE: int(ProbeWord.WRITE_NS)}


@triton.jit
def _combine(new_a, sum_a, prefix_a, seq_a, new_b, sum_b, prefix_b, seq_b):
    return new_a + new_b, sum_a + sum_b, tl.maximum(prefix_a, prefix_b), tl.maximum(seq_a, seq_b)


@triton.jit
def _fence_system():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _clock_ns():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "window",
        "write_req_capacity",
        "verify_capacity",
        "width",
        "runner",
        "group",
        "kind",
    ]
)
def _probe_kernel(
    scratch_ptr,  # [32] int64, out: the row, all but the ring's words and the violations
    req_pool_indices_ptr,  # [num_reqs] int64
    prefix_lens_ptr,  # [num_reqs] int64
    extend_lens_ptr,  # [num_reqs] int64
    verify_num_valid_ptr,  # [1] int32
    verify_enable_ptr,  # [1] int32
    skipped_ptr,  # [1] int64
    step_ptr,  # [1] int64: the step's number, put there by the host before the step
    state_ptr,  # [3] int64, in and out: step and forward of this group's last row, time of its last mark
    num_reqs,
    window,
    write_req_capacity,
    verify_capacity,
    width,
    runner,
    group,
    kind,
    WINDOWED: tl.constexpr,
    MARKED: tl.constexpr,  # whether a mark stands right before the plan
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Recompute what the plan hides, and keep it. Grid: (1,)."""
    if not INTERPRETED:
        now = _clock_ns()
    step = tl.load(step_ptr)
    forward = tl.where(tl.load(state_ptr) == step, tl.load(state_ptr + 1) + 1, 0)
    enabled = tl.load(verify_enable_ptr).to(tl.int64)
    planned = tl.minimum(tl.maximum(tl.load(verify_num_valid_ptr).to(tl.int64), 0), verify_capacity)
    skipped = tl.load(skipped_ptr)

    req = tl.arange(0, BLOCK)
    in_batch = req < num_reqs
    row = tl.load(req_pool_indices_ptr + req, mask=in_batch, other=_PADDING)
    active = row != _PADDING
    prefix = tl.load(prefix_lens_ptr + req, mask=in_batch, other=0)
    extend = tl.load(extend_lens_ptr + req, mask=in_batch, other=0)
    # int64 and clamped before any sum: shared prefixes add up past 2**31, absurd ones must not wrap
    prefix = tl.where(active, tl.minimum(tl.maximum(prefix, 0), _MAX_PREFIX), 0)
    extend = tl.where(active, tl.minimum(tl.maximum(extend, 0), _MAX_EXTEND), 0)
    # Each reduction costs a round of shuffles in 64 bits, so rows are counted in the low bits of the tokens' sum.
    packed, prefix_sum, prefix_max, seq_max = tl.reduce(
        ((extend << _COUNT_BITS) + active.to(tl.int64), prefix, prefix, prefix + extend), 0, _combine
    )
    new, bs = packed >> _COUNT_BITS, packed & _COUNT_MASK
    demand = prefix_sum
    if WINDOWED:
        demand = tl.sum(tl.minimum(prefix, window), axis=0)

    word = tl.arange(0, _WORDS)
    out = tl.full([_WORDS], _NOT_MEASURED, tl.int64)
    out = tl.where(word == _STEP, step, out)
    out = tl.where(word == _FORWARD, forward, out)
    out = tl.where(word == _RUNNER, runner, out)
    out = tl.where(word == _GROUP, group, out)
    out = tl.where(word == _KIND, kind, out)
    out = tl.where(word == _BS, bs, out)
    out = tl.where(word == _BS_LAUNCHED, num_reqs, out)
    out = tl.where(word == _WRITE_REQ_CAPACITY, write_req_capacity, out)
    out = tl.where(word == _WRITE_ENTRIES, new, out)
    out = tl.where(word == _VERIFY_DEMAND, demand, out)
    out = tl.where(word == _VERIFY_PLANNED, planned, out)
    out = tl.where(word == _VERIFY_CAPACITY, verify_capacity, out)
    out = tl.where(word == _VERIFY_ENABLED, tl.where(enabled != 0, 1, 0).to(tl.int64), out)
    out = tl.where(word == _ENTRIES_SKIPPED, skipped, out)
    out = tl.where(word == _PREFIX_LEN_MAX, prefix_max, out)
    out = tl.where(word == _PREFIX_LEN_SUM, prefix_sum, out)
    out = tl.where(word == _SEQ_LEN_MAX, seq_max, out)
    out = tl.where(word == _REQ_TO_TOKEN_WIDTH, width, out)
    if not INTERPRETED:
        out = tl.where(word == _TIME_NS, now, out)
        if MARKED:
            out = tl.where(word == _PLAN_NS, now - tl.load(state_ptr + _MARK), out)
    tl.store(scratch_ptr + word, out)
    tl.store(state_ptr, step)
    tl.store(state_ptr + 1, forward)


@triton.jit
def _mark_kernel(
    state_ptr,  # [3] int64, out: the time
    INTERPRETED: tl.constexpr,
):
    """Take the time before a launch. Grid: (1,), one warp."""
    if not INTERPRETED:
        tl.store(state_ptr + _MARK, _clock_ns())


@triton.jit(do_not_specialize=["word", "code"])
def _span_kernel(
    state_ptr,  # [3] int64: the time of the mark before the launch
    scratch_ptr,  # [32] int64, in and out: the row that the probe left
    progress_ptr,  # [1] int64 in host memory, out
    word,  # of the row: the launch's phase
    code,  # `layout.progress_code` of the launch
    INTERPRETED: tl.constexpr,
):
    """Add the time since the mark to a phase, and say that it is over. Grid: (1,), one warp."""
    if not INTERPRETED:
        spent = _clock_ns() - tl.load(state_ptr + _MARK)
        before = tl.load(scratch_ptr + word)
        tl.store(scratch_ptr + word, tl.where(before == _NOT_MEASURED, spent, before + spent))
    tl.store(progress_ptr, (tl.load(scratch_ptr + _STEP) << _PROGRESS_SHIFT) + code)


@triton.jit(do_not_specialize=["ring_rows", "violation_ring_capacity"])
def _publish_kernel(
    scratch_ptr,  # [32] int64: the row that the probe left
    violation_index_ptr,  # [1] int32
    published_ptr,  # [1] int64, in and out: rows published so far
    ring_ptr,  # [ring_rows, 32] int64 in host memory, out
    ring_rows,
    violation_ring_capacity,
    INTERPRETED: tl.constexpr,
):
    """Put the row into the ring: fill it, invalidate the next one, fence, number it. Grid: (1,), one warp.

    A reader on the host takes a row only if its first and last words are the same positive seq, so a row must be
    invalid before it is filled again. Each launch does that for the launch after it: one system-wide fence, about 1 us,
    then serves both, and the ring holds one row less.
    """
    seq = tl.load(published_ptr) + 1
    row_ptr = ring_ptr + ((seq - 1) % ring_rows) * _WORDS
    next_ptr = ring_ptr + (seq % ring_rows) * _WORDS
    word = tl.arange(0, _WORDS)
    out = tl.load(scratch_ptr + word)
    planned = tl.load(scratch_ptr + _VERIFY_PLANNED)
    enabled = tl.load(scratch_ptr + _VERIFY_ENABLED)
    violations = tl.load(violation_index_ptr).to(tl.int64)
    out = tl.where(word == _VERIFY_CHECKED, tl.where(enabled != 0, planned, 0), out)
    out = tl.where(word == _VIOLATIONS, violations, out)
    out = tl.where(word == _VIOLATION_RING_CAPACITY, violation_ring_capacity, out)
    out = tl.where(word == 0, -seq, out)
    out = tl.where(word == _LAST, seq, out)
    tl.store(row_ptr + word, out, mask=word != _LAST)
    tl.store(next_ptr, -(seq + 1))
    if not INTERPRETED:
        _fence_system()
        tl.debug_barrier()
    tl.store(row_ptr + _LAST, seq)
    tl.store(row_ptr, seq)
    tl.store(published_ptr, seq)


_BLOCKS: Final = {128: 1, 512: 4, MAX_REQS_PER_LAUNCH: 8}
"""Rows that a probe scans at once → warps: few variants to compile, and the fastest of those tried on an H200."""


def probe(
    call: PlanCall,
    *,
    step: torch.Tensor,
    state: torch.Tensor,
    scratch: torch.Tensor,
    runner: int,
    group: int,
    kind: int,
    marked: bool = False,
) -> None:
    """Record what a plan launch demanded. Right after it, on its stream; safe under CUDA graph capture.

    Args:
        call: The launch's arguments; ours or SGLang's plan objects.
        step: [1] int64, the number of the step.
        state: [STATE_WORDS] int64, in and out, kept between the rows of one (runner, group).
        scratch: [32] int64. Out, a row of `layout.ProbeWord` for `publish`.
        runner, group, kind: Words of the row.
        marked: Whether `mark` was launched right before the plan: then the row tells how long the plan took.
    """
    num_reqs = call.req_pool_indices.shape[0]
    block = next(block for block in _BLOCKS if num_reqs <= block)
    _launch_probe(call, step, state, scratch, (runner, group, kind), marked, block)


def _launch_probe(
    call: PlanCall,
    step: torch.Tensor,
    state: torch.Tensor,
    scratch: torch.Tensor,
    key: tuple[int, int, int],
    marked: bool,
    block: int,
) -> None:
    launch(
        _probe_kernel,
        1,
        (
            scratch,
            call.req_pool_indices,
            call.prefix_lens,
            call.extend_seq_lens,
            call.verify_plan_out.verify_num_valid,
            call.verify_plan_out.enable,
            skipped_entries(scratch.device),
            step,
            state,
        ),
        (
            call.req_pool_indices.shape[0],
            call.swa_window_size,
            call.write_plan_out.write_seed_slot_indices.shape[0],
            call.verify_plan_out.verify_slot_indices.shape[0],
            call.req_to_token.shape[1],
            *key,
        ),
        (),
        (call.swa_window_size > 0, marked, block, INTERPRETED),
        _BLOCKS[block],
    )


def warmup(call: PlanCall, *, step: torch.Tensor, state: torch.Tensor, scratch: torch.Tensor, timed: bool) -> None:
    """Compile what batches of any size will need; nothing may be compiled inside a capture. Not inside a capture.

    Args:
        call: A plan launch like those to come.
        step: [1] int64, any number.
        state, scratch: As for `probe`; out, nothing that anybody has to keep.
        timed: Whether marks will be launched too.
    """
    for block in _BLOCKS:
        for marked in (False, True) if timed else (False,):
            _launch_probe(call, step, state, scratch, (0, 0, 0), marked, block)
    nowhere = torch.zeros(2, PROBE_WORDS, dtype=torch.int64, device=scratch.device)
    if timed:
        mark(state)
        span(state, scratch, nowhere, runner=0, group=0, phase=Phase.VERIFY)
    no_violations, published = nowhere[1].view(torch.int32), torch.zeros_like(nowhere[0])
    publish(scratch, violation_write_index=no_violations, violation_ring_capacity=0, published=published, ring=nowhere)


def mark(state: torch.Tensor) -> None:
    """Take the device's time right before a launch, on its stream; safe under CUDA graph capture.

    Args:
        state: [STATE_WORDS] int64 of the launch's (runner, group). Out, its last word: the time in ns.
    """
    launch(_mark_kernel, 1, (state,), (), (), (INTERPRETED,), 1)


def span(
    state: torch.Tensor, scratch: torch.Tensor, progress: torch.Tensor, *, runner: int, group: int, phase: Phase
) -> None:
    """Add the time since `mark` to the row's phase, right after a launch; safe under CUDA graph capture.

    What it adds holds the launch and about one gap between launches, half before and half after it.

    Args:
        state: [STATE_WORDS] int64.
        scratch: [32] int64, in and out: the row that `probe` left.
        progress: [1] int64 in pinned or registered host memory. Out: how far the device has got, `layout.Progress`.
        runner, group, phase: Of the launch; VERIFY or WRITE.
    """
    sizes = (_PHASE_WORD[phase], progress_code(runner, group, phase))
    launch(_span_kernel, 1, (state, scratch, progress), sizes, (), (INTERPRETED,), 1)


def publish(
    scratch: torch.Tensor,
    *,
    violation_write_index: torch.Tensor,
    violation_ring_capacity: int,
    published: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """Put the row that `probe` left into a ring, after the group's last launch; safe under CUDA graph capture.

    Args:
        scratch: [32] int64.
        violation_write_index: [1] int32, violations so far.
        violation_ring_capacity: Violation rows kept in detail.
        published: [1] int64, in and out, rows published to this ring so far. One stream publishes to one ring.
        ring: [rows, 32] int64 in pinned or registered host memory. Out, one row.
    """
    launch(
        _publish_kernel,
        1,
        (scratch, violation_write_index, published, ring),
        (ring.shape[0], violation_ring_capacity),
        (),
        (INTERPRETED,),
        1,
    )
