"""Every refusal of the launchers, made before anything is written.

First sentences are the contract's, in SGLang's order of checks; what a message means to a user and what to do follows in its
second sentence. Checks only read attributes, so SGLang's own plans and contexts pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import (
    MAX_REAL_KV_SOURCES,
    MAX_REQS_PER_LAUNCH,
    REAL_KV_ALIGN_BYTES,
    SLOT_BYTES,
    SLOT_WORDS,
    VERIFY_OFFSETS_SCRATCH_LEN,
    VIOLATION_WORDS,
    WORD_BYTES,
)

if TYPE_CHECKING:
    from .buffers import VerifyOrWriteContext, VerifyPlan, WritePlan

Named = tuple[str, torch.Tensor]

VERIFY_PLAN_ENTRIES = (
    "verify_slot_indices",
    "verify_expected_tokens",
    "verify_expected_positions",
    "verify_prev_slot_indices",
)


# --- real K/V sources -------------------------------------------------------------------------------------------------


def check_real_kv_source(tensor: torch.Tensor, page_size: int, num_bytes_per_token: int, read_bytes: int) -> None:
    """Refuse a source whose bytes cannot be addressed as `RealKvSource` says."""
    what = "kv-canary: RealKvSource."
    align = REAL_KV_ALIGN_BYTES
    if page_size < 1:
        raise ValueError(f"{what}page_size must be >= 1, got {page_size}")
    if num_bytes_per_token <= 0 or num_bytes_per_token % align:
        raise ValueError(f"{what}num_bytes_per_token must be a positive multiple of {align}, got {num_bytes_per_token}")
    if read_bytes <= 0 or read_bytes > num_bytes_per_token or read_bytes % align:
        raise ValueError(
            f"{what}read_bytes must be a positive multiple of {align} in "
            f"(0, num_bytes_per_token={num_bytes_per_token}], got {read_bytes}"
        )
    shape = tuple(tensor.shape)
    if tensor.ndim < 2:
        raise ValueError(f"{what}tensor must be at least 2-D, got shape {shape}")
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if stride_bytes % align:
        raise ValueError(
            f"{what}tensor row stride must be a multiple of {align} bytes, got {stride_bytes} bytes "
            f"(shape={shape}, strides={tuple(tensor.stride())}, dtype={tensor.dtype})"
        )
    row_bytes, need = shape[1] * tensor.element_size(), page_size * num_bytes_per_token
    if row_bytes < need:
        raise ValueError(
            f"{what}tensor row is {row_bytes} bytes wide but page_size={page_size} x "
            f"num_bytes_per_token={num_bytes_per_token} needs {need} (shape={shape}, dtype={tensor.dtype})"
        )


# --- plan -------------------------------------------------------------------------------------------------------------


def check_plan(
    *,
    verify_plan_out: VerifyPlan,
    req_pool_indices: torch.Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_capacity: int,
) -> None:
    """What `launch_canary_plan_kernels` refuses before its two launches' own checks."""
    what = "kv-canary: launch_canary_plan_kernels"
    if swa_window_size > 0 and full_to_swa_index_mapping is None:
        raise ValueError(
            f"{what} requires full_to_swa_index_mapping when swa_window_size > 0. "
            "Without it a sliding-window plan would carry slots of the full pool: pass the pool's mapping."
        )
    bs = _batch_size(req_pool_indices)
    if bs > MAX_REQS_PER_LAUNCH:
        raise ValueError(
            f"{what} supports at most bs={MAX_REQS_PER_LAUNCH} reqs per launch, got bs={bs}. "
            "Lower --max-running-requests, or split the batch with plan_chunks."
        )
    entries = verify_plan_out.verify_slot_indices.shape[0]
    if verify_capacity != entries:
        raise ValueError(
            f"{what} verify_capacity={verify_capacity} does not match "
            f"verify_plan_out.verify_slot_indices.shape[0]={entries}. "
            "Pass the size that the plan was allocated with."
        )


