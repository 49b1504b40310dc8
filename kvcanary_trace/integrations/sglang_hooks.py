"""What runs around SGLang's functions. A hook hands every result and exception on, and raises nothing of its own.

The launchers tell the session what they launch; the canary manager's outer scope is the step; the scheduler tells the
work. All run on the scheduler's thread, launches of captured graphs at capture only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

from kvcanary_trace import names, steps
from kvcanary_trace.kernels import hooks
from kvcanary_trace.kernels.hooks import PlanCall, VerifyCall, WriteCall
from kvcanary_trace.schema import Mode
from kvcanary_trace.steps import step

from .sglang_load import SchedulerLoad

__all__ = ["HOOKS", "SCHEDULER", "close_opened"]

_log: Final = logging.getLogger(names.LOGGER)

_MODES: Final = {
    "EXTEND": Mode.PREFILL,
    "SPLIT_PREFILL": Mode.PREFILL,
    "DLLM_EXTEND": Mode.PREFILL,
    "DECODE": Mode.DECODE,
    "MIXED": Mode.MIXED,
    "IDLE": Mode.IDLE,
    "TARGET_VERIFY": Mode.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": Mode.DRAFT_EXTEND,
}

_ENGINE_ARGUMENTS: Final = (
    "model_path", "max_running_requests", "max_total_tokens", "max_prefill_tokens", "chunked_prefill_size", "page_size",
    "mem_fraction_static", "context_length", "schedule_policy", "enable_mixed_chunk", "disable_cuda_graph",
    "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "disable_overlap_schedule", "disable_radix_cache", "tp_size",
    "pp_size", "dp_size", "ep_size", "speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens",
    "speculative_eagle_topk", "disaggregation_mode", "kv_canary", "kv_canary_real_data", "kv_canary_sweep_interval",
)  # fmt: skip
"""Arguments of the server that go into the run file: sizes and switches, nothing that could be a secret."""


class _State:
    """One process's: the session that we opened, whose manager is whose, and what the scheduler said last."""

    def __init__(self) -> None:
        self.opened: Any = None
        self.drafts: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self.load = SchedulerLoad()
        self.local = threading.local()
        self.warned: set[str] = set()

    def warn_once(self, what: str, error: BaseException) -> None:
        """One warning for each kind of failure."""
        if what not in self.warned:
            self.warned.add(what)
            _log.warning("%s: %s: %s; the server goes on", what, type(error).__name__, error)


_state = _State()


# --- launchers --------------------------------------------------------------------------------------------------------


def plan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `launch_canary_plan_kernels`."""
    if hooks.observer is None or args:
        return original(*args, **kwargs)
    get = kwargs.get
    call = PlanCall(
        get("verify_plan_out"),  # type: ignore[arg-type]
        get("write_plan_out"),  # type: ignore[arg-type]
        get("req_pool_indices"),  # type: ignore[arg-type]
        get("prefix_lens"),  # type: ignore[arg-type]
        get("extend_seq_lens"),  # type: ignore[arg-type]
        get("req_to_token"),  # type: ignore[arg-type]
        get("full_to_swa_index_mapping"),
        get("swa_window_size", 0),
        get("verify_capacity", 0),
    )
    return hooks.observed(call, lambda: original(**kwargs))


def verify(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `launch_canary_verify_kernel`."""
    if hooks.observer is None or args:
        return original(*args, **kwargs)
    call = VerifyCall(kwargs.get("context"), kwargs.get("plan"))  # type: ignore[arg-type]
    return hooks.observed(call, lambda: original(**kwargs))


