"""What both halves of the torch backend refuse after reading a batch: the words, once."""

from __future__ import annotations

from ..checks import refusal


def row_refusal(req: int, row: int, num_rows: int) -> ValueError:
    """A request's row lies outside req_to_token."""
    return refusal(
        f"req_pool_indices[{req}] is {row}, outside req_to_token of {num_rows} rows",
        "Row 0 pads a batch; a live request's row comes from the pool that req_to_token belongs to.",
    )


def prefix_refusal(req: int, prefix_len: int, width: int) -> ValueError:
    """A prefix does not fit its row."""
    return refusal(
        f"prefix_lens[{req}] is {prefix_len}, past the end of req_to_token's rows of {width}",
        "The prefix does not fit its row: raise SGLang's --context-length, or look for a stale length.",
    )


def map_refusal(slot: int, map_len: int) -> ValueError:
    """A slot has no entry in the SWA map."""
    return refusal(
        f"SWA slot {slot} is outside full_to_swa_index_mapping length {map_len}",
        "req_to_token holds a slot that the mapping does not know: the two belong to different pools, or it is stale.",
    )


def token_row_refusal(req: int, row: int, num_rows: int) -> ValueError:
    """A request's row lies outside the pool of expected tokens."""
    return refusal(
        f"req_pool_indices[{req}] is {row}, outside req_to_verify_expected_tokens of {num_rows} rows",
        "The pool of expected tokens needs a row for each row of req_to_token.",
    )


def token_width_refusal(req: int, needed: int, width: int) -> ValueError:
    """A request's expected tokens do not fit their row."""
    return refusal(
        f"req_to_verify_expected_tokens_valid_lens[{req}] asks for {needed} tokens of a row of {width}",
        "valid_lens must not exceed the width of req_to_verify_expected_tokens.",
    )


def offsets_refusal(reason: str) -> ValueError:
    """Offsets that do not describe the batch."""
    return refusal(
        f"verify_offsets_scratch {reason}",
        "Pass the scratch that launch_plan_offsets_kernel filled for this very batch and window.",
    )


def slot_refusal(name: str, slot: int, num_slots: int) -> ValueError:
    """A slot lies outside the canary buffer."""
    return refusal(
        f"{name} has slot {slot}, outside canary_buf of {num_slots} slots",
        "The plan and the buffer belong to different pools, or a slot is stale.",
    )


def source_refusal(slot: int, source_idx: int, num_rows: int, page_size: int) -> ValueError:
    """A slot lies outside a source."""
    return refusal(
        f"slot {slot} is outside real_kv_sources[{source_idx}], which has {num_rows} rows of {page_size} slots",
        "The sources must cover every slot that the canary buffer's launches touch.",
    )


def write_offsets_refusal(req: int, first: int, last: int, num_tokens: int) -> ValueError:
    """A request's tokens lie outside the token arrays."""
    return refusal(
        f"plan.write_offsets gives request {req} the tokens [{first}, {last}), outside input_ids of {num_tokens}",
        "Write with the token arrays of the batch that was planned.",
    )