def check_plan_offsets(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
) -> None:
    """What `launch_plan_offsets_kernel` refuses: layout, type, size, place."""
    lut = full_to_swa_index_mapping
    int64: tuple[Named, ...] = (
        ("req_pool_indices", req_pool_indices),
        ("prefix_lens", prefix_lens),
        ("extend_seq_lens", extend_seq_lens),
    )
    outputs: tuple[Named, ...] = (
        ("out_verify_offsets_scratch", out_verify_offsets_scratch),
        ("out_write_offsets", out_write_offsets),
        ("out_write_seed_slot_indices", out_write_seed_slot_indices),
    )
    cells: tuple[Named, ...] = (
        ("out_verify_num_valid", out_verify_num_valid),
        ("out_verify_enable", out_verify_enable),
        ("out_write_num_valid_reqs", out_write_num_valid_reqs),
    )
    mapping: tuple[Named, ...] = () if lut is None else (("lut_tensor", lut),)
    tensors = (*int64, ("req_to_token", req_to_token), *mapping, *outputs, *cells)
    bs = _batch_size(req_pool_indices)
    offsets_len = _length(out_write_offsets, "out_write_offsets")
    capacity = _length(out_write_seed_slot_indices, "out_write_seed_slot_indices")
    for name, tensor in tensors:
        _check_contiguous(tensor, name)
    int32 = {"req_to_token", *(name for name, _ in cells)}
    for name, tensor in tensors:
        _check_dtype(tensor, name, torch.int32 if name in int32 else torch.int64)
    if bs > MAX_REQS_PER_LAUNCH:
        raise ValueError(
            f"kv-canary: offsets kernel bs must be in [0, {MAX_REQS_PER_LAUNCH}], got {bs}. "
            "Split the batch with plan_chunks."
        )
    if offsets_len <= 0:
        raise ValueError(f"kv-canary: write_offsets_len must be positive, got {offsets_len}")
    if lut is not None and _length(lut, "lut_tensor") <= 0:
        raise ValueError("kv-canary: lut_len must be positive when has_swa_lut is True")
    for name, tensor in int64:
        _check_length(tensor, name, bs)
    if req_to_token.ndim != 2:
        raise ValueError(f"kv-canary: req_to_token must be 2-D, got shape {tuple(req_to_token.shape)}")
    if lut is not None:
        _check_1d(lut, "lut_tensor")
    _check_1d(out_verify_offsets_scratch, "out_verify_offsets_scratch")
    if out_verify_offsets_scratch.shape[0] < VERIFY_OFFSETS_SCRATCH_LEN:
        raise ValueError(
            f"kv-canary: out_verify_offsets_scratch length must be >= {VERIFY_OFFSETS_SCRATCH_LEN}, "
            f"got {out_verify_offsets_scratch.shape[0]}"
        )
    _check_1d(out_write_offsets, "out_write_offsets")
    _check_1d(out_write_seed_slot_indices, "out_write_seed_slot_indices")
    for name, tensor in cells:
        _check_length(tensor, name, 1)
    if offsets_len != capacity + 1:
        raise ValueError(
            f"kv-canary: write_offsets_len must equal write_req_capacity + 1, got {offsets_len} and {capacity}. "
            "Allocate both with WritePlan.allocate."
        )
    if bs > capacity:
        raise ValueError(
            f"kv-canary: bs={bs} exceeds write_req_capacity={capacity}. "
            "Raise --max-running-requests or --cuda-graph-max-bs-decode, or split the batch with plan_chunks."
        )
    device = out_verify_offsets_scratch.device
    for name, tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"kv-canary: {name} must be on out_verify_offsets_scratch's device {device}, got {tensor.device}"
            )


def check_plan_entries(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_offsets_scratch: torch.Tensor,
    verify_enable: torch.Tensor,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    out_verify_slot_indices: torch.Tensor,
    out_verify_expected_tokens: torch.Tensor,
    out_verify_expected_positions: torch.Tensor,
    out_verify_prev_slot_indices: torch.Tensor,
) -> None:
    """What `launch_plan_entries_kernel` refuses."""
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is None:
        raise ValueError(
            "kv-canary: launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
            "req_to_verify_expected_tokens is set. Pass each request's committed length."
        )
    bs = _batch_size(req_pool_indices)
    device = verify_offsets_scratch.device
    vectors: list[tuple[str, torch.Tensor, torch.dtype, int | None]] = [
        ("req_pool_indices", req_pool_indices, torch.int64, bs),
        ("prefix_lens", prefix_lens, torch.int64, bs),
        ("verify_offsets_scratch", verify_offsets_scratch, torch.int64, None),
        ("verify_enable", verify_enable, torch.int32, 1),
    ]
    if full_to_swa_index_mapping is not None:
        vectors.append(("full_to_swa_index_mapping", full_to_swa_index_mapping, torch.int64, None))
    if req_to_verify_expected_tokens_valid_lens is not None and req_to_verify_expected_tokens is not None:
        valid_lens = req_to_verify_expected_tokens_valid_lens
        vectors.append(("req_to_verify_expected_tokens_valid_lens", valid_lens, torch.int64, bs))
    capacity = _length(out_verify_slot_indices, "out_verify_slot_indices")
    for name, tensor in (
        ("out_verify_slot_indices", out_verify_slot_indices),
        ("out_verify_expected_tokens", out_verify_expected_tokens),
        ("out_verify_expected_positions", out_verify_expected_positions),
        ("out_verify_prev_slot_indices", out_verify_prev_slot_indices),
    ):
        vectors.append((name, tensor, torch.int64, capacity))
    for name, tensor, dtype, length in vectors:
        _check_vector(tensor, name, dtype, length, device)
    tables: list[Named] = [("req_to_token", req_to_token)]
    if req_to_verify_expected_tokens is not None:
        tables.append(("req_to_verify_expected_tokens", req_to_verify_expected_tokens))
    for name, tensor in tables:
        _check_contiguous(tensor, name)
        _check_dtype(tensor, name, torch.int32)
        if tensor.ndim != 2:
            raise ValueError(f"kv-canary: {name} must be 2-D, got shape {tuple(tensor.shape)}")
        _check_device(tensor, name, device)
    if verify_offsets_scratch.shape[0] < bs + 1:
        raise ValueError(
            f"kv-canary: verify_offsets_scratch length must be >= {bs + 1}, got {verify_offsets_scratch.shape[0]}"
        )


