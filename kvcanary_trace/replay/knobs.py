"""The engine's knobs, with SGLang's names, and the sizes that follow from them and from the workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from kvcanary_trace.errors import SettingError

from .workloads import Workload

__all__ = ["DEFAULT_POOL_TOKENS", "EngineKnobs", "EngineSizes", "Schedule"]

Schedule = Literal["prefill-first", "mixed"]

DEFAULT_POOL_TOKENS: Final = 200_000
_MAX_PREFILL_TOKENS: Final = 16_384  # SGLang's default: what its token buffers are sized for
_MAX_POOL_TOKENS: Final = 2**31 - 2**20
_MAX_COUNT: Final = 2**31 - 1  # plans count entries and requests in 32 bits
_MIN_CONTEXT: Final = 131_072
_VERIFY_POOLS: Final = 3  # SGLang: verify_capacity = 3 x pool tokens
_SWA_POOL_SHARE: Final = 0.8  # SGLang: swa_full_tokens_ratio


@dataclass(frozen=True, slots=True)
class EngineKnobs:
    """What a user may turn. None: derived, see `EngineSizes`.

    Raises:
        SettingError: A knob is impossible by itself.
    """

    max_running_requests: int = 64
    max_total_tokens: int | None = None
    chunked_prefill_size: int = 2048
    page_size: int = 1
    swa_window: int = 0
    schedule: Schedule = "prefill-first"
    verify_capacity: int | None = None
    write_req_capacity: int | None = None

    def __post_init__(self) -> None:
        least = {
            "max_running_requests": 1,
            "max_total_tokens": 1,
            "chunked_prefill_size": 1,
            "page_size": 1,
            "swa_window": 0,
            "verify_capacity": 1,
            "write_req_capacity": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < bound):
                raise SettingError(
                    f"--{name.replace('_', '-')} must be a whole number of at least {bound}, got {value!r}"
                )
            most = _MAX_POOL_TOKENS if name == "max_total_tokens" else _MAX_COUNT
            if value is not None and value > most:
                raise SettingError(
                    f"--{name.replace('_', '-')} must be at most {most} (slots and counts are 32-bit), got {value}"
                )
        if self.schedule not in ("prefill-first", "mixed"):
            raise SettingError(f"--schedule must be prefill-first or mixed, got {self.schedule!r}")
        if self.chunked_prefill_size % self.page_size:
            raise SettingError(
                f"--chunked-prefill-size must be a multiple of --page-size {self.page_size}, "
                f"got {self.chunked_prefill_size}"
            )
        if self.schedule == "mixed" and self.chunked_prefill_size <= self.max_running_requests:
            raise SettingError(
                f"mixed scheduling shares a chunk with every running request: --chunked-prefill-size must be above "
                f"--max-running-requests {self.max_running_requests}, got {self.chunked_prefill_size}"
            )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Every size of one run, each with where it came from.

    Attributes:
        pool_tokens: KV slots that requests may hold, a multiple of the page size; slots of page 0 are the dummy's.
        swa_pool_tokens: The same for the sliding-window group, 0 without a window.
        num_rows: Rows of `req_to_token`, row 0 (padding) included.
        context_length: Tokens that a row of `req_to_token` holds.
        origins: Size name → argument, default or derived.
    """

    pool_tokens: int
    swa_pool_tokens: int
    num_rows: int
    context_length: int
    verify_capacity: int
    write_req_capacity: int
    write_entry_capacity: int
    origins: dict[str, str]

    @classmethod
    def of(cls, knobs: EngineKnobs, workload: Workload) -> EngineSizes:
        """Derive what the user left open.

        Raises:
            SettingError: The pool cannot hold the workload's longest request.
        """
        page, longest = knobs.page_size, workload.longest
        need = -(-longest // page) * page
        if knobs.max_total_tokens is None:
            pool_tokens, pool_origin = max(DEFAULT_POOL_TOKENS // page * page, need), "default"
        else:
            pool_tokens, pool_origin = knobs.max_total_tokens // page * page, "argument"
        if pool_tokens < max(need, page):
            raise SettingError(
                f"--max-total-tokens must hold the longest request, {longest} tokens in pages of {page}: "
                f"at least {max(need, page)}, got {knobs.max_total_tokens}"
            )
        swa_pool = 0
        if knobs.swa_window:
            # At least one chunk beside every window, else nothing could run.
            least = knobs.chunked_prefill_size + knobs.swa_window + page
            swa_pool = max(int(pool_tokens * _SWA_POOL_SHARE), min(pool_tokens, least)) // page * page
        return cls(
            pool_tokens=pool_tokens,
            swa_pool_tokens=swa_pool,
            num_rows=knobs.max_running_requests + 1,
            context_length=max(_MIN_CONTEXT, 1 << max(longest * 5 // 4, 1).bit_length()),
            verify_capacity=knobs.verify_capacity or _VERIFY_POOLS * pool_tokens,
            write_req_capacity=knobs.write_req_capacity or knobs.max_running_requests,
            write_entry_capacity=max(_MAX_PREFILL_TOKENS, knobs.chunked_prefill_size, knobs.max_running_requests),
            origins={
                "pool_tokens": pool_origin,
                "context_length": "derived",
                "verify_capacity": "argument" if knobs.verify_capacity else "derived",
                "write_req_capacity": "argument" if knobs.write_req_capacity else "derived",
                "write_entry_capacity": "derived",
            },
        )

    def for_run_file(self, knobs: EngineKnobs) -> list[dict[str, Any]]:
        """The `capacities` list of a run file."""
        groups = ("full", "swa") if knobs.swa_window else ("full",)
        rows: list[dict[str, Any]] = [
            {
                "capacity": "verify",
                "group": group,
                "value": self.verify_capacity,
                "origin": self.origins["verify_capacity"],
            }
            for group in groups
        ]
        for capacity, value, origin in (
            ("write_req", self.write_req_capacity, self.origins["write_req_capacity"]),
            ("write_entry", self.write_entry_capacity, self.origins["write_entry_capacity"]),
            ("kv_pool", self.pool_tokens, self.origins["pool_tokens"]),
            ("req_to_token", self.context_length, self.origins["context_length"]),
        ):
            rows.append({"capacity": capacity, "group": None, "value": value, "origin": origin})
        return rows
