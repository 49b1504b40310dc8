"""What the lint says before the first request."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import kvcanary_trace as kv_canary
from kvcanary_trace.analysis.lint import RULES, LintReport, lint
from kvcanary_trace.analysis.lint_sizes import FLAGS
from kvcanary_trace.cli import app
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
    (finding,) = report.findings
    assert finding.remedy_flag == flag
    assert len(finding.remedy) > 10 and (flag is None or finding.remedy == f"{flag} {finding.remedy_value}")
    assert finding.settings and all(one.origin for one in finding.settings.values())


@pytest.mark.parametrize(
    ("rule", "sizes", "flag"),
    [pytest.param(rule, sizes, flag, id=rule) for rule, (sizes, flag) in CASES.items() if flag is not None],
)
def test_the_remedy_silences_its_rule(rule: str, sizes: dict[str, float], flag: str) -> None:
    """Where a flag is advised, the advised value is enough: the same configuration with it is clean of that rule."""
    value = lint(environment={}, **sizes).findings[0].remedy_value
    assert value is not None
    if flag == "SGLANG_KV_CANARY_RING_CAPACITY":
        after = lint(
            environment={flag: str(value)}, **{k: v for k, v in sizes.items() if k != "violation_ring_capacity"}
        )
    else:
        size = FLAGS[flag]
        after = lint([flag, str(value)], environment={}, **{k: v for k, v in sizes.items() if k != size})
    assert rule not in rules(after) and rule not in after.unchecked


def test_every_fault_that_is_promised_has_a_rule() -> None:
    """The faults that the lint is for, and no rule without a planted fault."""
    promised = {
        "request pool over 4096 rows": "request-pool-over-plan-block",
        "write capacity below the graph batch size": "graph-batch-over-write-req",
        "verify capacity against pool": "verify-below-pool",
        "verify capacity against pool x sharing": "verify-below-shared-pool",
        "draft pool smaller than target": "draft-pool-below-target",
        "entry capacity below chunked prefill": "chunk-over-write-entry",
        "entry capacity below max running x draft tokens": "draft-over-write-entry",
        "ring too small": "violation-ring-below-batch",
        "wrong lengths of offsets": "write-offsets-length",
    }
    known = [rule.id for rule in RULES]
    assert set(promised.values()) <= set(known) and len(set(known)) == len(known)
    assert set(known) == {*CASES, "request-pool-over-plan-block"}


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


def test_what_was_overridden_is_told() -> None:
    """Case 6: set by the environment, overwritten at start: the effective value, its origin, and what it replaced."""
    report = lint(
        environment={"SGLANG_KV_CANARY_RING_CAPACITY": "4096"}, violation_ring_capacity=64, write_req_capacity=256
    )
    (finding,) = report.findings
    ring = finding.settings["violation_ring_capacity"]
    assert (ring.value, ring.origin, ring.instead_of) == (64, "live", "environment 4096")
    assert str(ring) == "64 (live, instead of environment 4096)"


@pytest.mark.parametrize(
    "arguments",
    [
        "--max-running-requests 5000 --port 1 --model x",
        ["--max-running-requests=5000"],
        {"--max-running-requests": 5000, "--context-length": None},
        {"max_running_requests": 5000, "model_path": "x"},
        SimpleNamespace(max_running_requests=5000, max_total_tokens=None, model_path="x"),
    ],
    ids=["line", "words", "flags", "fields", "object"],
)
def test_arguments_however_they_come(arguments: object) -> None:
    """A command line, a mapping, or a live configuration object: one answer. None is not set."""
    report = kv_canary.lint(arguments, environment={})
    assert rules(report)[0] == "request-pool-over-plan-block"
    assert report.settings["request_pool"].origin == "argument" and "pool_tokens" not in report.settings


def test_live_buffers_are_read() -> None:
    """Plans and contexts by their shapes, launch capacities by their names; an object without a size is refused."""
    plan = SimpleNamespace(write_offsets=np.zeros(9), write_seed_slot_indices=np.zeros(9))
    context = SimpleNamespace(violation_ring=np.zeros((4, 8)))
    report = lint(live=[plan, context], environment={})
    assert rules(report) == ["write-offsets-length", "violation-ring-below-batch"]
    launch = SimpleNamespace(per_forward_verify_capacity=10, per_forward_write_entry_capacity=7)
    report = lint(["--chunked-prefill-size", "8", "--max-total-tokens", "20"], live=[launch], environment={})
    assert rules(report) == ["verify-below-pool", "chunk-over-write-entry"]
    with pytest.raises(SettingError, match="no size in an object of type object"):
        lint(live=[object()])


def test_real_plans_are_clean() -> None:
    """What `allocate` makes has the lengths that the lint wants."""
    import torch

    cpu = torch.device("cpu")
    live = [
        kv_canary.WritePlan.allocate(write_req_capacity=64, device=cpu),
        kv_canary.VerifyPlan.allocate(verify_capacity=3000, device=cpu),
    ]
    report = kv_canary.lint({"max_running_requests": 64, "max_total_tokens": 1000}, live=live, environment={})
    assert report.findings == () and "write-offsets-length" not in report.unchecked


def test_the_command_says_value_origin_and_remedy() -> None:
    """Case 4 on the command line: 5000 rows with graphs up to 512, in text and in JSON; a clean one exits with 0."""
    line = ["--max-running-requests", "5000", "--cuda-graph-max-bs-decode", "512"]
    done = CliRunner().invoke(app, ["lint", *line], env={"SGLANG_KV_CANARY_RING_CAPACITY": "8192"})
    assert done.exit_code == 1
    assert "remedy: --max-running-requests 4096" in done.stdout
    assert "write_req_capacity 5000 (derived: max(graph batch, request pool))" in done.stdout
    done = CliRunner().invoke(app, ["lint", "--json", *line], env={"SGLANG_KV_CANARY_RING_CAPACITY": "8192"})
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["remedy"]["flag"] == "--max-running-requests" and finding["remedy"]["value"] == 4096
    assert finding["settings"]["write_req_capacity"]["value"] == 5000
    done = CliRunner().invoke(
        app, ["lint", "--max-running-requests", "4096"], env={"SGLANG_KV_CANARY_RING_CAPACITY": "4096"}
    )
    assert done.exit_code == 0 and "nothing found" in done.stdout


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
