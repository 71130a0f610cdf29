"""What a user can cause, and how the process ends: one exception type and the table of exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The process's exit status. Stable: schedulers and scripts branch on it."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    REFUSED = 3
    NOT_CHECKED = 4
    COMPARISON_FAILED = 5
    COMPILE_HEALTH = 9
    WORKER_EXCEPTION = 10
    OUT_OF_MEMORY = 11
    NOT_FINITE = 12
    HANG = 13
    WORKER_KILLED = 14
    RENDEZVOUS = 15
    STOPPED = 75
    INTERRUPTED = 130
    STOPPED_WITH_LOSS = 143


class TitanError(Exception):
    """Something the person at the keyboard can act on: what is wrong, and what to do about it.

    `message` says what and where; `hint` says what to do (may be several lines, often a command to paste).
    """

    def __init__(self, message: str, hint: str = "", code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
