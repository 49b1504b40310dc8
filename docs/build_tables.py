"""Write the tables of `docs/record.md` from `kvcanary_trace/schema.py` and the capacities; `--check` only compares.

python docs/build_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kvcanary_trace.kernels.layout import FailReason, ProbeWord, SlotField, ViolationField
from kvcanary_trace.pressure.capacities import CAPACITIES
from kvcanary_trace.schema import TABLES, ErrorCode, HostWord, Table

PAGE = Path(__file__).with_name("record.md")

INTRO = """# The record

Generated from `kvcanary_trace/schema.py`, `kernels/layout.py` and `kvcanary_trace/pressure/capacities.py` by
`python docs/build_tables.py`; edit those, not this page. Units are UCUM. Every column except the key may be null: null
means *not measured*, and is never written as zero.
"""


def columns(table: Table) -> str:
    """One table of the dataset."""
    rows = [
        f"## `{table.name}`\n\n{table.meaning[0].upper()}{table.meaning[1:]}.\n",
        "| column | type | unit | meaning |",
        "|---|---|---|---|",
    ]
    rows += [f"| `{c.name}` | {c.type} | {c.unit} | {c.meaning.replace('|', chr(92) + '|')} |" for c in table.columns]
    return "\n".join(rows)


def _code(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags) or "none"


def capacities() -> str:
    """The capacities: what demands them, what limits them, what happens past the limit, what to change."""
    rows = ["## Capacities\n", "| id | demand | limit | past it | lever |", "|---|---|---|---|---|"]
    rows += [f"| `{c.id}` | `{c.demand}` | `{c.limit}` | {c.consequence} | {_code(c.levers)} |" for c in CAPACITIES]
    return "\n".join(rows)


def words() -> str:
    """Layouts of int64 words: slot, violation row, probe row, host row."""
    parts = ["## Words\n\nAll int64, little endian, in this order."]
    for title, enum in (
        ("canary slot", SlotField),
        ("violation row", ViolationField),
        ("probe row (device half)", ProbeWord),
        ("host row (host half)", HostWord),
    ):
        parts.append(f"- **{title}**: " + ", ".join(f"{int(word)} `{word.name.lower()}`" for word in enum))
    parts.append("- **fail-reason bits**: " + ", ".join(f"{int(bit)} `{bit.name}`" for bit in FailReason))
    parts.append("- **error codes**: " + ", ".join(f"`{member.code}`" for member in ErrorCode))
    return "\n".join(parts)


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRO.rstrip(), *(columns(table) for table in TABLES), capacities(), words()]) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is stale: run python docs/build_tables.py")
    PAGE.write_text(page())
