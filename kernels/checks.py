"""Every argument check of the launchers and buffers, in SGLang's order and with its first sentences.

What an error means to a user and how to get past it is a note on the exception (Python 3.11 and later print notes), so
that the first sentence stays SGLang's. Nothing here writes to a tensor or reads one's contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from .layout import (
    CHAIN_NAMES,
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
    from .buffers import RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan

_INT64: Final = torch.int64
_INT32: Final = torch.int32

_NOTE_CONTIGUOUS = "Kernels walk the memory by index: pass a contiguous tensor, not a strided view."
_NOTE_BS = (
    "The launch carries more requests than the plan has rows for. Allocate WritePlan with a larger write_req_capacity "
    "(SGLang: --cuda-graph-max-bs-decode or --max-running-requests), or split the batch with plan_chunks(...)."
)
_NOTE_BLOCK = "Split the batch with plan_chunks(...), or admit fewer requests (SGLang: --max-running-requests)."
_NOTE_CAPACITY = "verify_capacity is the plan's own: pass verify_plan_out.verify_slot_indices.shape[0]."
_NOTE_MAPPING = "A sliding-window group has slots of its own: pass the pool's full-to-SWA mapping, or window 0."
_NOTE_SOURCE = "The fold reads 16 bytes at a time: give the source a layout in multiples of 16 bytes."
_NOTE_CHAIN = "Declare the definition that the buffer was written under; SGLang's own is 'serial'."
_NOTE_DEVICE = "Tensors of one launch live on one device."


def refusal(sentence: str, note: str | None = None) -> ValueError:
    """A ValueError that begins `kv-canary: `, with what to do about it as a note."""
    error = ValueError(f"kv-canary: {sentence}")
    if note is not None and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    return error


def wrong_kind(
    error: AttributeError, tensors: Mapping[str, object], objects: Mapping[str, tuple[object, type]]
) -> Exception:
    """What to raise for an attribute that a check did not find: which argument is no tensor, plan or context.

    Args:
        error: Of a check; given back where every argument is what it should be.
        tensors: Argument name → value, those that may be left out only if they were given.
        objects: Argument name → (value, dataclass whose fields it must have; the peer's have them too).
    """
    for name, (value, kind) in objects.items():
        for field in fields(kind):
            if field.default is not MISSING:
                continue  # ours alone: the peer's lack it
            if not hasattr(value, field.name):
                return TypeError(f"kv-canary: {name} must be a {kind.__name__}, got {type(value).__name__}")
            part = getattr(value, field.name)
            if field.type in ("Tensor", Tensor) and not isinstance(part, Tensor):
                return TypeError(f"kv-canary: {name}.{field.name} must be a torch.Tensor, got {type(part).__name__}")
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            return TypeError(f"kv-canary: {name} must be a torch.Tensor, got {type(value).__name__}")
    return error


# --- buffers --------------------------------------------------------------------------------------------------------


def check_capacity(name: str, capacity: int) -> None:
    """Refuse a capacity below 1."""
    if capacity <= 0:
        raise refusal(f"{name} must be positive, got {capacity}")


def check_source(source: RealKvSource) -> None:
    """Refuse a source whose slots the fold cannot address."""
    page_size, token_bytes, read_bytes = source.page_size, source.num_bytes_per_token, source.read_bytes
    if page_size < 1:
        raise refusal(f"RealKvSource.page_size must be >= 1, got {page_size}")
    if token_bytes <= 0 or token_bytes % REAL_KV_ALIGN_BYTES:
        raise refusal(
            f"RealKvSource.num_bytes_per_token must be a positive multiple of 16, got {token_bytes}", _NOTE_SOURCE
        )
    if not 0 < read_bytes <= token_bytes or read_bytes % REAL_KV_ALIGN_BYTES:
        raise refusal(
            "RealKvSource.read_bytes must be a positive multiple of 16 in "
            f"(0, num_bytes_per_token={token_bytes}], got {read_bytes}",
            _NOTE_SOURCE,
        )
    tensor = source.tensor
    shape = tuple(tensor.shape)
    if tensor.ndim < 2:
        raise refusal(f"RealKvSource.tensor must be at least 2-D, got shape {shape}", "View it as [rows, row_bytes].")
    item_bytes = tensor.element_size()
    stride_bytes = tensor.stride(0) * item_bytes
    if stride_bytes % REAL_KV_ALIGN_BYTES:
        raise refusal(
            f"RealKvSource.tensor row stride must be a multiple of 16 bytes, got {stride_bytes} bytes "
            f"(shape={shape}, strides={tuple(tensor.stride())}, dtype={tensor.dtype})",
            _NOTE_SOURCE,
        )
    row_bytes = shape[1] * item_bytes
    if row_bytes < page_size * token_bytes:
        raise refusal(
            f"RealKvSource.tensor row is {row_bytes} bytes wide but page_size={page_size} x "
            f"num_bytes_per_token={token_bytes} needs {page_size * token_bytes} (shape={shape}, dtype={tensor.dtype})",
            "A narrower row would fingerprint bytes of the next one: check page_size against the pool's layout.",
        )


# --- single tensors -------------------------------------------------------------------------------------------------


def _contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise refusal(f"{name} must be contiguous", _NOTE_CONTIGUOUS)


def _dtype(name: str, tensor: Tensor, want: torch.dtype) -> None:
    if tensor.dtype != want:
        raise refusal(f"{name} must have dtype {want}, got {tensor.dtype}")


def _ndim(name: str, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim:
        raise refusal(f"{name} must be {ndim}-D, got shape {tuple(tensor.shape)}")


def _length(name: str, tensor: Tensor, want: int) -> None:
    _ndim(name, tensor, 1)
    if tensor.shape[0] != want:
        raise refusal(f"{name} length must be {want}, got {tensor.shape[0]}")


def _min_length(name: str, tensor: Tensor, least: int) -> None:
    _ndim(name, tensor, 1)
    if tensor.shape[0] < least:
        raise refusal(f"{name} length must be >= {least}, got {tensor.shape[0]}")


def _same_device(name: str, tensor: Tensor, owner: str, device: torch.device) -> None:
    if tensor.device != device:
        raise refusal(f"{name} must be on {owner}'s device {device}, got {tensor.device}", _NOTE_DEVICE)


def _vectors(vectors: Iterable[tuple[str, Tensor, torch.dtype, int]], owner: str, device: torch.device) -> None:
    """Check (name, tensor, dtype, length) rows against one device."""
    for name, tensor, dtype, length in vectors:
        if (
            tensor.dtype is not dtype
            or tensor.ndim != 1
            or tensor.shape[0] != length
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            _contiguous(name, tensor)
            _dtype(name, tensor, dtype)
            _length(name, tensor, length)
            _same_device(name, tensor, owner, device)


# --- plan -----------------------------------------------------------------------------------------------------------


def check_offsets(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    out_verify_offsets_scratch: Tensor,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    max_reqs: int = MAX_REQS_PER_LAUNCH,
) -> None:
    """Refuse what `launch_plan_offsets_kernel` cannot work on."""
    lut = full_to_swa_index_mapping
    tensors = [
        ("req_pool_indices", req_pool_indices, _INT64),
        ("prefix_lens", prefix_lens, _INT64),
        ("extend_seq_lens", extend_seq_lens, _INT64),
        ("req_to_token", req_to_token, _INT32),
        ("out_verify_offsets_scratch", out_verify_offsets_scratch, _INT64),
        ("out_write_offsets", out_write_offsets, _INT64),
        ("out_write_seed_slot_indices", out_write_seed_slot_indices, _INT64),
        ("out_verify_num_valid", out_verify_num_valid, _INT32),
        ("out_verify_enable", out_verify_enable, _INT32),
        ("out_write_num_valid_reqs", out_write_num_valid_reqs, _INT32),
    ]
    if lut is not None:
        tensors.insert(4, ("lut_tensor", lut, _INT64))
    for name, tensor, _ in tensors:
        if not tensor.is_contiguous():
            _contiguous(name, tensor)
    for name, tensor, dtype in tensors:
        if tensor.dtype is not dtype:
            _dtype(name, tensor, dtype)
    if not req_pool_indices.ndim:
        _ndim("req_pool_indices", req_pool_indices, 1)
    bs = req_pool_indices.shape[0]
    if bs > max_reqs:
        raise refusal(f"offsets kernel bs must be in [0, {max_reqs}], got {bs}", _NOTE_BLOCK)
    for name, tensor in (
        ("out_write_offsets", out_write_offsets),
        ("out_write_seed_slot_indices", out_write_seed_slot_indices),
    ):
        if not tensor.ndim:
            _ndim(name, tensor, 1)
    offsets_len, req_capacity = out_write_offsets.shape[0], out_write_seed_slot_indices.shape[0]
    if offsets_len <= 0:
        raise refusal(f"write_offsets_len must be positive, got {offsets_len}")
    if lut is not None and lut.ndim and lut.shape[0] <= 0:
        raise refusal("lut_len must be positive when has_swa_lut is True", _NOTE_MAPPING)
    _length("req_pool_indices", req_pool_indices, bs)
    _length("prefix_lens", prefix_lens, bs)
    _length("extend_seq_lens", extend_seq_lens, bs)
    _ndim("req_to_token", req_to_token, 2)
    if lut is not None:
        _ndim("lut_tensor", lut, 1)
    _min_length("out_verify_offsets_scratch", out_verify_offsets_scratch, VERIFY_OFFSETS_SCRATCH_LEN)
    _ndim("out_write_offsets", out_write_offsets, 1)
    _ndim("out_write_seed_slot_indices", out_write_seed_slot_indices, 1)
    _length("out_verify_num_valid", out_verify_num_valid, 1)
    _length("out_verify_enable", out_verify_enable, 1)
    _length("out_write_num_valid_reqs", out_write_num_valid_reqs, 1)
    if offsets_len != req_capacity + 1:
        raise refusal(f"write_offsets_len must equal write_req_capacity + 1, got {offsets_len} and {req_capacity}")
    if bs > req_capacity:
        raise refusal(f"bs={bs} exceeds write_req_capacity={req_capacity}", _NOTE_BS)
    device = out_verify_offsets_scratch.device
    for name, tensor, _ in tensors:
        if tensor.device != device:
            _same_device(name, tensor, "out_verify_offsets_scratch", device)


def check_entries(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    verify_offsets_scratch: Tensor,
    verify_enable: Tensor,
    out_verify_slot_indices: Tensor,
    out_verify_expected_tokens: Tensor,
    out_verify_expected_positions: Tensor,
    out_verify_prev_slot_indices: Tensor,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    rotate_cursor: Tensor | None,
    max_reqs: int = MAX_REQS_PER_LAUNCH,
) -> None:
    """Refuse what `launch_plan_entries_kernel` cannot work on."""
    pool, valid_lens = req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens
    if pool is not None and valid_lens is None:
        raise refusal(
            "launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
            "req_to_verify_expected_tokens is set",
            "A pool row may hold the tail of an earlier request: valid_lens says how much of it counts.",
        )
    if not req_pool_indices.ndim:
        _ndim("req_pool_indices", req_pool_indices, 1)
    bs, device, owner = req_pool_indices.shape[0], verify_offsets_scratch.device, "out_verify_offsets_scratch"
    capacity = out_verify_slot_indices.shape[0] if out_verify_slot_indices.ndim else 0
    if bs > max_reqs:
        raise refusal(f"offsets kernel bs must be in [0, {max_reqs}], got {bs}", _NOTE_BLOCK)
    vectors = [
        ("req_pool_indices", req_pool_indices, _INT64, bs),
        ("prefix_lens", prefix_lens, _INT64, bs),
        ("verify_enable", verify_enable, _INT32, 1),
        ("out_verify_slot_indices", out_verify_slot_indices, _INT64, capacity),
        ("out_verify_expected_tokens", out_verify_expected_tokens, _INT64, capacity),
        ("out_verify_expected_positions", out_verify_expected_positions, _INT64, capacity),
        ("out_verify_prev_slot_indices", out_verify_prev_slot_indices, _INT64, capacity),
    ]
    if full_to_swa_index_mapping is not None:
        lut_len = full_to_swa_index_mapping.shape[0] if full_to_swa_index_mapping.ndim else 0
        vectors.append(("lut_tensor", full_to_swa_index_mapping, _INT64, lut_len))
    if pool is not None and valid_lens is not None:
        vectors.append(("req_to_verify_expected_tokens_valid_lens", valid_lens, _INT64, bs))
    if rotate_cursor is not None:
        vectors.append(("rotate_cursor", rotate_cursor, _INT64, 1))
    _vectors(vectors, owner, device)
    tables = [("req_to_token", req_to_token)]
    if pool is not None:
        tables.append(("req_to_verify_expected_tokens", pool))
    for name, table in tables:
        _contiguous(name, table)
        _dtype(name, table, _INT32)
        _ndim(name, table, 2)
        _same_device(name, table, owner, device)
    _contiguous("verify_offsets_scratch", verify_offsets_scratch)
    _dtype("verify_offsets_scratch", verify_offsets_scratch, _INT64)
    _min_length("verify_offsets_scratch", verify_offsets_scratch, bs + 1)


def check_overflow(overflow: str, rotate_cursor: Tensor | None) -> None:
    """Refuse an unknown overflow policy, or a rotating one without its cursor."""
    if overflow not in ("skip", "rotate"):
        raise refusal(f"overflow must be 'skip' or 'rotate', got {overflow!r}")
    if overflow == "rotate" and rotate_cursor is None:
        raise refusal(
            "rotate_cursor is required when overflow='rotate'",
            "Keep one torch.zeros(1, dtype=torch.int64, device=...) per plan; each launch moves it on.",
        )
    if overflow == "skip" and rotate_cursor is not None:
        raise refusal("rotate_cursor must be None when overflow='skip'", "Pass overflow='rotate' to use the cursor.")


def check_plan(
    *,
    verify_plan_out: VerifyPlan,
    req_pool_indices: Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: Tensor | None,
    verify_capacity: int,
    overflow: str,
    rotate_cursor: Tensor | None,
    max_reqs: int = MAX_REQS_PER_LAUNCH,
) -> None:
    """Refuse what `launch_canary_plan_kernels` cannot work on, before its two kernels' own checks."""
    if swa_window_size > 0 and full_to_swa_index_mapping is None:
        raise refusal(
            "launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0", _NOTE_MAPPING
        )
    if not req_pool_indices.ndim:
        _ndim("req_pool_indices", req_pool_indices, 1)
    bs = req_pool_indices.shape[0]
    if bs > max_reqs:
        raise refusal(
            f"launch_canary_plan_kernels supports at most bs={max_reqs} reqs per launch, got bs={bs}. "
            "Split the batch with plan_chunks(...).",
            _NOTE_BLOCK,
        )
    slots = verify_plan_out.verify_slot_indices
    if not slots.ndim:
        _ndim("out_verify_slot_indices", slots, 1)
    if verify_capacity != slots.shape[0]:
        raise refusal(
            f"launch_canary_plan_kernels verify_capacity={verify_capacity} does not match "
            f"verify_plan_out.verify_slot_indices.shape[0]={slots.shape[0]}",
            _NOTE_CAPACITY,
        )
    check_overflow(overflow, rotate_cursor)


# --- verify and write -----------------------------------------------------------------------------------------------


def _check_num_sources(sources: Sequence[RealKvSource]) -> None:
    if len(sources) > MAX_REAL_KV_SOURCES:
        raise refusal(
            f"at most {MAX_REAL_KV_SOURCES} RealKvSource entries supported by the CUDA ABI, got {len(sources)}",
            "Join neighbouring layers into one source: page_size and num_bytes_per_token may span them.",
        )


def _check_sources(sources: Sequence[RealKvSource], device: torch.device) -> None:
    for i, source in enumerate(sources):
        tensor = source.tensor
        if tensor.stride(-1) != 1:
            raise refusal(
                f"real_kv_sources[{i}].tensor rows must be packed (stride(-1) == 1), "
                f"got strides {tuple(tensor.stride())}",
                _NOTE_CONTIGUOUS,
            )
        if tensor.ndim != 2:
            raise refusal(
                f"real_kv_sources[{i}].tensor (viewed as uint8) must be 2-D, got {tensor.ndim}-D",
                "View it as [rows, row_bytes].",
            )
        _same_device(f"real_kv_sources[{i}].tensor", tensor, "canary_buf", device)


def _check_report_contiguous(context: VerifyOrWriteContext) -> None:
    _contiguous("violation_ring", context.violation_ring)
    _contiguous("violation_write_index", context.violation_write_index)
    _contiguous("slot_run_counter", context.slot_run_counter)
    _contiguous("kernel_run_counter", context.kernel_run_counter)


def _check_context(context: VerifyOrWriteContext) -> torch.device:
    """Check shapes, dtypes and devices of a context; its device."""
    buf, ring = context.canary_buf, context.violation_ring
    device = buf.device
    _dtype("canary_buf", buf, torch.uint8)
    _ndim("canary_buf", buf, 2)
    slot_bytes = buf.shape[1]
    if slot_bytes < SLOT_BYTES:
        raise refusal(
            f"canary_buf slot stride must hold at least {SLOT_WORDS} int64 fields, got {slot_bytes // WORD_BYTES}",
            f"Allocate it as [num_slots, {SLOT_BYTES}] uint8.",
        )
    if slot_bytes % WORD_BYTES or buf.storage_offset() % WORD_BYTES:
        raise refusal(
            f"canary_buf slots must start at multiples of {WORD_BYTES} bytes, got {slot_bytes} bytes a slot "
            f"from byte {buf.storage_offset()} on"
        )
    _dtype("violation_ring", ring, _INT64)
    _ndim("violation_ring", ring, 2)
    if ring.shape[1] != VIOLATION_WORDS:
        raise refusal(f"violation_ring rows must be {VIOLATION_WORDS} words, got shape {tuple(ring.shape)}")
    _same_device("violation_ring", ring, "canary_buf", device)
    _vectors(
        (
            ("violation_write_index", context.violation_write_index, _INT32, 1),
            ("slot_run_counter", context.slot_run_counter, _INT64, 1),
            ("kernel_run_counter", context.kernel_run_counter, _INT64, 1),
            ("enable_chain_position_assert", context.enable_chain_position_assert, _INT32, 1),
        ),
        "canary_buf",
        device,
    )
    if context.real_kv_hash_mode not in (0, 1, 2):
        raise refusal(f"real_kv_hash_mode must be 0 (NONE), 1 (PARTIAL) or 2 (ALL), got {context.real_kv_hash_mode}")
    chain = getattr(context, "chain", "serial")
    if chain not in CHAIN_NAMES:
        raise refusal(f"chain must be 'serial' or 'parallel', got {chain!r}", _NOTE_CHAIN)
    return device


def check_verify(*, context: VerifyOrWriteContext, plan: VerifyPlan) -> None:
    """Refuse what `launch_canary_verify_kernel` cannot work on."""
    _check_num_sources(context.real_kv_sources)
    _contiguous("canary_buf", context.canary_buf)
    _contiguous("plan.verify_slot_indices", plan.verify_slot_indices)
    _contiguous("plan.verify_expected_tokens", plan.verify_expected_tokens)
    _contiguous("plan.verify_expected_positions", plan.verify_expected_positions)
    _contiguous("plan.verify_prev_slot_indices", plan.verify_prev_slot_indices)
    _contiguous("plan.verify_num_valid", plan.verify_num_valid)
    _contiguous("plan.enable", plan.enable)
    _check_report_contiguous(context)
    device = context.canary_buf.device
    _check_sources(context.real_kv_sources, device)
    _check_context(context)
    capacity = plan.verify_slot_indices.shape[0] if plan.verify_slot_indices.ndim else 0
    _vectors(
        (
            ("plan.verify_slot_indices", plan.verify_slot_indices, _INT64, capacity),
            ("plan.verify_expected_tokens", plan.verify_expected_tokens, _INT64, capacity),
            ("plan.verify_expected_positions", plan.verify_expected_positions, _INT64, capacity),
            ("plan.verify_prev_slot_indices", plan.verify_prev_slot_indices, _INT64, capacity),
            ("plan.verify_num_valid", plan.verify_num_valid, _INT32, 1),
            ("plan.enable", plan.enable, _INT32, 1),
        ),
        "canary_buf",
        device,
    )


def check_write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: Tensor | None,
    expected_input_positions: Tensor | None,
) -> None:
    """Refuse what `launch_canary_write_kernel` cannot work on."""
    _check_num_sources(context.real_kv_sources)
    _contiguous("canary_buf", context.canary_buf)
    _contiguous("plan.write_offsets", plan.write_offsets)
    _contiguous("plan.write_seed_slot_indices", plan.write_seed_slot_indices)
    _contiguous("plan.write_num_valid_reqs", plan.write_num_valid_reqs)
    _contiguous("input_ids", input_ids)
    _contiguous("positions", positions)
    _contiguous("out_cache_loc", out_cache_loc)
    if enable_write_input_assert:
        if expected_input_tokens is None or expected_input_positions is None:
            raise refusal("expected input tensors are required when enable_write_input_assert=True")
        _contiguous("expected_input_tokens", expected_input_tokens)
        _contiguous("expected_input_positions", expected_input_positions)
    elif expected_input_tokens is not None or expected_input_positions is not None:
        raise refusal("expected input tensors must be None when enable_write_input_assert=False")
    _check_report_contiguous(context)
    _contiguous("enable_chain_position_assert", context.enable_chain_position_assert)
    device = context.canary_buf.device
    _check_sources(context.real_kv_sources, device)
    _check_context(context)
    req_capacity = plan.write_seed_slot_indices.shape[0] if plan.write_seed_slot_indices.ndim else 0
    num_tokens = input_ids.shape[0] if input_ids.ndim else 0
    vectors = [
        ("plan.write_seed_slot_indices", plan.write_seed_slot_indices, _INT64, req_capacity),
        ("plan.write_offsets", plan.write_offsets, _INT64, req_capacity + 1),
        ("plan.write_num_valid_reqs", plan.write_num_valid_reqs, _INT32, 1),
        ("input_ids", input_ids, _INT64, num_tokens),
        ("positions", positions, _INT64, num_tokens),
        ("out_cache_loc", out_cache_loc, _INT64, num_tokens),
    ]
    if expected_input_tokens is not None and expected_input_positions is not None:
        vectors.append(("expected_input_tokens", expected_input_tokens, _INT64, num_tokens))
        vectors.append(("expected_input_positions", expected_input_positions, _INT64, num_tokens))
    _vectors(vectors, "canary_buf", device)