def check_overflow(overflow: str, rotate_cursor: torch.Tensor | None, device: torch.device) -> None:
    """Refuse an unknown overflow policy, or a rotation without its cursor."""
    if overflow not in ("skip", "rotate"):
        raise ValueError(f"kv-canary: overflow must be 'skip' or 'rotate', got {overflow!r}")
    if overflow == "rotate":
        if rotate_cursor is None:
            raise ValueError(
                "kv-canary: overflow='rotate' needs rotate_cursor, an int64 [1] tensor that keeps its value between steps"
            )
        _check_vector(rotate_cursor, "rotate_cursor", torch.int64, 1, device)


# --- verify and write -------------------------------------------------------------------------------------------------


def check_verify(context: VerifyOrWriteContext, plan: VerifyPlan) -> None:
    """What `launch_canary_verify_kernel` refuses."""
    _check_source_count(context)
    _check_contiguous(context.canary_buf, "canary_buf")
    for field in (*VERIFY_PLAN_ENTRIES, "verify_num_valid", "enable"):
        _check_contiguous(getattr(plan, field), f"plan.{field}")
    _check_context_contiguous(context)
    _check_sources(context)
    device = _check_context(context)
    capacity = _length(plan.verify_slot_indices, "plan.verify_slot_indices")
    for field in VERIFY_PLAN_ENTRIES:
        _check_vector(getattr(plan, field), f"plan.{field}", torch.int64, capacity, device)
    for field in ("verify_num_valid", "enable"):
        _check_vector(getattr(plan, field), f"plan.{field}", torch.int32, 1, device)


def check_write(
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    """What `launch_canary_write_kernel` refuses."""
    _check_source_count(context)
    _check_contiguous(context.canary_buf, "canary_buf")
    for field in ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs"):
        _check_contiguous(getattr(plan, field), f"plan.{field}")
    tokens: list[Named] = [("input_ids", input_ids), ("positions", positions), ("out_cache_loc", out_cache_loc)]
    for name, tensor in tokens:
        _check_contiguous(tensor, name)
    if enable_write_input_assert:
        if expected_input_tokens is None or expected_input_positions is None:
            raise ValueError("kv-canary: expected input tensors are required when enable_write_input_assert=True")
        expected: list[Named] = [
            ("expected_input_tokens", expected_input_tokens),
            ("expected_input_positions", expected_input_positions),
        ]
        for name, tensor in expected:
            _check_contiguous(tensor, name)
        tokens += expected
    elif expected_input_tokens is not None or expected_input_positions is not None:
        raise ValueError("kv-canary: expected input tensors must be None when enable_write_input_assert=False")
    _check_context_contiguous(context)
    _check_contiguous(context.enable_chain_position_assert, "enable_chain_position_assert")
    _check_sources(context)
    device = _check_context(context)
    _check_vector(context.enable_chain_position_assert, "enable_chain_position_assert", torch.int32, 1, device)
    capacity = _length(plan.write_seed_slot_indices, "plan.write_seed_slot_indices")
    _check_vector(plan.write_offsets, "plan.write_offsets", torch.int64, capacity + 1, device)
    _check_vector(plan.write_seed_slot_indices, "plan.write_seed_slot_indices", torch.int64, capacity, device)
    _check_vector(plan.write_num_valid_reqs, "plan.write_num_valid_reqs", torch.int32, 1, device)
    count = _length(input_ids, "input_ids")
    for name, tensor in tokens:
        _check_vector(tensor, name, torch.int64, count, device)


def _check_source_count(context: VerifyOrWriteContext) -> None:
    count = len(context.real_kv_sources)
    if count > MAX_REAL_KV_SOURCES:
        raise ValueError(
            f"kv-canary: at most {MAX_REAL_KV_SOURCES} RealKvSource entries supported by the CUDA ABI, got {count}"
        )


def _check_context_contiguous(context: VerifyOrWriteContext) -> None:
    for name in ("violation_ring", "violation_write_index", "slot_run_counter", "kernel_run_counter"):
        _check_contiguous(getattr(context, name), name)


def _check_sources(context: VerifyOrWriteContext) -> None:
    for i, source in enumerate(context.real_kv_sources):
        tensor, name = source.tensor, f"real_kv_sources[{i}].tensor"
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"kv-canary: {name} rows must be packed (stride(-1) == 1), got strides {tuple(tensor.stride())}"
            )
        if tensor.ndim != 2:
            raise ValueError(f"kv-canary: {name} (viewed as uint8) must be 2-D, got {tensor.ndim}-D")
        _check_device(tensor, name, context.canary_buf.device)


