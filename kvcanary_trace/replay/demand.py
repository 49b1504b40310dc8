"""What a batch demands of the canaries, computed from its lengths alone: the rows of `--kernels off`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from kvcanary_trace.kernels.layout import MAX_REQS_PER_LAUNCH

from .batch import Batch
from .knobs import EngineSizes

if TYPE_CHECKING:
    from kvcanary_trace.session import Session

__all__ = ["DemandRecorder", "launch_error"]

_NS_PER_S: Final = 1_000_000_000


def launched_bs(batch: Batch, sizes: EngineSizes) -> int:
    """Rows that the plan is launched with: padded to the write capacity, or the batch itself if it is larger."""
    return max(batch.bs, sizes.write_req_capacity)


def launch_error(batch: Batch, sizes: EngineSizes) -> str | None:
    """The sentence with which the launcher would refuse the batch, or None."""
    bs = launched_bs(batch, sizes)
    if bs > MAX_REQS_PER_LAUNCH:
        what = "kv-canary: launch_canary_plan_kernels"
        return f"{what} supports at most bs={MAX_REQS_PER_LAUNCH} reqs per launch, got bs={bs}"
    if bs > sizes.write_req_capacity:
        return f"kv-canary: bs={bs} exceeds write_req_capacity={sizes.write_req_capacity}"
    return None


class DemandRecorder:
    """Writes a batch's rows straight into a session: one per group, as the kernels would have had them recorded."""

    def __init__(
        self,
        session: Session,
        sizes: EngineSizes,
        *,
        window: int,
        overflow: Literal["skip", "rotate"],
        chunk_refused: bool,
        start_ns: int,
    ) -> None:
        self._session = session
        self._sizes = sizes
        self._window = window
        self._chunks = chunk_refused
        self._rotate = overflow == "rotate"
        self._start_ns = start_ns

    def record(self, batch: Batch) -> str | None:
        """Record one batch; returns the sentence with which a launcher would have refused it, or None."""
        sizes, capacity = self._sizes, self._sizes.verify_capacity
        message = launch_error(batch, sizes)
        longest = int(batch.prefix_lens.max())
        common: dict[str, Any] = {
            "step": batch.step,
            "mode": batch.mode,
            "time_ns": self._start_ns + int(batch.start_s * _NS_PER_S),
            "bs": batch.bs,
            "bs_launched": launched_bs(batch, sizes),
            "write_req_capacity": sizes.write_req_capacity,
            "write_entries": batch.num_tokens,
            "verify_capacity": capacity,
            "prefix_len_max": longest,
            "prefix_len_sum": batch.num_entries,
            "seq_len_max": longest + 1
            if batch.mode == "decode"
            else int((batch.prefix_lens + batch.extend_seq_lens).max()),
            "req_to_token_width": sizes.context_length,
            "kv_used": batch.kv_used,
            "kv_capacity": batch.kv_capacity,
            "resident_reqs": batch.resident_reqs,
            "resident_tokens": batch.resident_tokens,
            "waiting_reqs": batch.waiting_reqs,
            "waiting_tokens": batch.waiting_tokens,
        }
        demands: list[tuple[Literal["full", "swa"], int]] = [("full", batch.num_entries)]
        if self._window:
            demands.append(("swa", batch.window_entries(self._window)))
        record = self._session.record
        if message is not None:
            # The first group's launch is refused. Running in chunks is one more forward of the step, for all groups.
            record(**common, verify_demand=batch.num_entries, error_message=message)
            if not self._chunks:
                return message
        forward = 0 if message is None else 1
        for group, demand in demands:
            record(
                **common,
                forward=forward,
                group=group,
                verify_demand=demand,
                verify_planned=min(demand, capacity),
                verify_enabled=self._rotate or demand <= capacity,
            )
        return message
