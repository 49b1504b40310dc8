"""Check that every metric, label, span and attribute named in this folder exists.

    python check_names.py [FILE ...]

Prints what is unknown and exits 1, or says how many names were checked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvcanary_trace.sinks import otel_names

HERE = Path(__file__).parent
FILES = ("dashboard.json", "alerts.yaml", "collector.yaml", "jaeger.yaml", "prometheus.yaml", "README.md")
HISTOGRAM_SERIES = ("", "_bucket", "_count", "_sum")
OTHERS = {"kv_canary"}  # the name of the alert group


def prometheus_names(metric: otel_names.Metric) -> set[str]:
    """What Prometheus may call a metric: translated from OTLP, or scraped from the SDK's own reader."""
    name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
    if metric.kind == "histogram":
        return {name + series for series in HISTOGRAM_SERIES}
    if metric.kind in ("counter", "observable_counter"):
        return {name + "_total"}
    return {name, name + "_ratio"} if metric.unit == "1" else {name}


def known_names() -> set[str]:
    """Every name that may stand in a configuration, a query or a rule."""
    dotted = {metric.name for metric in otel_names.METRICS} | {one.name for one in otel_names.ATTRIBUTES}
    dotted |= set(otel_names.SPANS) | set(otel_names.EVENTS)
    labels = {one.name.replace(".", "_") for one in otel_names.ATTRIBUTES}
    return dotted | labels | OTHERS | {name for metric in otel_names.METRICS for name in prometheus_names(metric)}


def named_in(text: str) -> set[str]:
    """Every name of ours in a text."""
    return set(re.findall(r"\b(?:kv_canary|error)[._][a-z_.]*[a-z]", text)) | set(
        re.findall(r"\bkv_canary\b(?![._-])", text)
    )


def main(arguments: list[str]) -> int:
    """Check files, those beside this one when none is given."""
    paths = [Path(argument) for argument in arguments] or [HERE / name for name in FILES]
    known, checked, failed = known_names(), 0, False
    for path in paths:
        for name in sorted(named_in(path.read_text())):
            checked += 1
            if name not in known:
                print(f"{path.name}: {name} is no name that the OpenTelemetry sink emits", file=sys.stderr)
                failed = True
    if not failed:
        print(f"{checked} names in {len(paths)} files, all known")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