def _check_context(context: VerifyOrWriteContext) -> torch.device:
    """Shapes, dtypes and places that verify and write share; the device that everything must be on."""
    buf = context.canary_buf
    device = buf.device
    _check_dtype(buf, "canary_buf", torch.uint8)
    if buf.ndim != 2:
        raise ValueError(f"kv-canary: canary_buf must be 2-D, got shape {tuple(buf.shape)}")
    stride_bytes = buf.shape[1]
    if stride_bytes < SLOT_BYTES:
        fields = stride_bytes // WORD_BYTES
        raise ValueError(f"kv-canary: canary_buf slot stride must hold at least {SLOT_WORDS} int64 fields, got {fields}")
    if stride_bytes % WORD_BYTES:
        raise ValueError(f"kv-canary: canary_buf rows must be a multiple of {WORD_BYTES} bytes, got {stride_bytes}")
    ring = context.violation_ring
    _check_dtype(ring, "violation_ring", torch.int64)
    if ring.ndim != 2 or ring.shape[1] != VIOLATION_WORDS:
        raise ValueError(f"kv-canary: violation_ring must be [capacity, {VIOLATION_WORDS}], got shape {tuple(ring.shape)}")
    _check_device(ring, "violation_ring", device)
    _check_vector(context.violation_write_index, "violation_write_index", torch.int32, 1, device)
    _check_vector(context.slot_run_counter, "slot_run_counter", torch.int64, 1, device)
    _check_vector(context.kernel_run_counter, "kernel_run_counter", torch.int64, 1, device)
    return device


# --- one tensor ---------------------------------------------------------------------------------------------------------


def _batch_size(req_pool_indices: torch.Tensor) -> int:
    return _length(req_pool_indices, "req_pool_indices")


def _length(tensor: torch.Tensor, name: str) -> int:
    """First extent of a tensor; a scalar has none."""
    if tensor.ndim == 0:
        raise ValueError(f"kv-canary: {name} must be 1-D, got shape ()")
    return tensor.shape[0]


def _check_contiguous(tensor: torch.Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"kv-canary: {name} must be contiguous")


def _check_dtype(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"kv-canary: {name} must have dtype {dtype}, got {tensor.dtype}")


def _check_1d(tensor: torch.Tensor, name: str) -> None:
    if tensor.ndim != 1:
        raise ValueError(f"kv-canary: {name} must be 1-D, got shape {tuple(tensor.shape)}")


def _check_length(tensor: torch.Tensor, name: str, length: int) -> None:
    _check_1d(tensor, name)
    if tensor.shape[0] != length:
        raise ValueError(f"kv-canary: {name} length must be {length}, got {tensor.shape[0]}")


def _check_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"kv-canary: {name} must be on {device}, got {tensor.device}")


def _check_vector(
    tensor: torch.Tensor, name: str, dtype: torch.dtype, length: int | None, device: torch.device
) -> None:
    _check_contiguous(tensor, name)
    _check_dtype(tensor, name, dtype)
    if length is None:
        _check_1d(tensor, name)
    else:
        _check_length(tensor, name, length)
    _check_device(tensor, name, device)
