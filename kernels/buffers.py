"""Plans and contexts: the tensors that the launchers read and fill. Capacities are read off the tensors.

Names, dtypes and shapes are SGLang's, and every function here and in the launchers only reads attributes, so either side's
objects work in the other's calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import check_real_kv_source
from .layout import WORD_BYTES, CanaryLaunchTag, RealKvHashMode

INT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RealKvSource:
    """One tensor of real K/V bytes that a slot's fingerprint reads.

    Slot `s` owns `num_bytes_per_token` bytes of row `s // page_size`, from byte column
    `(s % page_size) * num_bytes_per_token`; the first `read_bytes` of them are folded (16 under PARTIAL). Rows may be
    strided and may have trailing bytes.

    Attributes:
        tensor: [rows, >= page_size * num_bytes_per_token bytes], any dtype; rows packed, row stride a multiple of 16 bytes.
        page_size: Slots in one row, at least 1.
        num_bytes_per_token: Bytes of one slot, a positive multiple of 16.
        read_bytes: Bytes folded under ALL, a positive multiple of 16, at most `num_bytes_per_token`.

    Raises:
        ValueError: A size or the tensor's layout is not as above.
    """

    tensor: torch.Tensor
    page_size: int
    num_bytes_per_token: int
    read_bytes: int

    def __post_init__(self) -> None:
        check_real_kv_source(self.tensor, self.page_size, self.num_bytes_per_token, self.read_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOrWriteContext:
    """What verify and write launches of one canary buffer share.

    Attributes:
        canary_buf: [slots, stride] uint8, contiguous; stride a multiple of 8 and at least 32.
        kernel_kind: Tag stamped into every violation row of the launch.
        violation_ring: [capacity, 8] int64, filled once; rows as `layout.ViolationField`.
        violation_write_index: [1] int32, violations so far; goes on counting past the ring's end.
        slot_run_counter: [1] int64, entries verified or tokens written so far.
        kernel_run_counter: [1] int64, launches so far.
        real_kv_sources: At most 4; empty turns fingerprints off.
        real_kv_hash_mode: How many of a slot's bytes are folded.
        enable_chain_position_assert: [1] int32; 0 turns the write kernel's check of consecutive positions off.
    """

    canary_buf: torch.Tensor
    kernel_kind: CanaryLaunchTag
    violation_ring: torch.Tensor
    violation_write_index: torch.Tensor
    slot_run_counter: torch.Tensor
    kernel_run_counter: torch.Tensor
    real_kv_sources: tuple[RealKvSource, ...]
    real_kv_hash_mode: RealKvHashMode
    enable_chain_position_assert: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """Which slots to verify. Entries past `verify_num_valid` are unspecified.

    Attributes:
        verify_slot_indices: [verify_capacity] int64, slots, translated for the group.
        verify_expected_tokens: [verify_capacity] int64, -1 where unknown.
        verify_expected_positions: [verify_capacity] int64.
        verify_prev_slot_indices: [verify_capacity] int64, -1 for a chain head, 0 where unknown.
        verify_num_valid: [1] int32, entries.
        enable: [1] int32, 0 when the plan overflowed and the step goes unverified.
    """

    verify_slot_indices: torch.Tensor
    verify_expected_tokens: torch.Tensor
    verify_expected_positions: torch.Tensor
    verify_prev_slot_indices: torch.Tensor
    verify_num_valid: torch.Tensor
    enable: torch.Tensor

    @staticmethod
    def allocation_bytes(verify_capacity: int) -> int:
        """Bytes that `allocate` takes from the device."""
        return 4 * verify_capacity * WORD_BYTES + 2 * INT32_BYTES

    @classmethod
    def allocate(cls, *, verify_capacity: int, device: torch.device | str) -> VerifyPlan:
        """A plan with room for `verify_capacity` entries; only `enable` is set, to 1.

        Raises:
            ValueError: `verify_capacity` is below 1.
        """
        if verify_capacity <= 0:
            raise ValueError(f"kv-canary: VerifyPlan verify_capacity must be positive, got {verify_capacity}")
        entries = [torch.empty(verify_capacity, dtype=torch.int64, device=device) for _ in range(4)]
        return cls(
            verify_slot_indices=entries[0],
            verify_expected_tokens=entries[1],
            verify_expected_positions=entries[2],
            verify_prev_slot_indices=entries[3],
            verify_num_valid=torch.empty(1, dtype=torch.int32, device=device),
            enable=torch.ones(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """Where each request's new tokens lie and where its chain goes on from.

    Attributes:
        write_offsets: [write_req_capacity + 1] int64; request r owns tokens `[write_offsets[r], write_offsets[r + 1])`.
        write_seed_slot_indices: [write_req_capacity] int64, slot before the first new token, -1 for a chain head.
        write_num_valid_reqs: [1] int32, requests as launched.
    """

    write_offsets: torch.Tensor
    write_seed_slot_indices: torch.Tensor
    write_num_valid_reqs: torch.Tensor

    @staticmethod
    def allocation_bytes(write_req_capacity: int) -> int:
        """Bytes that `allocate` takes from the device."""
        return (2 * write_req_capacity + 1) * WORD_BYTES + INT32_BYTES

    @classmethod
    def allocate(cls, *, write_req_capacity: int, device: torch.device | str) -> WritePlan:
        """A plan with room for `write_req_capacity` requests; nothing is set.

        Raises:
            ValueError: `write_req_capacity` is below 1.
        """
        if write_req_capacity <= 0:
            raise ValueError(f"kv-canary: WritePlan write_req_capacity must be positive, got {write_req_capacity}")
        return cls(
            write_offsets=torch.empty(write_req_capacity + 1, dtype=torch.int64, device=device),
            write_seed_slot_indices=torch.empty(write_req_capacity, dtype=torch.int64, device=device),
            write_num_valid_reqs=torch.empty(1, dtype=torch.int32, device=device),
        )
