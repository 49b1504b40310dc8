"""What plan, verify and write mean: one request, one entry and one Python integer at a time. For reading.

Nothing here is shared with the kernels but the names of words and flags. The functions take the launchers' arguments,
on CPU tensors, and fill the same outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcanary_trace.kernels.layout import FailReason, RealKvHashMode, SlotField

MASK = 2**64 - 1
ANCHOR = 0xC0FFEE1234567890
PARALLEL_ANCHOR = 0xA55077A71CE5CA90


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix3(a: int, b: int, c: int) -> int:
    return splitmix64(splitmix64(splitmix64(a & MASK) ^ (b & MASK)) ^ (c & MASK))


def parallel_step(prev_hash: int, token: int, position: int) -> int:
    """A step of our own chain: an affine map that the record chooses."""
    addend = splitmix64(splitmix64((token & MASK) ^ 0x6A09E667F3BCC909) ^ (position & MASK))
    multiplier = splitmix64(addend ^ 0xBB67AE8584CAA73B) | 1
    return (multiplier * prev_hash + addend) & MASK


def is_parallel(context: Any) -> bool:
    return getattr(context, "chain", "serial") == "parallel"


def int64(x: int) -> int:
    x &= MASK
    return x - 2**64 if x >= 2**63 else x


# --- plan -----------------------------------------------------------------------------------------------------------


def translated(slot: int, mapping: Tensor | None) -> int:
    """SWA slot of a full slot; a slot past the map reads its last entry, as on a device."""
    if mapping is None or slot < 0:
        return slot
    return int(mapping[min(slot, mapping.shape[0] - 1)])


def plan_entries_of(req: int, arguments: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(slot, expected token, position, previous slot) of each entry of one request."""
    row = int(arguments["req_pool_indices"][req])
    prefix_len = int(arguments["prefix_lens"][req])
    window = arguments["swa_window_size"]
    mapping = arguments["full_to_swa_index_mapping"]
    pool = arguments["req_to_verify_expected_tokens"]
    if row == 0:
        return []
    start = max(0, prefix_len - window) if window > 0 else 0
    entries = []
    for position in range(start, prefix_len):
        slots = arguments["req_to_token"][row]
        slot = translated(int(slots[position]), mapping)
        prev_slot = translated(int(slots[position - 1]), mapping) if position > 0 else -1
        token = -1
        place = position + arguments["kv_token_id_vs_position_offset"]
        if pool is not None and 0 <= place < int(arguments["req_to_verify_expected_tokens_valid_lens"][req]):
            token = int(pool[row][place])
        entries.append((slot, token, position, prev_slot))
    return entries


def plan_oracle(
    *,
    verify_plan_out: Any,
    write_plan_out: Any,
    overflow: str = "skip",
    rotate_cursor: Tensor | None = None,
    **arguments: Any,
) -> None:
    """What `launch_canary_plan_kernels` fills."""
    rows, prefix_lens, extend_lens = (
        arguments[name].tolist() for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens")
    )
    num_reqs, capacity = len(rows), arguments["verify_capacity"]
    entries = [entry for req in range(num_reqs) for entry in plan_entries_of(req, arguments)]
    demand = len(entries)
    planned = entries
    if demand > capacity:
        planned = []
        if overflow == "rotate":
            cursor = int(rotate_cursor[0]) % demand
            planned = [entries[(cursor + i) % demand] for i in range(capacity)]
            rotate_cursor[0] = (cursor + capacity) % demand
    for i, (slot, token, position, prev_slot) in enumerate(planned):
        verify_plan_out.verify_slot_indices[i] = slot
        verify_plan_out.verify_expected_tokens[i] = token
        verify_plan_out.verify_expected_positions[i] = position
        verify_plan_out.verify_prev_slot_indices[i] = prev_slot
    verify_plan_out.verify_num_valid[0] = min(demand, capacity)
    verify_plan_out.enable[0] = 1 if demand <= capacity or overflow == "rotate" else 0

    total = 0
    write_plan_out.write_offsets.zero_()
    for req in range(num_reqs):
        write_plan_out.write_offsets[req] = total
        writes = max(0, extend_lens[req]) if rows[req] != 0 else 0
        total += writes
        seed = -1
        if writes > 0 and prefix_lens[req] > 0:
            last = int(arguments["req_to_token"][rows[req]][prefix_lens[req] - 1])
            seed = translated(last, arguments["full_to_swa_index_mapping"])
        write_plan_out.write_seed_slot_indices[req] = seed
    write_plan_out.write_offsets[num_reqs] = total
    write_plan_out.write_num_valid_reqs[0] = num_reqs


# --- verify and write -----------------------------------------------------------------------------------------------


def words_of(context: Any) -> Tensor:
    """[slots, words] int64 view of the canary buffer."""
    return context.canary_buf.view(torch.int64)


