"""What the lint says before the first request."""

from __future__ import annotations

import pytest

from kvcanary_trace.analysis.lint import LintReport, lint
from kvcanary_trace.errors import SettingError

HEALTHY = ["--max-running-requests", "256", "--cuda-graph-max-bs-decode=256", "--max-total-tokens", "400000"]


def rules(report: LintReport) -> list[str]:
    """Rule ids, worst first."""
    return [finding.rule for finding in report.findings]


def test_healthy_configuration_is_clean() -> None:
    """Nothing found, and the sizes that follow from the flags are there with their origins."""
    report = lint(["python", "-m", "sglang.launch_server", *HEALTHY], environment={})
    assert report.findings == ()
    assert report.settings["write_req_capacity"].value == 256
    assert report.settings["verify_capacity"].value == 1_200_000
    assert report.settings["verify_capacity"].origin.startswith("derived")
    assert report.settings["violation_ring_capacity"].origin == "default"


def test_request_pool_over_one_plan_launch() -> None:
    """A pool of 5000 rows with graphs up to 512: every launch of the padded batch raises."""
    report = lint(["--max-running-requests", "5000", "--cuda-graph-max-bs-decode", "512"], environment={})
    finding = report.findings[0]
    assert (finding.rule, finding.severity, finding.capacity) == (
        "request-pool-over-plan-block",
        "critical",
        "plan_block",
    )
    assert (finding.remedy_flag, finding.remedy_value) == ("--max-running-requests", 4096)
    assert "5000" in finding.reason and "4096" in finding.reason


CASES = {
    "graph-batch-over-write-req": ({"graph_max_bs": 512, "write_req_capacity": 256}, "--cuda-graph-max-bs-decode"),
    "running-requests-over-write-req": ({"request_pool": 300, "write_req_capacity": 256}, "--max-running-requests"),
    "verify-below-pool": ({"pool_tokens": 1000, "verify_capacity": 900}, None),
    "verify-below-shared-pool": ({"pool_tokens": 1000, "sharing": 3.5}, None),
    "chunk-over-write-entry": (
        {"chunked_prefill_size": 8192, "write_entry_capacity": 4096},
        "--chunked-prefill-size",
    ),
    "draft-over-write-entry": (
        {"request_pool": 64, "draft_tokens": 8, "write_entry_capacity": 256},
        "--max-running-requests",
    ),
    "draft-pool-below-target": ({"draft_pool_tokens": 500, "pool_tokens": 1000}, "--max-total-tokens"),
    "context-over-pool": ({"context_length": 2000, "pool_tokens": 1000}, "--context-length"),
    "violation-ring-below-batch": (
        {"violation_ring_capacity": 64, "write_req_capacity": 256},
        "SGLANG_KV_CANARY_RING_CAPACITY",
    ),
    "write-offsets-length": ({"write_offsets_len": 256, "write_req_capacity": 256}, None),
}


@pytest.mark.parametrize(("rule", "case"), CASES.items(), ids=CASES)
def test_rule_finds_its_fault_alone(rule: str, case: tuple[dict[str, float], str | None]) -> None:
    """Each planted fault is found by its rule, with the remedy's flag, and by no other rule."""
    sizes, flag = case
    report = lint(environment={}, **sizes)
    assert rules(report) == [rule]
    assert report.findings[0].remedy_flag == flag


def test_unknown_sizes_are_named_not_guessed() -> None:
    """A rule that lacks a size says which, instead of passing."""
    report = lint(["--max-running-requests", "64"], environment={})
    assert report.unchecked["verify-below-pool"] == ("verify_capacity", "pool_tokens")
    assert "request-pool-over-plan-block" not in report.unchecked


def test_environment_and_live_sizes_win_in_order() -> None:
    """A live size beats an argument; the ring's variable beats its default."""
    report = lint(
        ["--max-total-tokens", "1000"], environment={"SGLANG_KV_CANARY_RING_CAPACITY": "32"}, pool_tokens=2000
    )
    assert (report.settings["pool_tokens"].value, report.settings["pool_tokens"].origin) == (2000, "live")
    assert report.settings["violation_ring_capacity"].origin == "environment"


@pytest.mark.parametrize(
    ("arguments", "sizes", "match"),
    [
        (["--max-total-tokens", "many"], {}, "--max-total-tokens must be a whole number, got 'many'"),
        (["--max-total-tokens"], {}, "--max-total-tokens needs a value"),
        ([], {"write_capacity": 1}, "no size called 'write_capacity'"),
    ],
)
def test_malformed_settings_are_refused(arguments: list[str], sizes: dict[str, float], match: str) -> None:
    """One clear sentence for what cannot be read."""
    with pytest.raises(SettingError, match=match):
        lint(arguments, environment={}, **sizes)
