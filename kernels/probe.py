"""The probe, host version: what a plan launch demanded, read from its inputs on the CPU.

The plan hides its demand: `bs` is padded and `verify_num_valid` is clamped to the capacity. So both are recomputed here
from `req_pool_indices`, `prefix_lens` and `extend_seq_lens`. Tensors of another device are not read: their words stay
`NOT_MEASURED`, and nothing synchronises.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Final

import numpy as np

from .hooks import PlanCall
from .layout import PADDING_REQ_POOL_IDX, ProbeWord

if TYPE_CHECKING:
    import torch

    from .buffers import VerifyPlan

_LIST_MAX_REQS: Final = 192
"""Below this many rows Python lists beat numpy's per-call cost (1 to 2 µs each)."""

_BS = int(ProbeWord.BS)
_BS_LAUNCHED = int(ProbeWord.BS_LAUNCHED)
_WRITE_REQ_CAPACITY = int(ProbeWord.WRITE_REQ_CAPACITY)
_WRITE_ENTRIES = int(ProbeWord.WRITE_ENTRIES)
_VERIFY_DEMAND = int(ProbeWord.VERIFY_DEMAND)
_VERIFY_CAPACITY = int(ProbeWord.VERIFY_CAPACITY)
_PREFIX_LEN_MAX = int(ProbeWord.PREFIX_LEN_MAX)
_PREFIX_LEN_SUM = int(ProbeWord.PREFIX_LEN_SUM)
_SEQ_LEN_MAX = int(ProbeWord.SEQ_LEN_MAX)
_REQ_TO_TOKEN_WIDTH = int(ProbeWord.REQ_TO_TOKEN_WIDTH)
_VERIFY_PLANNED = int(ProbeWord.VERIFY_PLANNED)
_VERIFY_ENABLED = int(ProbeWord.VERIFY_ENABLED)


def read_plan_inputs(call: PlanCall, row: list[int]) -> None:
    """Fill in what the inputs of a plan launch demand, whether or not the launch will be refused.

    Args:
        call: Arguments as the caller gave them, possibly malformed.
        row: [PROBE_WORDS] words of `ProbeWord`, out. Shapes always; demands where the inputs are on the CPU.

    Raises:
        Exception: the arguments are no plan inputs at all; what was read until then stands in `row`.
    """
    plan, write_plan, reqs, prefixes, extends, req_to_token, _mapping, window, _ = call
    row[_BS_LAUNCHED] = bs = reqs.shape[0]
    row[_WRITE_REQ_CAPACITY] = write_plan.write_seed_slot_indices.shape[0]
    row[_VERIFY_CAPACITY] = plan.verify_slot_indices.shape[0]
    row[_REQ_TO_TOKEN_WIDTH] = req_to_token.shape[1]
    if not (reqs.is_cpu and prefixes.is_cpu and extends.is_cpu):
        return
    if bs <= _LIST_MAX_REQS:
        _read_lists(reqs.tolist(), prefixes.tolist(), extends.tolist(), window, row)
    else:
        _read_arrays(reqs, prefixes, extends, window, row)


def _read_lists(reqs: list[int], prefixes: list[int], extends: list[int], window: int, row: list[int]) -> None:
    if PADDING_REQ_POOL_IDX in reqs:
        prefixes = [length for req, length in zip(reqs, prefixes) if req]  # noqa: B905 (malformed calls too)
        extends = [length for req, length in zip(reqs, extends) if req]  # noqa: B905
    row[_BS] = bs = len(prefixes)
    if not bs:
        row[_WRITE_ENTRIES] = row[_VERIFY_DEMAND] = row[_PREFIX_LEN_MAX] = row[_PREFIX_LEN_SUM] = row[_SEQ_LEN_MAX] = 0
        return
    if min(prefixes) < 0:
        prefixes = [max(length, 0) for length in prefixes]
    longest = max(prefixes)
    row[_PREFIX_LEN_MAX] = longest
    row[_PREFIX_LEN_SUM] = total = sum(prefixes)
    extend = extends[0]
    if extend >= 0 and extends.count(extend) == bs:  # decode: one token each
        row[_WRITE_ENTRIES] = extend * bs
        row[_SEQ_LEN_MAX] = longest + extend
    else:
        extends = [max(length, 0) for length in extends]
        row[_WRITE_ENTRIES] = sum(extends)
        row[_SEQ_LEN_MAX] = max(map(add, prefixes, extends))
    if 0 < window < longest:
        total = sum([window if length > window else length for length in prefixes])
    row[_VERIFY_DEMAND] = total


def _read_arrays(
    reqs: torch.Tensor, prefixes: torch.Tensor, extends: torch.Tensor, window: int, row: list[int]
) -> None:
    active = reqs.numpy() != PADDING_REQ_POOL_IDX
    # int64 before any sum: shared prefixes add up past 2**31 entries
    prefix_lens = np.maximum(prefixes.numpy()[active], 0).astype(np.int64, copy=False)
    extend_lens = np.maximum(extends.numpy()[active], 0).astype(np.int64, copy=False)
    row[_BS] = len(prefix_lens)
    row[_WRITE_ENTRIES] = int(extend_lens.sum())
    row[_PREFIX_LEN_MAX] = longest = int(prefix_lens.max(initial=0))
    row[_PREFIX_LEN_SUM] = total = int(prefix_lens.sum())
    row[_SEQ_LEN_MAX] = int((prefix_lens + extend_lens).max(initial=0))
    row[_VERIFY_DEMAND] = int(np.minimum(prefix_lens, window).sum()) if 0 < window < longest else total


def read_verify_plan(plan: VerifyPlan, row: list[int]) -> None:
    """Fill in what a plan decided: entries that it holds, and whether verification is on.

    A verify launch with this plan checks `VERIFY_PLANNED` entries, or none where `VERIFY_ENABLED` is 0.
    """
    enable = plan.enable
    if enable.is_cpu:
        planned = int(plan.verify_num_valid.item())
        capacity = row[_VERIFY_CAPACITY]
        row[_VERIFY_PLANNED] = capacity if planned > capacity else 0 if planned < 0 else planned
        row[_VERIFY_ENABLED] = 1 if enable.item() else 0
