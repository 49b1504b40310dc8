"""Runs the real kernels for one batch: HEAD before the model, TAIL after it, on real buffers with KV bytes.

Both groups' plans come first; each endpoint then verifies and writes its own buffer, as SGLang orders them. The "model"
is what writes KV bytes between the two: a function of token and position, so equal prefixes have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from kvcanary_trace.kernels.buffers import RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan
from kvcanary_trace.kernels.chunks import plan_chunks
from kvcanary_trace.kernels.layout import PARTIAL_READ_BYTES, SLOT_BYTES, CanaryLaunchTag, Group, RealKvHashMode
from kvcanary_trace.kernels.plan import launch_canary_plan_kernels
from kvcanary_trace.kernels.verify import launch_canary_verify_kernel
from kvcanary_trace.kernels.write import launch_canary_write_kernel
from kvcanary_trace.schema import ErrorCode

from .batch import Batch
from .engine import Engine

__all__ = ["Canary", "GroupCanary"]

KV_BYTES_PER_TOKEN: Final = 32
VIOLATION_RING_ROWS: Final = 1024
_KV_WORDS: Final = KV_BYTES_PER_TOKEN // 8
_TOO_LARGE: Final = (ErrorCode.BS_EXCEEDS_WRITE_REQ_CAPACITY, ErrorCode.BS_EXCEEDS_PLAN_BLOCK)
_TAGS: Final = {
    Group.FULL: (CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL),
    Group.SWA: (CanaryLaunchTag.HEAD_K_SWA, CanaryLaunchTag.TAIL_K_SWA),
}


@dataclass(slots=True)
class GroupCanary:
    """Buffers and plans of one group.

    Attributes:
        head, tail: Launch contexts; HEAD has no sources, TAIL fingerprints the first 16 KV bytes of a slot (PARTIAL).
        kv_words: [slots, 4] int64, the KV bytes of each slot.
        mapping: [pool + page + 1] int64 on the device, or None for the full group.
        rotate_cursor: [1] int64 with `overflow="rotate"`, else None.
    """

    group: Group
    window: int
    verify_plan: VerifyPlan
    write_plan: WritePlan
    head: VerifyOrWriteContext
    tail: VerifyOrWriteContext
    kv_words: Tensor
    mapping: Tensor | None
    rotate_cursor: Tensor | None


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One batch on the device: plan inputs padded to the write capacity, token arrays as they are."""

    plan_inputs: tuple[Tensor, Tensor, Tensor]  # req_pool_indices, prefix_lens, extend_seq_lens
    input_ids: Tensor
    positions: Tensor
    expected_input_tokens: Tensor
    slots: dict[Group, Tensor]


