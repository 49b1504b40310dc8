"""The record, written down once: ring words, Arrow columns, units and meanings.

Ring rows, Parquet files, readers and the tables in `docs/record.md` all derive from this file and from
`kernels/layout.py`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

import pyarrow as pa

from kvcanary_trace.kernels.layout import NOT_MEASURED, Group, ProbeWord, Runner, StepKind, ViolationField

SCHEMA_VERSION: Final = 1

__all__ = [
    "HOST_WORDS",
    "NOT_MEASURED",
    "REQUESTS",
    "SCHEMA_VERSION",
    "STEPS",
    "VIOLATIONS",
    "Column",
    "ErrorCode",
    "HostWord",
    "Mode",
    "Table",
]


class Mode(IntEnum):
    """What a forward does, in SGLang's words."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3
    TARGET_VERIFY = 4
    DRAFT_EXTEND = 5
    IDLE = 6


class ErrorCode(Enum):
    """Stable codes of the `error` column, with the words that name each in a message of the engine or of a launcher."""

    BS_EXCEEDS_WRITE_REQ_CAPACITY = (
        "bs-exceeds-write-req-capacity",
        "exceeds write_req_capacity=",
        "exceeds pre-allocated write_req_capacity=",  # the engine's own check, before any launch
        "exceeds static capacity",
    )
    BS_EXCEEDS_PLAN_BLOCK = ("bs-exceeds-plan-block", "supports at most bs=")
    WRITE_OFFSETS_LENGTH = ("write-offsets-length", "write_offsets_len must equal write_req_capacity + 1")
    VERIFY_CAPACITY_MISMATCH = ("verify-capacity-mismatch", "does not match verify_plan_out")
    WRITE_ENTRIES_EXCEED_CAPACITY = (
        "write-entries-exceed-capacity",
        "exceeds write_entry_capacity=",
        "exceeds pre-allocated write_entry_capacity=",
    )
    INVALID_ARGUMENT = ("invalid-argument", "kv-canary: ")
    OTHER = ("other", "")

    def __init__(self, code: str, *words: str) -> None:
        self.code = code
        self.words = words

    @classmethod
    def of(cls, message: str) -> ErrorCode:
        """The code of an error message; the most specific one whose words it has."""
        return next(member for member in cls if any(words in message for words in member.words))


class HostWord(IntEnum):
    """Words of one host-ring row, int64: what only the host knows of a forward. Key: (STEP, FORWARD, RUNNER)."""

    SEQ = 0
    STEP = 1
    FORWARD = 2
    RUNNER = 3
    TIME_NS = 4
    MODE = 5
    GRAPH_REPLAY = 6
    HOST_NS = 7
    WRITE_ENTRY_CAPACITY = 8
    KV_USED = 9
    KV_CAPACITY = 10
    RESIDENT_REQS = 11
    RESIDENT_TOKENS = 12
    WAITING_REQS = 13
    WAITING_TOKENS = 14
    ERROR = 15  # index into ErrorCode, or NOT_MEASURED
    ERROR_MESSAGE = 16  # number of the message in the session's table
    TRACE_ID_HIGH = 17
    TRACE_ID_LOW = 18
    SPAN_ID = 19
    DEVICE_ROWS = 20  # probe rows of this forward; NOT_MEASURED where the host cannot know (graph replays)
    SEQ_END = 31


HOST_WORDS: Final = 32


@dataclass(frozen=True, slots=True)
class Column:
    """One Arrow column: its type, unit and one-line meaning, and the ring word it is read from, if it is one word."""

    name: str
    type: pa.DataType
    unit: str  # UCUM; "1" for ratios and flags, "" for names
    meaning: str
    word: ProbeWord | HostWord | ViolationField | None = None
    names: type[IntEnum] | None = None  # the word is an index into these; the column holds the lower-case name
    key: bool = False  # never null

    @property
    def field(self) -> pa.Field:
        """The Arrow field, with unit and meaning in its metadata."""
        return pa.field(
            self.name, self.type, nullable=not self.key, metadata={"unit": self.unit, "meaning": self.meaning}
        )


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the dataset."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema, field metadata included."""
        return pa.schema(
            [column.field for column in self.columns], metadata={"kvcanary_trace.schema": str(SCHEMA_VERSION)}
        )

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)


