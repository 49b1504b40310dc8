"""What a plan fills, and what verify and write work on. SGLang's names: either side's objects work in the other's call.

Capacities are read off the tensors' shapes. Every tensor of one launch lives on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_capacity, check_source
from .layout import WORD_BYTES, CanaryLaunchTag, ChainName, RealKvHashMode

_INT32_BYTES = 4

__all__ = ["RealKvSource", "VerifyOrWriteContext", "VerifyPlan", "WritePlan", "is_parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealKvSource:
    """Real K/V bytes that are folded into a slot's fingerprint.

    Slot `s` is row `s // page_size`, from byte `(s % page_size) * num_bytes_per_token` on. Rows may be strided and may
    have trailing bytes; nothing is copied, so the fingerprint is that of the live pool.

    Args:
        tensor: [rows, row_items], any dtype, items of a row packed. Row stride a multiple of 16 bytes.
        page_size: Slots in one row, at least 1.
        num_bytes_per_token: Bytes from one slot of a row to the next, a positive multiple of 16.
        read_bytes: Leading bytes of a slot that are folded in mode ALL, a positive multiple of 16 and no more than
            `num_bytes_per_token`. Mode PARTIAL folds 16.

    Raises:
        ValueError: one of the above does not hold.
    """

    tensor: Tensor
    page_size: int
    num_bytes_per_token: int
    read_bytes: int

    def __post_init__(self) -> None:
        check_source(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOrWriteContext:
    """One canary buffer, and where its launches report.

    Args:
        canary_buf: [num_slots, slot_bytes] uint8, contiguous; `slot_bytes` a multiple of 8, at least 32. A slot's first
            four words are `SlotField`; the rest is left alone.
        kernel_kind: Tag stamped into every violation row.
        violation_ring: [ring_capacity, 8] int64, words of `ViolationField`. Filled once, never overwritten.
        violation_write_index: [1] int32, violations so far. Goes on counting past the ring's end.
        slot_run_counter: [1] int64, entries verified or tokens stored.
        kernel_run_counter: [1] int64, launches.
        real_kv_sources: At most four, folded in order. Empty: fingerprints are 0.
        real_kv_hash_mode: NONE, PARTIAL (16 bytes of each source) or ALL (`read_bytes` of each).
        enable_chain_position_assert: [1] int32. Not 0: write checks that each position follows the one before.
        chain: What the buffer's chain hashes are: "serial", SGLang's, or "parallel", ours (docs/parallel-chain.md). All
            launches on one buffer declare the same. SGLang's own contexts declare nothing, and mean "serial".
    """

    canary_buf: Tensor
    kernel_kind: CanaryLaunchTag
    violation_ring: Tensor
    violation_write_index: Tensor
    slot_run_counter: Tensor
    kernel_run_counter: Tensor
    real_kv_sources: tuple[RealKvSource, ...]
    real_kv_hash_mode: RealKvHashMode
    enable_chain_position_assert: Tensor
    chain: ChainName = "serial"


def is_parallel(context: VerifyOrWriteContext) -> bool:
    """Whether a context, ours or SGLang's, declares the parallel chain."""
    return getattr(context, "chain", "serial") == "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """Slots to check, one entry each. Entries past `verify_num_valid` are stale and are not read.

    Args:
        verify_slot_indices: [verify_capacity] int64. 0 is the dummy slot: counted, not checked.
        verify_expected_tokens: [verify_capacity] int64. -1: not known.
        verify_expected_positions: [verify_capacity] int64.
        verify_prev_slot_indices: [verify_capacity] int64. Below 0: chain head; 0: predecessor unknown.
        verify_num_valid: [1] int32, entries to check, clamped to the capacity.
        enable: [1] int32. 0 after an overflow: the whole launch is skipped.
    """

    verify_slot_indices: Tensor
    verify_expected_tokens: Tensor
    verify_expected_positions: Tensor
    verify_prev_slot_indices: Tensor
    verify_num_valid: Tensor
    enable: Tensor

    @staticmethod
    def allocation_bytes(verify_capacity: int) -> int:
        """Bytes that `allocate` takes on the device."""
        return 4 * WORD_BYTES * verify_capacity + 2 * _INT32_BYTES

    @classmethod
    def allocate(cls, *, verify_capacity: int, device: torch.device) -> VerifyPlan:
        """Allocate a plan. Only `enable` is set, to 1; the rest is whatever the memory held.

        Raises:
            ValueError: `verify_capacity` is below 1.
        """
        check_capacity("VerifyPlan verify_capacity", verify_capacity)
        return cls(
            verify_slot_indices=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_expected_tokens=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_expected_positions=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_prev_slot_indices=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_num_valid=torch.empty(1, dtype=torch.int32, device=device),
            enable=torch.ones(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """Which of a batch's tokens belong to which request, and where each request's chain goes on from.

    Args:
        write_offsets: [write_req_capacity + 1] int64. Request `r` writes tokens `[offsets[r], offsets[r + 1])`.
        write_seed_slot_indices: [write_req_capacity] int64. Slot before the first token; below 0: chain head.
        write_num_valid_reqs: [1] int32, requests launched, padding included.
    """

    write_offsets: Tensor
    write_seed_slot_indices: Tensor
    write_num_valid_reqs: Tensor

    @staticmethod
    def allocation_bytes(write_req_capacity: int) -> int:
        """Bytes that `allocate` takes on the device."""
        return WORD_BYTES * (2 * write_req_capacity + 1) + _INT32_BYTES

    @classmethod
    def allocate(cls, *, write_req_capacity: int, device: torch.device) -> WritePlan:
        """Allocate a plan. Its contents are whatever the memory held.

        Raises:
            ValueError: `write_req_capacity` is below 1.
        """
        check_capacity("WritePlan write_req_capacity", write_req_capacity)
        return cls(
            write_offsets=torch.empty(write_req_capacity + 1, dtype=torch.int64, device=device),
            write_seed_slot_indices=torch.empty(write_req_capacity, dtype=torch.int64, device=device),
            write_num_valid_reqs=torch.empty(1, dtype=torch.int32, device=device),
        )
