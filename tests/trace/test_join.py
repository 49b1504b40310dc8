"""The join of device and host halves: each half comes out once, with its partner if that ever came."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_trace.join import Joined, Joiner
from kvcanary_trace.kernels.layout import ProbeWord
from kvcanary_trace.ring import ROW_WORDS, Words
from kvcanary_trace.schema import NOT_MEASURED, HostWord


def device_row(step: int, group: int = 0, forward: int = 0, runner: int = 0) -> list[int]:
    row = [NOT_MEASURED] * ROW_WORDS
    row[ProbeWord.STEP], row[ProbeWord.FORWARD], row[ProbeWord.RUNNER] = step, forward, runner
    row[ProbeWord.GROUP], row[ProbeWord.BS] = group, 10 * step + group
    return row


def host_row(step: int, expected: int, forward: int = 0, runner: int = 0) -> list[int]:
    row = [NOT_MEASURED] * ROW_WORDS
    row[HostWord.STEP], row[HostWord.FORWARD], row[HostWord.RUNNER] = step, forward, runner
    row[HostWord.KV_USED], row[HostWord.DEVICE_ROWS] = 1000 + step, expected
    return row


def words(rows: list[list[int]]) -> Words:
    return np.array(rows, dtype=np.int64).reshape(-1, ROW_WORDS)


def pairs(joined: Joined) -> list[tuple[int | None, int | None]]:
    """(BS, KV_USED) of each row, None for a missing half."""
    return [
        (int(d[ProbeWord.BS]) if has_d else None, int(h[HostWord.KV_USED]) if has_h else None)
        for d, h, has_d, has_h in zip(joined.device, joined.host, joined.has_device, joined.has_host, strict=True)
    ]


def test_one_host_half_meets_all_groups() -> None:
    """Both groups of a forward carry the same host facts; nothing waits afterwards."""
    joiner = Joiner()
    got = joiner.join(words([device_row(4, 0), device_row(4, 1)]), words([host_row(4, 2)]))
    assert pairs(got) == [(40, 1004), (41, 1004)]
    assert joiner.pending == 0 and joiner.unmatched == 0


def test_a_device_half_that_comes_later_finds_its_host_half() -> None:
    """Across calls, and with a second group still later."""
    joiner = Joiner()
    assert len(joiner.join(words([]), words([host_row(4, 2)]))) == 0
    assert pairs(joiner.join(words([device_row(4, 0)]), words([]))) == [(40, 1004)]
    assert pairs(joiner.join(words([device_row(4, 1)]), words([]))) == [(41, 1004)]
    assert joiner.pending == 0 and joiner.unmatched == 0


def test_a_missing_half_is_null_and_counted() -> None:
    """After a while each half comes out alone, all words of the other half unmeasured."""
    joiner = Joiner(max_age_joins=2)
    out = [pairs(joiner.join(words([device_row(1)]), words([host_row(2, 1)])))]
    out += [pairs(joiner.join(words([]), words([]))) for _ in range(3)]
    assert out == [[], [], [(10, None), (None, 1002)], []]
    assert joiner.unmatched == 2


def test_a_forward_without_launches_is_a_row_and_no_loss() -> None:
    """An idle step says that it has no device rows: it comes out at once."""
    joiner = Joiner()
    assert pairs(joiner.join(words([]), words([host_row(3, 0)]))) == [(None, 1003)]
    assert joiner.unmatched == 0 and joiner.pending == 0


def test_unknown_number_of_device_rows() -> None:
    """A graph replay's host half waits for as many device halves as come; none coming is a loss."""
    joiner = Joiner(max_age_joins=1)
    got = joiner.join(words([device_row(1, 0)]), words([host_row(1, NOT_MEASURED), host_row(2, NOT_MEASURED)]))
    assert pairs(got) == [(10, 1001)]
    assert pairs(joiner.join(words([device_row(1, 1)]), words([]))) == [(11, 1001), (None, 1002)]
    assert joiner.unmatched == 1 and joiner.pending == 0


def test_pending_halves_are_bounded() -> None:
    """The oldest go first."""
    joiner = Joiner(max_pending_rows=3, max_age_joins=100)
    got = joiner.join(words([device_row(step) for step in range(5)]), words([]))
    assert pairs(got) == [(0, None), (10, None)]
    assert joiner.pending == 3 and joiner.unmatched == 2


KEYS = st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1))


@settings(max_examples=150, deadline=None)
@given(
    forwards=st.dictionaries(KEYS, st.tuples(st.integers(0, 2), st.booleans()), max_size=8),
    data=st.data(),
)
def test_equals_a_join_by_hand(forwards: dict[tuple[int, int, int], tuple[int, bool]], data: st.DataObject) -> None:
    """In whatever order and in however many calls the halves come, the rows are those of a join by dictionary."""
    halves: list[tuple[str, list[int]]] = []
    expected: dict[tuple[int, int, int], list[tuple[int | None, int | None]]] = defaultdict(list)
    for (step, forward, runner), (num_groups, has_host) in forwards.items():
        for group in range(num_groups):
            halves.append(("device", device_row(step, group, forward, runner)))
            expected[step, forward, runner].append((10 * step + group, 1000 + step if has_host else None))
        if has_host:
            halves.append(("host", host_row(step, num_groups, forward, runner)))
            if not num_groups:
                expected[step, forward, runner].append((None, 1000 + step))
    halves = data.draw(st.permutations(halves))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(halves)), max_size=3)))
    joiner = Joiner()
    got: dict[tuple[int, int, int], list[tuple[int | None, int | None]]] = defaultdict(list)
    ends = [*cuts, len(halves)]
    for at, end in enumerate(ends):
        part = halves[ends[at - 1] if at else 0 : end]
        joined = joiner.join(
            words([row for kind, row in part if kind == "device"]),
            words([row for kind, row in part if kind == "host"]),
            last=at == len(ends) - 1,
        )
        for pair, device, host, has_device in zip(
            pairs(joined), joined.device, joined.host, joined.has_device, strict=True
        ):
            key = (device if has_device else host)[1:4].tolist()
            got[key[0], key[1], key[2]].append(pair)
    assert {key: sorted(value, key=str) for key, value in got.items()} == {
        key: sorted(value, key=str) for key, value in expected.items() if value
    }
    assert joiner.pending == 0
