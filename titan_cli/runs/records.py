"""The run folder's JSON files: one object a line, appended whole, or one file replaced whole. Both survive any crash."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["phase", "compile_health", "gradient_audit", "alert", "checkpoint", "signal", "attempt", "exit"]
Level = Literal["info", "warn", "alert"]
Phase = Literal["starting", "building", "compiling", "running", "saving", "stopping", "done", "failed", "stopped"]


@dataclass(frozen=True)
class Event:
    """Something that happened on one rank (or in the launcher: rank None). Time is seconds since the epoch."""

    kind: Kind
    message: str
    attempt: int
    rank: int | None = None
    level: Level = "info"
    phase: Phase | None = None
    step: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    schema: int = 1


def append(path: Path, record: Event | dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that a reader sees all of it or none of it. NaN becomes null."""
    plain = asdict(record) if isinstance(record, Event) else record
    line = json.dumps(_finite(plain), separators=(",", ":"), allow_nan=False) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # A writer killed in the middle of a line leaves half of one; the next line must not be glued to it.
        if _ends_torn(path):
            line = "\n" + line
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file; none if it does not exist. Torn lines (a killed writer) are skipped."""
    return Tail(path).read()


class Lines:
    """Follows a file that another process appends lines to; with `at_most` bytes, only the end of what was added."""

    def __init__(self, path: Path, at_most: int | None = None) -> None:
        self.path, self.at_most, self._offset = path, at_most, 0

    def read_bytes(self) -> bytes:
        """Whole lines that were added since the last call; nothing if there is no file yet."""
        try:
            with self.path.open("rb") as file:
                if self.at_most is not None:
                    self._offset = max(self._offset, file.seek(0, os.SEEK_END) - self.at_most)
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return b""
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


class Tail(Lines):
    """Follows a JSON-lines file."""

    def read(self) -> list[dict[str, Any]]:
        """Records that became complete since the last call."""
        return [record for line in self.read_bytes().splitlines() if (record := _parse(line)) is not None]


class LogTail(Lines):
    """Follows a log."""

    def read(self) -> list[str]:
        """Lines that became complete since the last call; of a flood, the last ones."""
        return self.read_bytes().decode(errors="replace").splitlines()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn by a kill; append() put the next record on a line of its own
        return None
    return record if isinstance(record, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Replace a file as a whole: readers see the old or the new one, never a part."""
    write_text(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """As write_json, for text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a power loss can leave the new name with no content
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file does not exist yet."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it (and an alert event says so)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def latest_metrics(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics in step order. A step that a continuation ran again counts once: the highest attempt wins."""
    best: dict[int, dict[str, Any]] = {}
    for record in records:
        old = best.get(record["step"])
        if old is None or record["attempt"] >= old["attempt"]:
            best[record["step"]] = record
    return [best[step] for step in sorted(best)]
