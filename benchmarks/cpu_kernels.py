"""The torch backend on one CPU thread beside SGLang's torch reference: same inputs, byte-equal outputs, interleaved.

    python benchmarks/cpu_kernels.py [--repeats N] [--json FILE]

Prints a table and one line of JSON. Exit 0: every bar holds; 1: a bar is missed or outputs differ; 2: the reference
cannot be had. The reference comes as the tests fetch it (`KVCANARY_PEER_WHEEL` names a wheel that is there already).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pytest
import torch
from peer import PEER, load_peer
from strategies import assert_same_words, clone

from kvcanary_trace import kernels
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, RealKvSource, VerifyOrWriteContext

POOL_SLOTS = 200_001
PARTIAL_BAR_ENTRIES_PER_S = 6e6


@dataclass
class Work:
    """One kind of launch: ours, the reference's, and what the ratio must be."""

    name: str
    entries: int
    ours: Callable[[], Any]
    reference: Callable[[], Any] | None
    bar_ratio: float | None = None
    bar_entries_per_s: float | None = None
    calls: int = 1


def batch(num_reqs: int, prefix_len: int, extend_len: int) -> dict[str, Any]:
    """Plan inputs over a pool whose slots are dealt out at random."""
    generator = torch.Generator().manual_seed(num_reqs * 7919 + prefix_len)
    width = max(prefix_len + extend_len, 1)
    table = torch.zeros(num_reqs + 1, width, dtype=torch.int32)
    order = torch.randperm(POOL_SLOTS - 1, generator=generator)[: num_reqs * width] + 1
    table[1:] = order.reshape(num_reqs, width).int()
    return {
        "req_pool_indices": torch.arange(1, num_reqs + 1),
        "prefix_lens": torch.full((num_reqs,), prefix_len),
        "extend_seq_lens": torch.full((num_reqs,), extend_len),
        "req_to_token": table,
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": max(num_reqs * prefix_len, 1),
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    }


def context(mode: RealKvHashMode, num_slots: int = POOL_SLOTS) -> VerifyOrWriteContext:
    """An empty buffer over `num_slots`, with one source of 128 bytes a slot unless the mode is NONE."""
    generator = torch.Generator().manual_seed(5)
    sources: tuple[RealKvSource, ...] = ()
    if mode != RealKvHashMode.NONE:
        data = torch.randint(0, 256, (num_slots, 128), dtype=torch.uint8, generator=generator)
        sources = (RealKvSource(tensor=data, page_size=1, num_bytes_per_token=128, read_bytes=128),)
    return VerifyOrWriteContext(
        canary_buf=torch.zeros(num_slots, 32, dtype=torch.uint8),
        kernel_kind=CanaryLaunchTag.TAIL_K_FULL,
        violation_ring=torch.zeros(1024, 8, dtype=torch.int64),
        violation_write_index=torch.zeros(1, dtype=torch.int32),
        slot_run_counter=torch.zeros(1, dtype=torch.int64),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64),
        real_kv_sources=sources,
        real_kv_hash_mode=mode,
        enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
    )


def plan_of(inputs: dict[str, Any], launch: Callable[..., None]) -> tuple[kernels.VerifyPlan, kernels.WritePlan]:
    """Both plans of a batch."""
    num_reqs = inputs["req_pool_indices"].shape[0]
    verify_plan = kernels.VerifyPlan.allocate(verify_capacity=inputs["verify_capacity"], device=torch.device("cpu"))
    write_plan = kernels.WritePlan.allocate(write_req_capacity=num_reqs, device=torch.device("cpu"))
    for tensor in (verify_plan.verify_slot_indices, write_plan.write_offsets):
        tensor.fill_(-7)
    launch(verify_plan_out=verify_plan, write_plan_out=write_plan, **inputs)
    return verify_plan, write_plan


