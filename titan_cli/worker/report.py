"""What one rank tells the run folder: events, the phase it is in, and the error it died of. No torch."""

from __future__ import annotations

import sysconfig
import time
import traceback
from pathlib import Path
from typing import Any

from titan_cli.errors import ExitCode, TitanError
from titan_cli.runs import records
from titan_cli.runs.folder import Attempt
from titan_cli.runs.records import Event, Kind, Level, Phase


class Reporter:
    """Writes attempts/N/rank-XXXX.events.jsonl, and remembers phase and step for the error file."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self.attempt = attempt
        self.rank = rank
        self.phase_now: Phase = "starting"
        self.step = 0

    def event(self, kind: Kind, message: str, level: Level = "info", **data: Any) -> None:
        event = Event(kind, message, self.attempt.number, self.rank, level, self.phase_now, self.step, data)
        records.append(self.attempt.rank_events(self.rank), event)

    def phase(self, phase: Phase, message: str, **data: Any) -> None:
        self.phase_now = phase
        self.event("phase", message, **data)

    def error(self, exception: BaseException, code: ExitCode, peer: bool) -> None:
        """Write the error file. `peer`: only another rank's death shows here, so this one is not the cause."""
        frames = traceback.extract_tb(exception.__traceback__)
        content = {
            "schema": 1,
            "time": time.time(),
            "attempt": self.attempt.number,
            "rank": self.rank,
            "phase": self.phase_now,
            "step": self.step,
            "exit": int(code),
            "peer": peer,
            "type": type(exception).__name__,
            "message": exception.message if isinstance(exception, TitanError) else str(exception)[:4000],
            "hint": exception.hint if isinstance(exception, TitanError) else "",
            "where": "" if isinstance(exception, TitanError) else own_line(frames),
            "traceback": "".join(traceback.format_exception(exception)),
        }
        records.write_json(self.attempt.rank_error(self.rank), content)


def lost_peer(exception: BaseException) -> bool:
    """Whether this only shows that another rank is gone: gloo and NCCL say so in their messages alone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "remote process exited")
    return any(word in str(exception) for word in words)


def own_line(frames: traceback.StackSummary) -> str:
    """The innermost line of our or the user's code: ".../models/llama3/model.py:57 in forward: x = ..."."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        ours = "titan_cli" in path.parts or not any(path.is_relative_to(library) for library in LIBRARIES)
        if ours and path.is_file():
            return f"{path}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return ""


LIBRARIES = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