def write(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `launch_canary_write_kernel`."""
    if hooks.observer is None or args:
        return original(*args, **kwargs)
    call = WriteCall(kwargs.get("context"), kwargs.get("plan"))  # type: ignore[arg-type]
    return hooks.observed(call, lambda: original(**kwargs))


# --- steps ------------------------------------------------------------------------------------------------------------


class _Turn(step):
    """One turn of the scheduler's loop: holds the forwards of a step and is none itself."""

    __slots__ = ()

    def _numbers_used(self) -> list[int]:
        if self._used is None:
            self._used = [0, 0]
        return self._used


class _Marked:
    """SGLang's outer scope of one forward, inside our step: whatever it raises on entry belongs to the step too."""

    __slots__ = ("_inner", "_step")

    def __init__(self, step: step, inner: AbstractContextManager[Any]) -> None:
        self._step = step
        self._inner = inner

    def __enter__(self) -> Any:
        self._step.__enter__()
        try:
            return self._inner.__enter__()
        except BaseException as error:
            self._step.__exit__(type(error), error, error.__traceback__)
            _state.local.noted = error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            swallowed = self._inner.__exit__(kind, error, traceback)
        except BaseException as later:
            self._step.__exit__(type(later), later, later.__traceback__)
            _state.local.noted = later
            raise
        if swallowed:
            kind = error = traceback = None
        self._step.__exit__(kind, error, traceback)
        _state.local.noted = error
        return swallowed


def forward(original: Callable[..., AbstractContextManager[Any]], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `CanaryManager.with_ops_outside_graph`: the scope is one forward of the scheduler's step."""
    inner = original(manager, *args, **kwargs)
    if steps.open_session is None:
        return inner
    try:
        batch = kwargs.get("maybe_inaccurate_forward_batch")
        mode = _MODES.get(getattr(getattr(batch, "forward_mode", None), "name", ""), Mode.UNKNOWN)
        load: dict[str, Any] = getattr(_state.local, "load", {})
        marked = step(
            mode=mode.name.lower(),
            runner="draft" if _state.drafts.get(manager) else "target",
            **load,
        )
        return _Marked(marked, inner)
    except Exception as error:
        _state.warn_once("a forward could not be marked as a step", error)
        return inner


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.run_batch`: all forwards in it are of one step, and know the scheduler's work."""
    if steps.open_session is None:
        return original(scheduler, batch, *args, **kwargs)
    load: dict[str, Any] = _state.load.read(scheduler, batch)
    _state.local.load = load
    count = getattr(scheduler, "forward_ct", None)
    # The scheduler counts this batch in as its first deed.
    turn = _Turn(count + 1 if isinstance(count, int) else None, **load)
    turn.__enter__()
    _state.local.noted = failed = None
    try:
        return original(scheduler, batch, *args, **kwargs)
    except BaseException as error:
        if error is not _state.local.noted:  # else the forward that it comes from has it
            failed = error
        raise
    finally:
        turn.__exit__(type(failed) if failed is not None else None, failed, None)


def check(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `SingleForwardManager.pre_ops_outside_graph`: a batch that it refuses has its demand in the last row."""
    try:
        return original(manager, *args, **kwargs)
    except RuntimeError:
        try:
            session = steps.open_session
            batch = kwargs.get("maybe_inaccurate_forward_batch")
            if session is not None and batch is not None:
                session.note_refused(
                    bs=int(batch.batch_size),
                    write_entries=int(batch.positions.shape[0]),
                    write_req_capacity=getattr(manager, "_write_req_capacity", None),
                    verify_capacity=getattr(manager, "_verify_capacity", None),
                )
        except Exception as error:
            _state.warn_once("a refused batch could not be recorded", error)
        raise


# --- the session ------------------------------------------------------------------------------------------------------


def install(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `install_canary`: opens the session once a canary is there, before any graph is captured."""
    manager = original(*args, **kwargs)
    if manager is not None:
        try:
            _attach(manager, kwargs.get("model_runner"), kwargs.get("server_args"))
        except Exception as error:
            _state.warn_once("the canary is not traced", error)
    return manager


def _attach(manager: Any, model_runner: Any, server_args: Any) -> None:
    draft = bool(getattr(model_runner, "is_draft_worker", False))
    _state.drafts[manager] = draft
    capacities = getattr(manager, "_launch_capacities", None)
    rows = [
        {"capacity": capacity, "group": None, "value": int(value), "origin": "derived", "runner": runner}
        for runner in ("draft" if draft else "target",)
        for capacity, name in (
            ("verify", "per_forward_verify_capacity"),
            ("write_req", "per_forward_write_req_capacity"),
            ("write_entry", "per_forward_write_entry_capacity"),
        )
        if (value := getattr(capacities, name, None)) is not None
    ]
    session = steps.open_session
    if session is None:
        session = _open(model_runner, server_args, rows)
    else:
        session.run.capacities = [*session.run.capacities, *rows]
    entry = getattr(capacities, "per_forward_write_entry_capacity", None)
    if entry is not None and not draft:
        session.write_entry_capacity = int(entry)


def _open(model_runner: Any, server_args: Any, capacities: list[dict[str, Any]]) -> Any:
    from kvcanary_trace.opening import trace

    device = str(getattr(model_runner, "device", "cpu"))
    labels = {name: getattr(model_runner, name, None) for name in ("tp_rank", "pp_rank", "dp_rank", "gpu_id")}
    sizes = {name: int(getattr(model_runner, name, None) or 1) for name in ("tp_size", "pp_size", "dp_size")}
    tp, pp, dp = (int(labels[name] or 0) for name in ("tp_rank", "pp_rank", "dp_rank"))
    engine = {
        name: getattr(server_args, name)
        for name in _ENGINE_ARGUMENTS
        if isinstance(getattr(server_args, name, None), (str, int, float))
    }
    engine |= {name: value for name, value in labels.items() if value is not None}
    _state.opened = trace(
        rank=(dp * sizes["pp_size"] + pp) * sizes["tp_size"] + tp,
        engine={"engine": "sglang", **engine},
        capacities=capacities,
        device=device,
        # Without it a captured graph would record nothing at all.
        device_rows=True if device.startswith("cuda") and "KVCANARY_TRACE_DEVICE_ROWS" not in os.environ else None,
    )
    session = _state.opened.__enter__()
    _log.info("tracing SGLang's canary: run %s, rank %d", session.run_id, session.run.rank)
    return session


def close_opened() -> None:
    """Close the session that a hook opened, and forget what was seen."""
    global _state
    opened, _state = _state.opened, _State()
    if opened is not None:
        opened.__exit__(None, None, None)


SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler.run_batch"

HOOKS: Final[dict[str, Callable[..., Any]]] = {
    "sglang.kernels.ops.kv_canary.plan.api.launch_canary_plan_kernels": plan,
    "sglang.kernels.ops.kv_canary.verify.launch_canary_verify_kernel": verify,
    "sglang.kernels.ops.kv_canary.write.launch_canary_write_kernel": write,
    "sglang.srt.kv_canary.runner.canary_manager.CanaryManager.with_ops_outside_graph": forward,
    "sglang.srt.kv_canary.single_forward_manager.manager.SingleForwardManager.pre_ops_outside_graph": check,
    "sglang.srt.kv_canary.api.install_canary": install,
    SCHEDULER: run_batch,
}
"""Dotted target → what goes around it. All must be there but the scheduler's."""
