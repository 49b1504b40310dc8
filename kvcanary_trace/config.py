"""Settings: arguments beat `KVCANARY_TRACE_*` variables, which beat defaults; each value keeps its origin."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from .errors import SettingError

Origin = Literal["argument", "environment", "default"]

PREFIX: Final = "KVCANARY_TRACE_"

SWITCH: Final = "KVCANARY_TRACE"
"""The variable that switches tracing on in programs that know nothing of it; `KVCANARY_TRACE_DIR` does too."""

OTHERS: Final = ("BACKEND",)
"""Variables of the same prefix that other parts read."""


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting's value and where it came from."""

    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how its text is read, what it may be, what it is by default."""

    name: str
    parse: Callable[[Any], Any]
    accepted: str
    default: Any
    fallback_variable: str | None = None  # a variable of the launcher's own, read when ours is unset

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(value)
        number = int(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    return parse


def _seconds(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number) or not 0.001 <= number <= 86_400:
        raise ValueError(value)
    return number


def _switch(value: Any) -> bool:
    words = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
    return value if isinstance(value, bool) else words[str(value).lower()]


def _otel(value: Any) -> bool | None:
    return None if value is None or value in ("", "auto") else _switch(value)


def _detail(value: Any) -> str | None:
    if value is None or value in ("", "none"):
        return None
    if value != "requests":
        raise ValueError(value)
    return "requests"


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None or value == "" else parse(value)


SETTINGS: Final = (
    Setting("dir", str, "a directory", "traces"),
    Setting("run", _optional(str), "a run id that starts with a letter", None),
    Setting("rank", _integer(0, 1 << 20), "an integer from 0", 0, "RANK"),
    Setting("world_size", _integer(1, 1 << 20), "an integer from 1", 1, "WORLD_SIZE"),
    Setting("flush_interval_s", _seconds, "seconds from 0.001 to 86400", 1.0),
    Setting("part_rows", _integer(1, 100_000_000), "an integer from 1 to 100000000", 200_000),
    Setting("part_seconds", _seconds, "seconds from 0.001 to 86400", 60.0),
    Setting("ring_rows", _integer(2, 1 << 24), "an integer from 2 to 16777216", 65_536),
    Setting("detail", _detail, "none or requests", None),
    Setting("write_entry_capacity", _optional(_integer(1, 1 << 62)), "an integer from 1", None),
    Setting("nvtx", _switch, "1, 0, true, false, on, off, yes or no", True),
    Setting("device_rows", _switch, "1, 0, true, false, on, off, yes or no", False),
    Setting("device_times", _switch, "1, 0, true, false, on, off, yes or no", False),
    Setting("black_box", _switch, "1, 0, true, false, on, off, yes or no", False),
    Setting("pressure", _switch, "1, 0, true, false, on, off, yes or no", True),
    Setting("otel", _otel, "auto, 1, 0, true, false, on, off, yes or no", None),
)
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks to trace a program that does not ask for it itself.

    Raises:
        SettingError: `KVCANARY_TRACE` says neither yes nor no.
    """
    environ = os.environ if environ is None else environ
    asked = environ.get(SWITCH)
    if not asked:
        return bool(environ.get(PREFIX + "DIR"))
    try:
        return _switch(asked)
    except KeyError:
        raise SettingError(f"{SWITCH} must be 1, 0, true, false, on, off, yes or no, got {asked!r}") from None


def resolve(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Effective]:
    """The effective value and origin of every setting.

    Args:
        arguments: Values given by the caller; None means not given.
        environ: Variables, `os.environ` when None.

    Raises:
        SettingError: a value is malformed, or a variable of our prefix is unknown; the accepted ones are listed.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown(environ)
    effective = {}
    for setting in SETTINGS:
        if (given := arguments.get(setting.name)) is not None:
            effective[setting.name] = Effective(_read(setting, given, setting.name), "argument")
        elif (variable := _variable(setting, environ)) is not None:
            effective[setting.name] = Effective(_read(setting, environ[variable], variable), "environment")
        else:
            effective[setting.name] = Effective(setting.default, "default")
    return effective


def _variable(setting: Setting, environ: Mapping[str, str]) -> str | None:
    if setting.variable in environ:
        return setting.variable
    if setting.fallback_variable is not None and environ.get(setting.fallback_variable):
        return setting.fallback_variable
    return None


def _read(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.parse(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise SettingError(f"{source} must be {setting.accepted}, got {value!r}") from None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [setting.variable for setting in SETTINGS] + [PREFIX + name for name in OTHERS]
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise SettingError(f"{name} is no setting; {hint}accepted: {', '.join(sorted(known))}")