class Canary:
    """The canaries of one engine.

    Args:
        engine: Whose batches will be run.
        device: Where the kernels run.
        overflow: What a plan past its capacity does: "skip" leaves the step unverified, "rotate" checks a moving part.
        mirrored: Whether `req_to_token` and the SWA map are copies that follow the engine's, as on any device.
            None: the CPU reads the engine's own.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        overflow: Literal["skip", "rotate"] = "skip",
        *,
        mirrored: bool | None = None,
    ) -> None:
        self.engine = engine
        self.device = device
        self.overflow: Literal["skip", "rotate"] = overflow
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        engine.tracks_rows = self._mirrored
        sizes, page = engine.sizes, engine.knobs.page_size
        self.violation_ring = torch.zeros((VIOLATION_RING_ROWS, 8), dtype=torch.int64, device=device)
        self.violation_write_index = torch.zeros(1, dtype=torch.int32, device=device)
        self.req_to_token = self._table(engine.req_to_token)
        self.groups = [self._group(Group.FULL, 0, sizes.pool_tokens + page, page, None)]
        if engine.swa is not None:
            mapping = self._table(engine.swa.mapping)
            window = engine.swa.window
            self.groups.append(self._group(Group.SWA, window, sizes.swa_pool_tokens + 1, 1, mapping))
        self._lanes = torch.arange(_KV_WORDS, dtype=torch.int64, device=device)
        # Plan inputs are padded to the write capacity, as a captured graph would have them.
        one, two, three = torch.zeros((3, sizes.write_req_capacity), dtype=torch.int64)
        self._padded = (one, two, three)

    def _table(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """The engine's own memory, or a copy on the device."""
        table = torch.from_numpy(array)
        return table.to(self.device, copy=True) if self._mirrored else table

    def _group(self, group: Group, window: int, num_slots: int, page: int, mapping: Tensor | None) -> GroupCanary:
        sizes, device = self.engine.sizes, self.device
        num_pages = -(-num_slots // page)
        kv = torch.zeros((num_pages, page * KV_BYTES_PER_TOKEN), dtype=torch.uint8, device=device)
        source = RealKvSource(
            tensor=kv, page_size=page, num_bytes_per_token=KV_BYTES_PER_TOKEN, read_bytes=PARTIAL_READ_BYTES
        )
        head_tag, tail_tag = _TAGS[group]
        rotate = self.overflow == "rotate"
        return GroupCanary(
            group=group,
            window=window,
            verify_plan=VerifyPlan.allocate(verify_capacity=sizes.verify_capacity, device=device),
            write_plan=WritePlan.allocate(write_req_capacity=sizes.write_req_capacity, device=device),
            head=self._context(head_tag, num_pages * page, ()),
            tail=self._context(tail_tag, num_pages * page, (source,)),
            kv_words=kv.view(torch.int64).view(-1, _KV_WORDS),
            mapping=mapping,
            rotate_cursor=torch.zeros(1, dtype=torch.int64, device=device) if rotate else None,
        )

    def _context(self, tag: CanaryLaunchTag, num_slots: int, sources: tuple[RealKvSource, ...]) -> VerifyOrWriteContext:
        device = self.device
        return VerifyOrWriteContext(
            canary_buf=torch.zeros((num_slots, SLOT_BYTES), dtype=torch.uint8, device=device),
            kernel_kind=tag,
            violation_ring=self.violation_ring,
            violation_write_index=self.violation_write_index,
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            real_kv_sources=sources,
            real_kv_hash_mode=RealKvHashMode.PARTIAL if sources else RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=device),
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def run(
        self,
        batch: Batch,
        expected_input_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None,
        *,
        chunk_refused: bool = False,
    ) -> str | None:
        """Plan, HEAD, model, TAIL for every group.

        Args:
            batch: What the engine scheduled.
            expected_input_ids: What `batch.input_ids` should be, where a fault changed them.
            chunk_refused: When the plan launcher refuses the batch as too large, run it in chunks instead: one more
                forward of the same step.

        Returns:
            The launcher's refusal, where the batch was run in chunks; else None.

        Raises:
            ValueError: A launcher refused the batch; its message begins with `kv-canary: `.
        """
        step = self.upload(batch, expected_input_ids)
        refusal: str | None = None
        try:
            for canary in self.groups:
                launch_canary_plan_kernels(write_plan_out=canary.write_plan, **self._plan_inputs(canary, step))
            write_plans: list[tuple[WritePlan, ...]] = [(canary.write_plan,) for canary in self.groups]
        except ValueError as error:
            refusal = str(error)
            if not chunk_refused or ErrorCode.of(refusal) not in _TOO_LARGE:
                raise
            rows = self.engine.sizes.write_req_capacity
            write_plans = [
                plan_chunks(write_req_capacity=rows, **self._plan_inputs(canary, step)) for canary in self.groups
            ]
        for canary, plans in zip(self.groups, write_plans, strict=True):
            self._verify_and_write(canary, canary.head, plans, step)
        for canary in self.groups:
            self._run_model(canary, step)
        for canary, plans in zip(self.groups, write_plans, strict=True):
            self._verify_and_write(canary, canary.tail, plans, step)
        return refusal

    def upload(
        self, batch: Batch, expected_input_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> StepTensors:
        """The batch as tensors; a device also gets what changed in `req_to_token` and in the SWA map."""
        engine, device, bs = self.engine, self.device, batch.bs
        plan_inputs = (
            torch.from_numpy(batch.req_pool_indices),
            torch.from_numpy(batch.prefix_lens),
            torch.from_numpy(batch.extend_seq_lens),
        )
        if bs <= engine.sizes.write_req_capacity:
            # A larger batch goes in as it is: the launcher names it.
            pads = (0, 0, 1 if batch.mode == "decode" else 0)
            for padded, tensor, pad in zip(self._padded, plan_inputs, pads, strict=True):
                padded[:bs] = tensor
                padded[bs:] = pad
            plan_inputs = self._padded
        full_slots = torch.from_numpy(batch.out_cache_loc)
        slots = {Group.FULL: full_slots}
        if engine.swa is not None:
            slots[Group.SWA] = torch.from_numpy(engine.swa.mapping[batch.out_cache_loc])
        input_ids = torch.from_numpy(batch.input_ids)
        expected = input_ids if expected_input_ids is None else torch.from_numpy(expected_input_ids)
        positions = torch.from_numpy(batch.positions)
        changes = engine.take_row_changes()
        if not self._mirrored:
            return StepTensors(plan_inputs, input_ids, positions, expected, slots)
        for row, start, stop in changes:
            self.req_to_token[row, start:stop] = torch.from_numpy(engine.req_to_token[row, start:stop]).to(device)
        rows = torch.from_numpy(np.repeat(batch.req_pool_indices, batch.extend_seq_lens)).to(device)
        positions = positions.to(device)
        slots = {group: tensor.to(device) for group, tensor in slots.items()}
        self.req_to_token[rows, positions] = slots[Group.FULL].to(torch.int32)
        if engine.swa is not None and self.groups[-1].mapping is not None:
            self.groups[-1].mapping.copy_(torch.from_numpy(engine.swa.mapping))
        on_device = (plan_inputs[0].to(device), plan_inputs[1].to(device), plan_inputs[2].to(device))
        return StepTensors(on_device, input_ids.to(device), positions, expected.to(device), slots)

    def _plan_inputs(self, canary: GroupCanary, step: StepTensors) -> dict[str, Any]:
        req_pool_indices, prefix_lens, extend_seq_lens = step.plan_inputs
        return {
            "verify_plan_out": canary.verify_plan,
            "req_pool_indices": req_pool_indices,
            "prefix_lens": prefix_lens,
            "extend_seq_lens": extend_seq_lens,
            "req_to_token": self.req_to_token,
            "swa_window_size": canary.window,
            "full_to_swa_index_mapping": canary.mapping,
            "verify_capacity": self.engine.sizes.verify_capacity,
            "req_to_verify_expected_tokens": None,
            "req_to_verify_expected_tokens_valid_lens": None,
            "kv_token_id_vs_position_offset": 0,
            "overflow": self.overflow,
            "rotate_cursor": canary.rotate_cursor,
        }

    def _run_model(self, canary: GroupCanary, step: StepTensors) -> None:
        """Write the KV bytes of the step's tokens."""
        seed = step.input_ids * -7046029254386353131 ^ (step.positions + 1) * -2960836687059489779
        canary.kv_words[step.slots[canary.group]] = seed.unsqueeze(1) + self._lanes

    def _verify_and_write(
        self, canary: GroupCanary, context: VerifyOrWriteContext, write_plans: tuple[WritePlan, ...], step: StepTensors
    ) -> None:
        """One endpoint: verify what was there, then write the step's tokens, checked against the scheduler's."""
        launch_canary_verify_kernel(context=context, plan=canary.verify_plan, check_verify_expected_token=False)
        for plan in write_plans:
            launch_canary_write_kernel(
                context=context,
                plan=plan,
                input_ids=step.input_ids,
                positions=step.positions,
                out_cache_loc=step.slots[canary.group],
                enable_write_input_assert=True,
                expected_input_tokens=step.expected_input_tokens,
                expected_input_positions=step.positions,
            )

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep torch to one thread on the CPU: a step's launches are too small to share."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self.device.type == "cpu" else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def num_violations(self) -> int:
        """Violations so far (reads the device)."""
        return int(self.violation_write_index.item())