_INT = pa.int64()
_NAME = pa.string()
_FLAG = pa.bool_()
_TIME = pa.timestamp("ns", tz="UTC")
_P = ProbeWord
_H = HostWord

_KEY = (
    Column("step", _INT, "{step}", "engine step, from step() or counted", _P.STEP, key=True),
    Column("forward", _INT, "{forward}", "number of the forward within its step, from 0", _P.FORWARD, key=True),
    Column("runner", _NAME, "", "target or draft (speculative decoding)", _P.RUNNER, Runner, key=True),
)
_GROUP = Column("group", _NAME, "", "buffer group: full attention or swa (sliding window)", _P.GROUP, Group)

STEPS: Final = Table(
    "steps",
    "one row for each (step, forward, runner, group); a half that never came is null",
    (
        *_KEY,
        _GROUP,
        Column("kind", _NAME, "", "forward or sweep", _P.KIND, StepKind),
        Column("seq", _INT, "{row}", "row's number in its ring (bits 40 up: the ring); a gap is a lost row", _P.SEQ),
        Column("time", _TIME, "ns", "when the row was taken: device clock, else host clock, UTC"),
        Column(
            "mode", _NAME, "", "prefill, decode, mixed, target_verify, draft_extend, idle or unknown", _H.MODE, Mode
        ),
        Column("graph_replay", _FLAG, "1", "whether the forward was a CUDA-graph replay", _H.GRAPH_REPLAY),
        Column("bs", _INT, "{request}", "active batch size: rows that are not padding; demand on write_req", _P.BS),
        Column(
            "bs_launched", _INT, "{request}", "rows as launched, padding included; demand on plan_block", _P.BS_LAUNCHED
        ),
        Column("write_req_capacity", _INT, "{request}", "requests that the write plan holds", _P.WRITE_REQ_CAPACITY),
        Column("plan_block_limit", _INT, "{request}", "rows that one plan launch takes"),
        Column(
            "write_entries", _INT, "{token}", "tokens written this forward; demand on write_entry", _P.WRITE_ENTRIES
        ),
        Column("write_entry_capacity", _INT, "{token}", "tokens the engine's buffers hold", _H.WRITE_ENTRY_CAPACITY),
        Column("verify_demand", _INT, "{entry}", "entries that should be verified, unclamped", _P.VERIFY_DEMAND),
        Column("verify_planned", _INT, "{entry}", "entries in the plan: demand clamped to capacity", _P.VERIFY_PLANNED),
        Column("verify_capacity", _INT, "{entry}", "entries that the verify plan holds", _P.VERIFY_CAPACITY),
        Column(
            "verify_enabled",
            _FLAG,
            "1",
            "false when the plan overflowed and the step goes unverified",
            _P.VERIFY_ENABLED,
        ),
        Column(
            "verify_checked",
            _INT,
            "{entry}",
            "entries really checked: the least over the group's launches",
            _P.VERIFY_CHECKED,
        ),
        Column(
            "entries_skipped",
            _INT,
            "{entry}",
            "entries left out because they lay outside a buffer or map, so far",
            _P.ENTRIES_SKIPPED,
        ),
        Column("prefix_len_max", _INT, "{token}", "longest prefix", _P.PREFIX_LEN_MAX),
        Column("prefix_len_sum", _INT, "{token}", "sum of prefixes", _P.PREFIX_LEN_SUM),
        Column("seq_len_max", _INT, "{token}", "longest prefix plus extend; demand on req_to_token", _P.SEQ_LEN_MAX),
        Column("req_to_token_width", _INT, "{token}", "tokens that a row of req_to_token holds", _P.REQ_TO_TOKEN_WIDTH),
        Column("violations", _INT, "{violation}", "violations since the ring was made", _P.VIOLATIONS),
        Column(
            "violations_new", _INT, "{violation}", "violations since the row before of this ring", _P.VIOLATIONS_NEW
        ),
        Column(
            "violation_ring_capacity", _INT, "{violation}", "violation rows kept in detail", _P.VIOLATION_RING_CAPACITY
        ),
        Column("kv_used", _INT, "{token}", "KV slots held, evictable cache excluded", _H.KV_USED),
        Column("kv_capacity", _INT, "{token}", "KV slots in the pool", _H.KV_CAPACITY),
        Column("resident_reqs", _INT, "{request}", "requests that the engine runs", _H.RESIDENT_REQS),
        Column("resident_tokens", _INT, "{token}", "their tokens so far", _H.RESIDENT_TOKENS),
        Column("waiting_reqs", _INT, "{request}", "requests queued", _H.WAITING_REQS),
        Column("waiting_tokens", _INT, "{token}", "their tokens", _H.WAITING_TOKENS),
        Column("plan_ns", _INT, "ns", "duration of the plan, to 0.4 %", _P.PLAN_NS),
        Column("verify_ns", _INT, "ns", "duration of the verify launches, to 0.4 %", _P.VERIFY_NS),
        Column("write_ns", _INT, "ns", "duration of the write launches, to 0.4 %", _P.WRITE_NS),
        Column("host_ns", _INT, "ns", "duration of step() on the host, to 0.4 %", _H.HOST_NS),
        Column("error", _NAME, "", "stable code of the error that ended the step", _H.ERROR),
        Column("error_message", _NAME, "", "its message", _H.ERROR_MESSAGE),
        Column("trace_id", _NAME, "", "OpenTelemetry trace, 32 hex digits, where a span was kept"),
        Column("span_id", _NAME, "", "OpenTelemetry span, 16 hex digits, where a span was kept"),
    ),
)

