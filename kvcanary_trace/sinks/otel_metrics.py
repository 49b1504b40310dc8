"""Metrics from drained rows: gauges of every capacity, counters, histograms of durations, and our own losses.

Sums are made with numpy, once a flush, so that a counter costs the same for ten rows and for ten thousand.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation

from kvcanary_trace.pressure.capacities import CAPACITIES
from kvcanary_trace.schema import NOT_MEASURED

from . import otel_names as n
from .otel_rows import Ints, StepRows

__all__ = ["Metrics"]

PEAK_WINDOW_S: Final = 60.0
MAX_DURATIONS_PER_FLUSH: Final = 256
MAX_DURATIONS_PER_SECOND: Final = 400
"""Measurements of histograms. Each costs the SDK some 50 µs of the interpreter lock, which the engine's thread waits
for. Past either, every k-th row is measured."""

_PHASE_COLUMNS: Final = {"plan": "plan_ns", "verify": "verify_ns", "write": "write_ns"}
_EMPTY: Final = Context()

Series = tuple[tuple[str, str], ...]
_Losses = Callable[[], Mapping[str, int]]


class _Instruments:
    """All instruments of one meter provider. A provider keeps instruments for good, so sessions share them."""

    def __init__(self, provider: Any) -> None:
        from kvcanary_trace import __version__

        meter = provider.get_meter(n.SCOPE, __version__)
        self.source: Metrics | None = None
        self.made: dict[str, Any] = {}
        for metric in n.METRICS:
            about = {"unit": metric.unit, "description": metric.meaning}
            if metric.kind == "gauge":
                self.made[metric.name] = meter.create_observable_gauge(
                    metric.name, [self._callback(metric.name)], **about
                )
            elif metric.kind == "observable_counter":
                self.made[metric.name] = meter.create_observable_counter(
                    metric.name, [self._callback(metric.name)], **about
                )
            elif metric.kind == "counter":
                self.made[metric.name] = meter.create_counter(metric.name, **about)
            else:
                self.made[metric.name] = meter.create_histogram(
                    metric.name, explicit_bucket_boundaries_advisory=list(n.DURATION_BUCKETS_S), **about
                )

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            source = self.source
            return [] if source is None else source.observe(name)

        return observe


_shared: Final[weakref.WeakKeyDictionary[Any, _Instruments]] = weakref.WeakKeyDictionary()


class Metrics:
    """The metrics of one session. `observe` is called by threads that collect, all else by the drain thread."""

    def __init__(self, provider: Any, rank: int, losses: _Losses, *, own: bool) -> None:
        """Emit to `provider`; `own` says that it is gone with this session."""
        found = None if own else _shared.get(provider)
        if found is None:
            found = _Instruments(provider)
            if not own:
                _shared[provider] = found
        self._instruments = found
        self._pid = os.getpid()
        self._losses = losses
        self._base: Series = ((n.RANK, rank),)  # type: ignore[assignment]
        self._latest: dict[str, dict[Series, float]] = {}
        self._peaks: dict[Series, deque[tuple[float, float]]] = {}
        self._seen_peaks: dict[Series, tuple[tuple[float, float], ...]] = {}
        self._last_steps: Ints = np.empty(0, dtype=np.int64)
        self._unrecorded = 0
        self._measured_s = time.monotonic() - 1.0
        self.durations_skipped = 0
        found.source = self

    def close(self) -> None:
        """Let go of the instruments; the next session takes them."""
        if self._instruments.source is self:
            self._instruments.source = None

    # --- collecting threads -----------------------------------------------------------------------------------------

    def observe(self, name: str) -> list[Observation]:
        """What a gauge, or the counter of losses, shows now."""
        if os.getpid() != self._pid:
            return []  # a forked child's copy of the parent's numbers
        if name == n.LOSSES_METRIC.name:
            return [
                Observation(value, dict(self._series(**{n.LOSS: loss})))
                for loss, value in sorted(self._losses().items())
            ]
        if name == n.PEAK_METRIC.name:
            since = time.monotonic() - PEAK_WINDOW_S
            recent = {
                series: [value for at, value in peaks if at >= since] for series, peaks in self._seen_peaks.items()
            }
            return [Observation(max(values), dict(series)) for series, values in recent.items() if values]
        return [Observation(value, dict(series)) for series, value in self._latest.get(name, {}).items()]

    # --- drain thread -----------------------------------------------------------------------------------------------

    def take(self, rows: StepRows | None, violations: pa.RecordBatch | None, contexts: Mapping[int, Context]) -> None:
        """Count new rows; `contexts` are those of the spans that were kept, by row, for exemplars."""
        if rows is not None and len(rows):
            self._take_loads(rows)
            self._take_verification(rows)
            self._take_steps(rows)
            self._take_durations(rows, contexts)
        if violations is not None and violations.num_rows:
            for item in pc.value_counts(violations.column("reasons")).to_pylist():
                self._add(n.VIOLATIONS_METRIC, item["counts"], **{n.REASONS: item["values"] or "none"})
        lost = self._losses().get("violations_lost", 0)
        if lost > self._unrecorded:
            self._add(n.VIOLATIONS_METRIC, lost - self._unrecorded, **{n.REASONS: "unrecorded"})
            self._unrecorded = lost

    def _series(self, **attributes: Any) -> Series:
        return (*self._base, *((name, value) for name, value in attributes.items() if value is not None))

    def _add(self, metric: n.Metric, amount: int, **attributes: Any) -> None:
        if amount > 0:
            self._instruments.made[metric.name].add(amount, dict(self._series(**attributes)))

    def _take_loads(self, rows: StepRows) -> None:
        everything = np.arange(len(rows))
        now = time.monotonic()
        latest = {name: dict(values) for name, values in self._latest.items()}
        for capacity in CAPACITIES:
            several = rows.series() if capacity.grouped else [(None, None, everything)]
            for runner, group, indices in several:
                _, demand, limit = rows.load(capacity, indices)
                if not len(demand):
                    continue
                of_series = {_RUNNER: runner, _GROUP: group}
                series = self._series(**of_series)
                whole = self._series(**{n.CAPACITY: capacity.id}, **of_series)
                last_demand, last_limit = int(demand[-1]), int(limit[-1])
                for name, key, value in (
                    (n.demand_name(capacity), series, last_demand),
                    (n.limit_name(capacity), series, last_limit),
                    (n.headroom_name(capacity), series, last_limit - last_demand),
                    (n.UTILIZATION_METRIC.name, whole, last_demand / last_limit),
                ):
                    latest.setdefault(name, {})[key] = value
                peaks = self._peaks.setdefault(whole, deque())
                peaks.append((now, float((demand / limit).max())))
        for peaks in self._peaks.values():
            while peaks and peaks[0][0] < now - PEAK_WINDOW_S:
                peaks.popleft()
        # Replaced, never changed: other threads read them meanwhile.
        self._latest = latest
        self._seen_peaks = {series: tuple(peaks) for series, peaks in self._peaks.items()}

    def _take_verification(self, rows: StepRows) -> None:
        enabled, failed = rows.ints("verify_enabled"), rows.has("error")
        demand, checked = rows.ints("verify_demand"), rows.ints("verify_checked")
        for runner, group, indices in rows.series():
            of_series = {_RUNNER: runner, _GROUP: group}
            overflowed = int((enabled[indices] == 0).sum())
            errors = int((failed[indices] & (enabled[indices] != 0)).sum())
            self._add(n.UNVERIFIED_METRIC, overflowed, **{n.REASON: "overflow"}, **of_series)
            self._add(n.UNVERIFIED_METRIC, errors, **{n.REASON: "error"}, **of_series)
            known = indices[(demand[indices] != NOT_MEASURED) & (checked[indices] != NOT_MEASURED)]
            verified = int(checked[known].sum())
            self._add(n.ENTRIES_METRIC, verified, **{n.OUTCOME: "verified"}, **of_series)
            missed = int(np.maximum(demand[known] - checked[known], 0).sum())
            # Nothing was checked where the launch never came: after an overflow nobody waits for one.
            lost = indices[(demand[indices] != NOT_MEASURED) & (checked[indices] == NOT_MEASURED)]
            lost = lost[(enabled[lost] == 0) | failed[lost]]
            self._add(n.ENTRIES_METRIC, missed + int(demand[lost].sum()), **{n.OUTCOME: "unverified"}, **of_series)

    def _take_steps(self, rows: StepRows) -> None:
        steps, first = np.unique(rows.ints("step"), return_index=True)
        new = ~np.isin(steps, self._last_steps)
        self._last_steps = steps
        self._count(n.STEPS_METRIC, _MODE, rows.names("mode"), first[new])
        forwards = rows.first_rows()
        self._count(n.ERRORS_METRIC, n.ERROR_TYPE, rows.names("error"), forwards)

    def _count(self, metric: n.Metric, attribute: str, names: tuple[Ints, list[str]], rows: Ints) -> None:
        codes, texts = names
        picked = codes[rows]
        for code, count in enumerate(np.bincount(picked[picked >= 0], minlength=len(texts))):
            self._add(metric, int(count), **{attribute: texts[code]})
        if metric is n.STEPS_METRIC:
            self._add(metric, int((picked < 0).sum()), **{attribute: "unknown"})

    def _take_durations(self, rows: StepRows, contexts: Mapping[int, Context]) -> None:
        forwards = rows.first_rows()
        modes, mode_names = rows.names("mode")
        groups, group_names = rows.names("group")
        wanted = len(forwards) + len(_PHASE_COLUMNS) * len(rows)
        now = time.monotonic()
        fair = int(MAX_DURATIONS_PER_SECOND * (now - self._measured_s))
        self._measured_s = now
        stride = -(-wanted // max(1, min(MAX_DURATIONS_PER_FLUSH, fair)))
        self._record_all(
            n.STEP_DURATION_METRIC, rows.ints("host_ns"), forwards, stride, contexts, _MODE, modes, mode_names, {}
        )
        everything = np.arange(len(rows))
        for phase, column in _PHASE_COLUMNS.items():
            self._record_all(
                n.PHASE_DURATION_METRIC,
                rows.ints(column),
                everything,
                stride,
                contexts,
                _GROUP,
                groups,
                group_names,
                {n.PHASE: phase},
            )

    def _record_all(
        self,
        metric: n.Metric,
        values: Ints,
        indices: Ints,
        stride: int,
        contexts: Mapping[int, Context],
        attribute: str,
        codes: Ints,
        texts: list[str],
        fixed: Mapping[str, str],
    ) -> None:
        record = self._instruments.made[metric.name].record
        indices = indices[values[indices] >= 0]
        if stride > 1:
            kept = np.zeros(len(values), dtype=np.bool_)
            kept[indices[::stride]] = True
            kept[[row for row in contexts if values[row] >= 0]] = True
            picked = indices[kept[indices]]
            self.durations_skipped += len(indices) - len(picked)
            indices = picked
        by_code = [dict(self._series(**fixed, **{attribute: text})) for text in texts]
        by_code.append(dict(self._series(**fixed)))  # code -1: no name
        for row in indices.tolist():
            record(int(values[row]) * 1e-9, by_code[codes[row]], contexts.get(row, _EMPTY))


_RUNNER: Final = n.attribute("runner")
_GROUP: Final = n.attribute("group")
_MODE: Final = n.attribute("mode")
