"""Every word, tag and flag that kernels, buffers and traces share, written down once.

The canary slot, the violation row and the launch tags are SGLang's layout (byte for byte: either side's objects work in
the other's launchers). The probe row is ours. Nothing here imports torch.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final, Literal, NamedTuple, TypeAlias

WORD_BYTES: Final = 8

# --- the canary slot ------------------------------------------------------------------------------------------------


class SlotField(IntEnum):
    """Words of one canary slot, int64 little endian."""

    TOKEN = 0
    POSITION = 1
    PREV_HASH = 2
    REAL_KV_HASH = 3


SLOT_WORDS: Final = len(SlotField)
SLOT_BYTES: Final = SLOT_WORDS * WORD_BYTES

CHAIN_ANCHOR: Final = 0xC0FFEE1234567890
"""What a head of the serial chain is hashed from: it stores `splitmix64(CHAIN_ANCHOR)`."""

PARALLEL_CHAIN_ANCHOR: Final = 0xA55077A71CE5CA90
"""Likewise, for a head of the parallel chain: another word, so that either chain knows the other's heads."""

ChainName: TypeAlias = Literal["serial", "parallel"]
"""How a record's chain hash follows from the one before: SGLang's definition, or ours, which a scan computes."""

CHAIN_NAMES: Final[tuple[ChainName, ...]] = ("serial", "parallel")

PADDING_REQ_POOL_IDX: Final = 0
"""`req_pool_indices` value of a padding row: it contributes nothing."""

DUMMY_SLOT: Final = 0
"""The KV slot that padded tokens write to: never verified, but written."""

# --- limits of one launch -------------------------------------------------------------------------------------------

MAX_REQS_PER_LAUNCH: Final = 4096
MAX_REAL_KV_SOURCES: Final = 4
REAL_KV_ALIGN_BYTES: Final = 16
PARTIAL_READ_BYTES: Final = 16
VERIFY_OFFSETS_SCRATCH_LEN: Final = MAX_REQS_PER_LAUNCH + 1


class RealKvHashMode(IntEnum):
    """How much of a slot's real K/V bytes goes into its fingerprint."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


# --- launches and violations ----------------------------------------------------------------------------------------


class CanaryLaunchTag(IntEnum):
    """Which launch fired: (head | tail | sweep) x (K | V) x (full | SWA)."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11

    @property
    def group(self) -> Group:
        """The buffer group that this launch works on."""
        return Group.SWA if self >= CanaryLaunchTag.HEAD_K_SWA else Group.FULL

    @property
    def kind(self) -> StepKind:
        """Whether this launch belongs to a forward or to a sweep."""
        return StepKind.SWEEP if self % 6 >= CanaryLaunchTag.SWEEP_K_FULL else StepKind.FORWARD


class FailReason(IntFlag):
    """Bits of a violation row's last word. The last one is ours: SGLang's kernels never give it."""

    VERIFY_CHAIN_HASH_MISMATCH = 1
    VERIFY_POSITION_MISMATCH = 2
    VERIFY_REAL_KV_HASH_MISMATCH = 4
    WRITE_TOKEN_MISMATCH = 8
    WRITE_POSITION_MISMATCH = 16
    VERIFY_TOKEN_MISMATCH = 32
    VERIFY_WRONG_CHAIN = 64  # a row of its own: the buffer follows the chain that the context did not declare


class ViolationField(IntEnum):
    """Words of one violation row, int64."""

    LAUNCH_TAG = 0
    SLOT = 1
    POSITION = 2  # as stored
    TOKEN = 3  # as stored
    EXPECTED_TOKEN = 4  # verify: -1 unless the token was checked
    CHAIN_HASH = 5  # as stored
    EXPECTED_AUX = 6  # verify: the expected chain hash; write: the expected position
    FAIL_REASON = 7


VIOLATION_WORDS: Final = len(ViolationField)

# --- the probe row: the device half of a step's record ---------------------------------------------------------------

NOT_MEASURED: Final = -(2**63)
"""The word of a quantity that nobody measured. Becomes null in a trace, never zero."""


class Group(IntEnum):
    """A buffer group: full attention or sliding window."""

    FULL = 0
    SWA = 1


class Runner(IntEnum):
    """Whose forward it is: speculative decoding runs a draft model too."""

    TARGET = 0
    DRAFT = 1


class StepKind(IntEnum):
    """A forward's plan, or a sweep's."""

    FORWARD = 0
    SWEEP = 1


class ProbeWord(IntEnum):
    """Words of one probe row, int64. `SEQ` and `SEQ_END` belong to the ring's protocol.

    A row's key is (STEP, FORWARD, RUNNER, GROUP); units and meanings stand in `kvcanary_trace/schema.py`.
    """

    SEQ = 0
    STEP = 1
    FORWARD = 2
    RUNNER = 3
    GROUP = 4
    KIND = 5
    TIME_NS = 6
    BS = 7
    BS_LAUNCHED = 8
    WRITE_REQ_CAPACITY = 9
    WRITE_ENTRIES = 10
    VERIFY_DEMAND = 11
    VERIFY_PLANNED = 12
    VERIFY_CAPACITY = 13
    VERIFY_ENABLED = 14
    VERIFY_CHECKED = 15
    ENTRIES_SKIPPED = 16
    PREFIX_LEN_MAX = 17
    PREFIX_LEN_SUM = 18
    SEQ_LEN_MAX = 19
    REQ_TO_TOKEN_WIDTH = 20
    VIOLATIONS = 21
    VIOLATION_RING_CAPACITY = 22
    PLAN_NS = 23
    VERIFY_NS = 24
    WRITE_NS = 25
    VIOLATIONS_NEW = 26
    SEQ_END = 31


PROBE_WORDS: Final = 32
"""Row width: a power of two, so that rows never straddle more cache lines than they must."""

# --- how far a device has got: one word in host memory, readable after the device has died ---------------------------


class Phase(IntEnum):
    """What a launch of ours or of the engine's canary does."""

    PLAN = 0
    VERIFY = 1
    WRITE = 2


_RUNNER_SHIFT: Final = 2
_GROUP_SHIFT: Final = 3
PROGRESS_SHIFT: Final = 8
"""A progress word is `step << PROGRESS_SHIFT | progress_code(...)`; NOT_MEASURED until the first phase is over."""


def progress_code(runner: int, group: int, phase: int) -> int:
    """The low bits of a progress word."""
    return group << _GROUP_SHIFT | runner << _RUNNER_SHIFT | phase


class Progress(NamedTuple):
    """The last phase that a device completed."""

    step: int
    runner: Runner
    group: Group
    phase: Phase

    @classmethod
    def of(cls, word: int) -> Progress | None:
        """Read a progress word; None where no phase has been marked."""
        if word == NOT_MEASURED:
            return None
        return cls(
            word >> PROGRESS_SHIFT,
            Runner(word >> _RUNNER_SHIFT & 1),
            Group(word >> _GROUP_SHIFT & 1),
            Phase(word & (1 << _RUNNER_SHIFT) - 1),
        )

    def __str__(self) -> str:
        names = (self.phase.name, self.group.name, self.runner.name)
        phase, group, runner = (name.lower() for name in names)
        return f"{phase} of step {self.step:,}, group {group}, {runner}"
