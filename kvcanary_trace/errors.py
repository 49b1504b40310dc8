"""Errors that a user can act on. The message says what, what was wanted, what came, and what to do.

Bad arguments of a call are plain `ValueError` or `TypeError`; all else that we raise derives from `KvCanaryError`.
"""

from __future__ import annotations

__all__ = [
    "DatasetError",
    "KvCanaryError",
    "RunExistsError",
    "SchemaError",
    "SessionError",
    "SettingError",
    "WorkloadError",
]


class KvCanaryError(Exception):
    """Base of every error of this package. The command line prints the message alone and exits with 2."""


class SettingError(KvCanaryError, ValueError):
    """A setting is unknown, malformed or impossible, wherever it came from."""


class SessionError(KvCanaryError, RuntimeError):
    """A session was opened inside another one, or used after it was closed."""


class DatasetError(KvCanaryError):
    """A dataset cannot be read or written: a missing folder, a foreign or truncated file."""


class RunExistsError(DatasetError):
    """The dataset already has the run that was asked for; runs are never mixed or overwritten."""


class SchemaError(DatasetError):
    """A file's schema version is newer than this package, or its columns are not the record's."""


class WorkloadError(KvCanaryError):
    """A workload file is of unknown format, or has a bad line."""
