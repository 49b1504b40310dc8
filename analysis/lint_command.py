"""`kvcanary-trace lint`: the lint of an engine's command line."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["lint"]


def lint(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE ARGUMENTS]", help="The engine's arguments, spelled as SGLang's."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what cannot work, or will not for long, before the first request.

    Example: kvcanary-trace lint --max-running-requests 5000 --cuda-graph-max-bs-decode 512

    Exit code 0: nothing found; 1: findings; 2: the arguments cannot be read.
    """
    from dataclasses import asdict
    from json import dumps

    from . import lint as rules

    report = rules.lint(arguments or [])
    if json_:
        typer.echo(
            dumps(
                {
                    "findings": [
                        {
                            "rule": finding.rule,
                            "severity": finding.severity,
                            "capacity": finding.capacity,
                            "reason": finding.reason,
                            "remedy": {
                                "value": finding.remedy_value,
                                "flag": finding.remedy_flag,
                                "advice": finding.remedy,
                            },
                            "settings": {name: asdict(setting) for name, setting in finding.settings.items()},
                        }
                        for finding in report.findings
                    ],
                    "settings": {name: asdict(setting) for name, setting in report.settings.items()},
                    "unchecked": {rule: list(missing) for rule, missing in report.unchecked.items()},
                },
                indent=2,
            )
        )
    else:
        for finding in report.findings:
            typer.echo(f"{finding.severity:9} {finding.rule}: {finding.reason}")
            typer.echo(f"{'':9} remedy: {finding.remedy}")
            typer.echo(f"{'':9} as it is: " + "; ".join(f"{name} {one}" for name, one in finding.settings.items()))
        if not report.findings:
            typer.echo(f"nothing found by {len(rules.RULES) - len(report.unchecked)} rules")
        if report.unchecked:
            missing = sorted({name for names in report.unchecked.values() for name in names})
            typer.echo(f"not checked: {len(report.unchecked)} rules, which need {', '.join(missing)}")
    if report.findings:
        raise typer.Exit(1)