def write_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The tokens that a batch extends its requests by."""
    table, prefix_lens, extend_lens = (inputs[k] for k in ("req_to_token", "prefix_lens", "extend_seq_lens"))
    spans = [
        (row, int(a), int(a + n)) for row, (a, n) in enumerate(zip(prefix_lens, extend_lens, strict=True), start=1)
    ]
    positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
    return {
        "input_ids": torch.arange(len(positions)) * 31 % 128_000,
        "positions": positions,
        "out_cache_loc": torch.cat([table[row, a:b] for row, a, b in spans]).long(),
        "enable_write_input_assert": False,
        "expected_input_tokens": None,
        "expected_input_positions": None,
    }


def filled(num_reqs: int, length: int, mode: RealKvHashMode) -> tuple[dict[str, Any], VerifyOrWriteContext]:
    """A batch whose prefixes have been written, and the buffer that they were written into."""
    first = batch(num_reqs, 0, length)
    canary = context(mode)
    _, write_plan = plan_of(first, kernels.launch_canary_plan_kernels)
    kernels.launch_canary_write_kernel(context=canary, plan=write_plan, **write_inputs(first))
    return batch(num_reqs, length, 0) | {"req_to_token": first["req_to_token"]}, canary


def verify_work(name: str, num_reqs: int, length: int, mode: RealKvHashMode, reference: Any, **bars: float) -> Work:
    inputs, canary = filled(num_reqs, length, mode)
    plan, _ = plan_of(inputs, kernels.launch_canary_plan_kernels)
    arguments = {"context": canary, "plan": plan, "check_verify_expected_token": False}
    if reference is not None:
        ours, theirs = (clone(canary) for _ in range(2))
        kernels.launch_canary_verify_kernel(**arguments | {"context": ours})
        reference(**arguments | {"context": theirs})
        assert_same_words(ours, theirs)
    theirs_call = None if reference is None else lambda: reference(**arguments)
    work = Work(name, num_reqs * length, lambda: kernels.launch_canary_verify_kernel(**arguments), theirs_call, **bars)
    work.ours()
    assert canary.violation_write_index.item() == 0, "a clean buffer gave violations"
    return work


def write_work(name: str, num_reqs: int, prefix_len: int, length: int, reference: Any, **bars: float) -> Work:
    inputs = batch(num_reqs, prefix_len, length)
    canary = context(RealKvHashMode.NONE)
    if prefix_len:  # positions that go on from the seeds'
        canary.canary_buf.view(torch.int64)[inputs["req_to_token"][1:, prefix_len - 1].long(), 1] = prefix_len - 1
    _, plan = plan_of(inputs, kernels.launch_canary_plan_kernels)
    arguments = {"context": canary, "plan": plan, **write_inputs(inputs)}
    if reference is not None:
        ours, theirs = (clone(canary) for _ in range(2))
        kernels.launch_canary_write_kernel(**arguments | {"context": ours})
        reference(**arguments | {"context": theirs})
        assert_same_words(ours, theirs)
    theirs_call = None if reference is None else lambda: reference(**arguments)
    return Work(name, num_reqs * length, lambda: kernels.launch_canary_write_kernel(**arguments), theirs_call, **bars)


def plan_work(name: str, num_reqs: int, prefix_len: int, extend_len: int, reference: Any, **bars: float) -> Work:
    inputs = batch(num_reqs, prefix_len, extend_len)
    ours = plan_of(inputs, kernels.launch_canary_plan_kernels)
    if reference is not None:
        for got, want in zip(ours, plan_of(inputs, reference), strict=True):
            assert_same_words(got, want)
    outs = {"verify_plan_out": ours[0], "write_plan_out": ours[1]}
    theirs_call = None if reference is None else lambda: reference(**outs, **inputs)
    return Work(
        name, num_reqs * prefix_len, lambda: kernels.launch_canary_plan_kernels(**outs, **inputs), theirs_call, **bars
    )


def works() -> list[Work]:
    """Everything measured; those with a bar have the reference beside them, or a rate to reach."""
    peer = load_peer()
    plan_ref = peer.plan_ref.launch_canary_plan_kernels_torch_reference
    verify_ref = peer.verify_ref.launch_canary_verify_kernel_torch_reference
    write_ref = peer.write_ref.launch_canary_write_kernel_torch_reference
    none, partial = RealKvHashMode.NONE, RealKvHashMode.PARTIAL
    rate = PARTIAL_BAR_ENTRIES_PER_S
    return [
        plan_work("plan, 64 x 1024", 64, 1024, 1, plan_ref, bar_ratio=150),
        verify_work("verify, 64 x 1024", 64, 1024, none, verify_ref, bar_ratio=250),
        write_work("write, 64 x 1024", 64, 0, 1024, write_ref, bar_ratio=40),
        write_work("write, 1 x 4096", 1, 0, 4096, write_ref, bar_ratio=8),
        verify_work("verify, PARTIAL, 64 x 2500", 64, 2500, partial, None, bar_entries_per_s=rate),
        verify_work("verify, PARTIAL, 16 x 1700", 16, 1700, partial, None, bar_entries_per_s=rate),
        plan_work("plan, 64 x 2500", 64, 2500, 1, None),
        plan_work("plan, decode bs 1, prefix 16", 1, 16, 1, None),
        plan_work("plan, decode bs 64, prefix 16", 64, 16, 1, None),
        verify_work("verify, bs 1, prefix 16", 1, 16, none, None),
        write_work("write, decode bs 1", 1, 16, 1, None),
        write_work("write, decode bs 64", 64, 16, 1, None),
    ]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(work: Work, repeats: int) -> dict[str, Any]:
    """Medians of interleaved runs; the reference is so slow that it runs a third as often.

    Ratios are of wall time. The rate is absolute, so it is taken from the thread's own time in its best run: what the
    machine's other guests take away is not the kernel's.
    """
    work.ours()
    ours, theirs, own = [], [], []
    calls = max(1, min(200, int(0.01 / max(seconds(work.ours), 1e-7))))
    for i in range(repeats):
        for _ in range(3):
            started = time.thread_time()
            ours.append(seconds(lambda: [work.ours() for _ in range(calls)]) / calls)
            own.append((time.thread_time() - started) / calls)
        if work.reference is not None and i % 3 == 0:
            theirs.append(seconds(work.reference))
    row: dict[str, Any] = {"work": work.name, "entries": work.entries, "ours_s": median(ours)}
    row["entries_per_s"] = work.entries / min(own)
    row["reference_s"] = median(theirs) if theirs else None
    row["ratio"] = row["reference_s"] / row["ours_s"] if theirs else None
    row["bar_ratio"], row["bar_entries_per_s"] = work.bar_ratio, work.bar_entries_per_s
    row["holds"] = (work.bar_ratio is None or row["ratio"] >= work.bar_ratio) and (
        work.bar_entries_per_s is None or row["entries_per_s"] >= work.bar_entries_per_s
    )
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'work':<32}{'ours':>11}{'reference':>12}{'ratio':>8}{'M entries/s':>13}  bar")
    for row in rows:
        reference = "" if row["reference_s"] is None else f"{row['reference_s'] * 1e3:.1f} ms"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.0f}"
        bar = ""
        if row["bar_ratio"]:
            bar = f">= {row['bar_ratio']} x"
        elif row["bar_entries_per_s"]:
            bar = f">= {row['bar_entries_per_s'] / 1e6:.0f} M entries/s"
        verdict = f"{bar} {'holds' if row['holds'] else 'MISSED'}" if bar else ""
        ours, rate = f"{row['ours_s'] * 1e3:.3f} ms", f"{row['entries_per_s'] / 1e6:.1f}"
        print(f"{row['work']:<32}{ours:>11}{reference:>12}{ratio:>8}{rate:>13}  {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the JSON there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        todo = works()
    except (pytest.skip.Exception, pytest.fail.Exception) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    except AssertionError as difference:
        print(f"error: outputs differ: {str(difference)[:2000]}", file=sys.stderr)
        return 1
    rows = [measure(work, arguments.repeats) for work in todo]
    show(rows)
    result = {"compared_with": PEER, "torch": torch.__version__, "machine": platform.processor() or platform.machine()}
    text = json.dumps(result | {"rows": rows})
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
