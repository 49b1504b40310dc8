"""The `kvcanary-trace` command: wires the commands of `replay/` and `analysis/` by name and loads one when it is called.

Exit codes are the same everywhere: 0 clean, 1 findings, 2 could not run. Only the answer goes to standard output.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvcanary_trace import __version__
from kvcanary_trace.errors import KvCanaryError

COULD_NOT_RUN: Final = 2

COMMANDS: Final = {
    "demo": "kvcanary_trace.replay.commands",
    "replay": "kvcanary_trace.replay.commands",
    "analyze": "kvcanary_trace.analysis.commands",
    "lint": "kvcanary_trace.analysis.lint_command",
}
"""Command → the module with a function of that name."""

TAKES_FOREIGN_OPTIONS: Final = frozenset({"lint"})
"""Commands whose arguments are another program's options."""


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = {"ignore_unknown_options": True} if cmd_name in TAKES_FOREIGN_OPTIONS else {}
        one.command(cmd_name, context_settings=settings)(getattr(import_module(COMMANDS[cmd_name]), cmd_name))
        return typer.main.get_command(one)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kvcanary-trace {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="kvcanary-trace",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Record what KV-canary kernels do at every step, and say which capacity will break.",
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    """Run the command line; an error that a user can act on is one sentence on standard error and exit code 2."""
    try:
        app()
    except KvCanaryError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader of our output left (`| head`): nothing to report, and nothing more may be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        _fail(f"cannot use{where}: {error.strerror or error}")


def _fail(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
