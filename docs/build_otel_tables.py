"""Write the tables of `docs/opentelemetry.md` from `kvcanary_trace/sinks/otel_names.py`; `--check` only compares.

python docs/build_otel_tables.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvcanary_trace.sinks import otel_names

PAGE = Path(__file__).with_name("opentelemetry.md")


def spans() -> str:
    """Spans, and the columns that each carries."""
    columns = {
        otel_names.SPAN_STEP: "those below",
        **{
            name: ", ".join(f"`{otel_names.attribute(column)}`" for column in of_phase)
            for name, of_phase in otel_names.PHASE_COLUMNS.items()
        },
    }
    rows = ["| span | is | attributes beside step, forward, runner and group |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {what} | {columns[name]} |" for name, what in otel_names.SPANS.items())])


def events() -> str:
    """Events and log records."""
    rows = ["| event | is |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {what} |" for name, what in otel_names.EVENTS.items())])


def attributes() -> str:
    """All attributes."""
    rows = ["| attribute | unit | meaning |", "|---|---|---|"]
    for one in otel_names.ATTRIBUTES:
        name = f"`{one.name}`"
        if one.grouped:
            name += f", `{one.name.replace('kv_canary.', 'kv_canary.<group>.')}` on a step"
        rows.append(f"| {name} | {one.unit} | {one.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def metrics() -> str:
    """All metrics."""
    rows = ["| metric | kind | unit | meaning | by |", "|---|---|---|---|---|"]
    rows += [
        f"| `{one.name}` | {one.kind.replace('_', ' ')} | {one.unit} | {one.meaning} | "
        f"{', '.join(f'`{name}`' for name in one.attributes) or 'rank alone'} |"
        for one in otel_names.METRICS
    ]
    return "\n".join(rows)


def built(page: str) -> str:
    """The page with its tables made anew."""
    for make in (spans, events, attributes, metrics):
        name = make.__name__
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, found = re.subn(pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], page, flags=re.DOTALL)  # type: ignore[misc]
        assert found == 1, f"{PAGE} has no table {name}"
    return page


def main() -> int:
    """Write the page, or with --check say whether it is as it should be."""
    page = PAGE.read_text()
    if "--check" in sys.argv:
        if built(page) != page:
            print(f"{PAGE} is not what the code says; run python docs/build_otel_tables.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(built(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
