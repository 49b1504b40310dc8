"""The `kvcanary-trace` command: wires the commands of `replay/` and `analysis/` by name, each loaded when it is called.

Exit codes are the same everywhere: 0 clean, 1 findings, 2 could not run. Only the answer goes to standard output.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, Final, TextIO

import typer
from typer.core import TyperGroup

from kvcanary_trace import __version__, names
from kvcanary_trace.errors import KvCanaryError

COULD_NOT_RUN: Final = 2
_SIGNALLED: Final = 128  # what shells add to the number of the signal that ended a program

COMMANDS: Final = {
    "demo": "kvcanary_trace.replay.commands",
    "replay": "kvcanary_trace.replay.commands",
    "analyze": "kvcanary_trace.analysis.commands",
    "explain": "kvcanary_trace.analysis.advice_commands",
    "what-if": "kvcanary_trace.analysis.advice_commands",
    "recommend": "kvcanary_trace.analysis.advice_commands",
    "compare": "kvcanary_trace.analysis.advice_commands",
    "lint": "kvcanary_trace.analysis.lint_command",
    "export": "kvcanary_trace.analysis.export",
    "recover": "kvcanary_trace.sinks.commands",
    "watch": "kvcanary_trace.watch",
    "run": "kvcanary_trace.run_command",
}
"""Command → the module with a function of that name."""

ALIASES: Final = {"whatif": "what-if"}
"""Other spellings that people type; the help lists the first one alone."""

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "lint": {"ignore_unknown_options": True},  # its arguments are another program's options
    "run": {"ignore_unknown_options": True, "allow_interspersed_args": False},  # after the program all is its
}


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(cmd_name, context_settings=SETTINGS.get(cmd_name, {}))(
            getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        )
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
    """Run the command line; an error that a user can act on is one sentence on standard error and exit code 2.

    Any other error is a defect: its traceback stands before the sentence, and the exit code is 2 too.
    """
    sys.stdout = _OutlivesReader.in_place_of(sys.stdout)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # What a command finds is its answer; a replay's live monitor need not say it too.
    logging.getLogger(f"{names.LOGGER}.pressure").setLevel(logging.CRITICAL)
    try:
        app()
    except KvCanaryError as error:
        _fail(str(error))
    except OSError as error:
        where = f" {error.filename!r}" if error.filename else ""
        _fail(f"cannot read or write{where}: {error.strerror or error}")
    except Exception as error:
        traceback.print_exc()
        _fail(f"this is a defect of kvcanary-trace {__version__}, please report it: {type(error).__name__}: {error}")


def _exit_on_signal(number: int, _frame: object) -> None:
    """End like any error does, so that a trace seals its files first."""
    sys.exit(_SIGNALLED + number)


class _OutlivesReader(io.TextIOWrapper):
    """Standard output that outlives its reader (`| head`): the rest goes nowhere, the exit code stays the command's."""

    @classmethod
    def in_place_of(cls, stdout: TextIO | None) -> TextIO:
        """The same stream, not to be used any more by its old name; one that has no buffer of its own stays."""
        if stdout is None:  # closed by whoever started us
            return open(os.devnull, "w")
        if not isinstance(stdout, io.TextIOWrapper):
            return stdout
        encoding, errors, by_line = stdout.encoding, stdout.errors, stdout.line_buffering
        return cls(stdout.detach(), encoding=encoding, errors=errors, line_buffering=by_line)

    def write(self, text: str) -> int:
        """Write, or forget."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._forget()
            return len(text)

    def flush(self) -> None:
        """Flush, or forget."""
        try:
            super().flush()
        except BrokenPipeError:
            self._forget()
            super().flush()

    def _forget(self) -> None:
        """Lead what is buffered, and all that follows, to nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _fail(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
