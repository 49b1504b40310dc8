"""Demand, limit and utilisation of each capacity as NVTX counters, submitted in batches by the drain thread.

A batch carries the rows' own times, so the counters stand where the step was, also under CUDA-graph replay, where no
Python runs and no range is pushed. Needs nvtx 0.2.16; with an older one the ranges stay and the counters are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from kvcanary_trace import names, nvtx_ranges
from kvcanary_trace.drain import RING_NUMBER_BIT
from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity

from .otel_rows import Flags, Ints, StepRows

if TYPE_CHECKING:
    from kvcanary_trace.runfile import Run

__all__ = ["NvtxCounters", "counters_of"]

_log: Final = logging.getLogger(names.LOGGER)


def counters_of(domain: Any) -> NvtxCounters | None:
    """The sink for a domain that a tool listens to; None, with one sentence in the log, where nvtx is too old."""
    nvtx = import_module("nvtx")
    wanted = ("CounterSemantics", "TimestampType", "numpy_dtype")
    if not hasattr(domain, "get_counter") or not all(hasattr(nvtx, name) for name in wanted):
        _log.warning(
            "NVTX counters are off, ranges are on: nvtx %s has no counters; pip install 'nvtx>=%s'",
            nvtx_ranges.version(),
            nvtx_ranges.COUNTERS_SINCE,
        )
        return None
    return NvtxCounters(domain, nvtx)


class NvtxCounters:
    """A sink. `open` belongs to the thread that opens the session, the rest to the drain thread."""

    def __init__(self, domain: Any, nvtx: Any) -> None:
        """Submit to `domain`, an `nvtx.Domain` that a tool listens to."""
        self._domain = domain
        self._nvtx = nvtx
        self._dtypes: dict[str, Any] = {}
        self._counters: dict[tuple[str, bool], Any] = {}
        self._off = False
        self.device_rings: Callable[[], Collection[int]] = frozenset
        """Numbers of the rings whose rows carry a device's clock."""
        self.samples = 0
        """Samples submitted so far."""

    def open(self, run: Run) -> None:
        """Nothing to prepare: counters are registered when their capacity is first measured."""

    def write(self, batches: Mapping[str, pa.RecordBatch]) -> None:
        """Submit one batch for each capacity, group and runner in which something was measured.

        An error of the tool's or of nvtx turns the counters off: offered again, the batch would be submitted twice.
        """
        batch = batches.get("steps")
        if batch is None or not batch.num_rows or self._off:
            return
        try:
            self._submit_all(StepRows(batch))
        except Exception as error:
            self._off = True
            _log.warning("NVTX counters are off from now on: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Nothing is held back."""

    def _submit_all(self, rows: StepRows) -> None:
        rings = self.device_rings()
        on_device: Flags = np.isin(rows.ints("seq") >> RING_NUMBER_BIT, list(rings)) if rings else _NO_FLAGS
        for runner, group, index in rows.series():
            for capacity in CAPACITIES:
                if capacity.grouped:
                    self._submit(rows, capacity, names.counter_name(capacity.id, runner, group), index, on_device)
        for capacity in CAPACITIES:
            if not capacity.grouped:
                first = rows.first_rows()
                self._submit(rows, capacity, names.counter_name(capacity.id, None, None), first, on_device)

    def _submit(self, rows: StepRows, capacity: Capacity, name: str, index: Ints, on_device: Flags) -> None:
        index, demand, limit = rows.load(capacity, index)
        if not len(index):
            return
        times_ns = rows.ints("time")[index]
        samples = np.empty(len(index), dtype=self._dtype(capacity.unit))
        samples["demand"], samples["limit"] = demand, limit
        np.divide(demand, limit, out=samples["utilization"])
        if len(on_device) and (device := on_device[index]).any():
            self._submit_sorted(name, samples[device], times_ns[device], device=True)
            samples, times_ns = samples[~device], times_ns[~device]
        self._submit_sorted(name, samples, times_ns, device=False)

    def _submit_sorted(self, name: str, samples: Any, times_ns: Ints, *, device: bool) -> None:
        if not len(samples):
            return
        if np.any(times_ns[1:] < times_ns[:-1]):  # several threads step; a batch without flags is taken for sorted
            order = np.argsort(times_ns, kind="stable")
            samples, times_ns = samples[order], times_ns[order]
        counter = self._counters.get((name, device))
        if counter is None:
            counter = self._counters[name, device] = self._register(name, samples.dtype, device=device)
        counter.batch_submit(samples, times_ns)
        self.samples += len(samples)

    def _register(self, name: str, dtype: Any, *, device: bool) -> Any:
        clocks = self._nvtx.TimestampType
        return self._domain.get_counter(
            name,
            dtype,
            description="demand on a capacity, its limit, and the one divided by the other",
            time_domain=clocks.GPU_GLOBALTIMER if device else clocks.CPU_CLOCK_GETTIME_REALTIME,
        )

    def _dtype(self, unit: str) -> Any:
        """One sample, with unit and bounds of each field; utilisation has no upper bound: a breach is above 1."""
        dtype = self._dtypes.get(unit)
        if dtype is None:
            until_next = self._nvtx.CounterInterpolation.UNTIL_NEXT
            semantics, field = self._nvtx.CounterSemantics, self._nvtx.numpy_dtype
            counted = semantics(unit=f"{{{unit}}}", min=0, interpolation=until_next)
            ratio = semantics(unit="1", min=0.0, interpolation=until_next)
            dtype = self._dtypes[unit] = np.dtype(
                [
                    ("demand", field(np.int64, counter_semantics=counted)),
                    ("limit", field(np.int64, counter_semantics=counted)),
                    ("utilization", field(np.float64, counter_semantics=ratio)),
                ]
            )
        return dtype


_NO_FLAGS: Final = np.zeros(0, dtype=np.bool_)