VIOLATIONS: Final = Table(
    "violations",
    "one row for each violation kept in a ring, with the key of the step that found it",
    (
        *_KEY,
        _GROUP,
        Column("time", _TIME, "ns", "time of the step's row"),
        Column("number", _INT, "{violation}", "number of the violation in its ring, from 0"),
        Column("launch_tag", _NAME, "", "launch that found it, such as HEAD_K_FULL"),
        Column("slot", _INT, "{slot}", "KV slot", ViolationField.SLOT),
        Column("position", _INT, "{token}", "stored position", ViolationField.POSITION),
        Column("token", _INT, "1", "stored token", ViolationField.TOKEN),
        Column(
            "expected_token", _INT, "1", "expected token; in verify -1 unless checked", ViolationField.EXPECTED_TOKEN
        ),
        Column("chain_hash", _INT, "1", "stored chain hash", ViolationField.CHAIN_HASH),
        Column(
            "expected_aux",
            _INT,
            "1",
            "verify: expected chain hash; write: expected position",
            ViolationField.EXPECTED_AUX,
        ),
        Column("fail_reason", _INT, "1", "reason bits", ViolationField.FAIL_REASON),
        Column("reasons", _NAME, "", "names of the reasons, joined by |"),
    ),
)

REQUESTS: Final = Table(
    "requests",
    'one row for each request of a step, with trace(detail="requests")',
    (
        *_KEY,
        _GROUP,
        Column("row", _INT, "{request}", "row of the batch"),
        Column("req_pool_idx", _INT, "{request}", "row of req_to_token; 0 is padding and not recorded"),
        Column("prefix_len", _INT, "{token}", "tokens before this forward"),
        Column("extend_len", _INT, "{token}", "tokens of this forward"),
        Column("verify_entries", _INT, "{entry}", "its share of verify_demand"),
    ),
)

TABLES: Final = (STEPS, VIOLATIONS, REQUESTS)