def slot_bytes(source: Any, slot: int, num_bytes: int) -> list[int]:
    row = source.tensor[slot // source.page_size].contiguous().view(torch.uint8)
    first = slot % source.page_size * source.num_bytes_per_token
    return row[first : first + num_bytes].tolist()


def fingerprint(context: Any, slot: int) -> int:
    """Fold of the slot's real K/V bytes, unsigned."""
    total = 0
    if context.real_kv_hash_mode == RealKvHashMode.NONE:
        return 0
    for source in context.real_kv_sources:
        partial = context.real_kv_hash_mode == RealKvHashMode.PARTIAL
        data = slot_bytes(source, slot, 16 if partial else source.read_bytes)
        acc = 0
        for i in range(0, len(data), 8):
            acc = splitmix64(acc ^ int.from_bytes(bytes(data[i : i + 8]), "little"))
        total = splitmix64(total ^ acc)
    return total


def successor(words: Tensor, slot: int, parallel: bool) -> int:
    """What the slot after `slot` stores as its chain hash, unsigned."""
    if slot < 0:
        return splitmix64(PARALLEL_ANCHOR if parallel else ANCHOR)
    record = words[slot].tolist()
    step = parallel_step if parallel else mix3
    return step(record[SlotField.PREV_HASH], record[SlotField.TOKEN], record[SlotField.POSITION])


def report(context: Any, row: tuple[int, ...]) -> None:
    """Append one violation, in the order of `ViolationField`, if the ring has room; count it in any case."""
    place = int(context.violation_write_index[0])
    context.violation_write_index[0] = place + 1
    if place < context.violation_ring.shape[0]:
        context.violation_ring[place] = torch.tensor(row)


def verify_oracle(*, context: Any, plan: Any, check_verify_expected_token: bool) -> None:
    """What `launch_canary_verify_kernel` does."""
    words = words_of(context)
    context.kernel_run_counter[0] += 1
    if int(plan.enable[0]) == 0:
        return
    active = max(0, min(int(plan.verify_num_valid[0]), plan.verify_slot_indices.shape[0]))
    context.slot_run_counter[0] += active
    parallel, told = is_parallel(context), None
    for i in range(active):
        slot, prev_slot = int(plan.verify_slot_indices[i]), int(plan.verify_prev_slot_indices[i])
        if slot == 0:
            continue
        token, position, prev_hash, real_kv_hash = words[slot, :4].tolist()
        wanted_token = int(plan.verify_expected_tokens[i]) if check_verify_expected_token else -1
        wanted_hash = prev_hash if prev_slot == 0 else int64(successor(words, prev_slot, parallel))
        reasons = FailReason(0)
        if prev_hash != wanted_hash:
            if prev_hash != int64(successor(words, prev_slot, not parallel)):
                reasons |= FailReason.VERIFY_CHAIN_HASH_MISMATCH
            elif told is None:
                reason = int(FailReason.VERIFY_WRONG_CHAIN)
                told = (int(context.kernel_kind), slot, position, token, -1, prev_hash, wanted_hash, reason)
        if position != int(plan.verify_expected_positions[i]):
            reasons |= FailReason.VERIFY_POSITION_MISMATCH
        if real_kv_hash != int64(fingerprint(context, slot)):
            reasons |= FailReason.VERIFY_REAL_KV_HASH_MISMATCH
        if wanted_token not in (-1, token):
            reasons |= FailReason.VERIFY_TOKEN_MISMATCH
        if reasons:
            tag = int(context.kernel_kind)
            report(context, (tag, slot, position, token, wanted_token, prev_hash, wanted_hash, int(reasons)))
    if told is not None:
        report(context, told)


def write_oracle(
    *,
    context: Any,
    plan: Any,
    input_ids: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: Tensor | None,
    expected_input_positions: Tensor | None,
) -> None:
    """What `launch_canary_write_kernel` does, request after request."""
    words = words_of(context)
    tag = int(context.kernel_kind)
    context.kernel_run_counter[0] += 1
    active = max(0, min(int(plan.write_num_valid_reqs[0]), plan.write_seed_slot_indices.shape[0]))
    for req in range(active):
        seed = int(plan.write_seed_slot_indices[req])
        parallel = is_parallel(context)
        running = successor(words, seed, parallel)
        follows = seed >= 0 and int(context.enable_chain_position_assert[0]) != 0
        before = int(words[seed, SlotField.POSITION]) if follows else 0
        for i in range(int(plan.write_offsets[req]), int(plan.write_offsets[req + 1])):
            slot, token, position = int(out_cache_loc[i]), int(input_ids[i]), int(positions[i])
            if slot < 0:
                continue
            stored = int64(running)

            if enable_write_input_assert:
                wanted = int(expected_input_tokens[i]), int(expected_input_positions[i])
                reasons = FailReason(0)
                if token != wanted[0]:
                    reasons |= FailReason.WRITE_TOKEN_MISMATCH
                if position != wanted[1]:
                    reasons |= FailReason.WRITE_POSITION_MISMATCH
                if reasons:
                    report(context, (tag, slot, position, token, wanted[0], stored, wanted[1], int(reasons)))
            if follows:
                if position != before + 1:
                    reason = int(FailReason.WRITE_POSITION_MISMATCH)
                    report(context, (tag, slot, position, token, token, stored, before + 1, reason))
                before = position
            real_kv_hash = int64(fingerprint(context, slot))
            words[slot, :4] = torch.tensor([token, position, stored, real_kv_hash])
            running = (parallel_step if parallel else mix3)(running, token, position)
            context.slot_run_counter[0] += 1
