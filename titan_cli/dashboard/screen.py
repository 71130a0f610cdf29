"""Where the dashboard meets the terminal: draws frames on a TTY, prints lines elsewhere, and survives the loss of either.

Imports Rich only once a frame is drawn: without a terminal it is never needed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from titan_cli.dashboard import plain
from titan_cli.dashboard.state import State, alert_level, update, with_log

if TYPE_CHECKING:
    from rich.live import Live

FRAME_S = 0.25
HEARTBEAT_S = 60.0


def use_tty(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether to draw frames on this stream; otherwise it gets plain lines."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    if environ.get("NO_COLOR") or environ.get("CI") or environ.get("TERM") == "dumb":
        return False
    return "utf" in (getattr(stream, "encoding", None) or "utf-8").lower()  # bars and curves are not in ASCII


class Screen:
    """The dashboard of one run, fed by the launcher's loop. Close it, also after an exception: it has hidden the cursor."""

    def __init__(self, state: State, tty: bool, stream: TextIO | None) -> None:
        self.state = state
        self._out = _Output(stream)
        self._now = state.started
        self._printed = True  # since the last tick; the first tick starts the heartbeat's clock
        self._quiet_since = state.started
        self._frames = _Frames(self._out) if tty else None

    @classmethod
    def open(cls, state: State, tty: bool, stream: TextIO | None = None) -> Screen:
        """Start drawing on `stream` (by default stderr), or printing where `tty` is false."""
        return cls(state, tty, stream or sys.stderr)

    @property
    def lost(self) -> bool:
        """The terminal is gone; nothing is written any more."""
        return self._out.lost

    def feed(self, records: Iterable[Mapping[str, Any]], log_lines: Iterable[str] = ()) -> None:
        """Take in new records and log lines."""
        for record in records:
            before, self.state = self.state, update(self.state, record)
            if self._frames is None and (text := plain.line(record)) and _is_news(record, before, self.state):
                self._print(text)
        self.state = with_log(self.state, log_lines)

    def tick(self, now: float) -> None:
        """Call this often (`now`: seconds since the epoch); it draws at most four frames a second."""
        if self._frames is not None:
            early = self._frames.drawn and 0 <= now - self._now < FRAME_S
            if not (self.lost or early):
                self._now = now
                self._frames.draw(self.state, now)
            return
        if not self._printed and now - self._quiet_since >= HEARTBEAT_S:
            self._print(plain.heartbeat(self.state, now))
        if self._printed:
            self._printed, self._quiet_since = False, now

    def close(self) -> None:
        """Draw the last frame, which stays, and give the terminal back."""
        if self._frames is not None:
            self._frames.close(self.state, self._now)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        self._out.write(text + "\n")
        self._printed = True


def _is_news(record: Mapping[str, Any], before: State, after: State) -> bool:
    """False for an alert that was printed before: 512 ranks that say the same make one line."""
    if record.get("kind", "exit") == "exit" or alert_level(record) is None:
        return True
    return (len(before.alerts), before.more_alerts) != (len(after.alerts), after.more_alerts)


class _Output(io.TextIOBase):
    """A stream that may vanish: a closed terminal or pipe must not end a training run."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None

    def write(self, text: str) -> int:
        if not self.lost and self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except BlockingIOError:  # someone made the terminal non-blocking and it is slow: the next frame replaces this one
                pass
            except (OSError, ValueError):  # ValueError: the stream is closed
                self.lost = True
                _to_null(self._stream)
        return len(text)

    def size(self) -> tuple[int, int]:
        """Columns and rows, now: a window may be resized."""
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno() if self._stream else -1)
        except (OSError, ValueError):
            return 80, 24
        return columns or 80, rows or 24


def _to_null(stream: TextIO) -> None:
    """Point a dead descriptor at /dev/null.

    Python flushes stderr when it exits, and turns a success into exit status 120 if that fails.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
    except (OSError, ValueError):
        pass


class _Frames:
    """Frames on a terminal, one over the other."""

    def __init__(self, out: _Output) -> None:
        from rich.console import Console
        from rich.live import Live

        self._out = out
        self._console = Console(file=cast("TextIO", out), force_terminal=True, force_interactive=True)
        # No thread of Rich's own: the launcher's loop says when. stdout and stderr stay what they are for everyone else.
        self._live: Live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop"
        )
        self._rows: list[int] = []  # columns of each row of the last frame
        self._columns = 0

    @property
    def drawn(self) -> bool:
        return self._live.is_started

    def draw(self, state: State, now: float) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        from titan_cli.dashboard.render import render

        columns, rows = self._out.size()
        frame = render(state, now, columns, rows)
        with self._console:  # one write for all of it: no flicker
            self._console.size = (columns, rows)
            self._live.start()
            if columns != self._columns:
                # A terminal that became narrower has folded the old frame's rows: it is higher than Rich remembers.
                folded = sum((n - 1) // columns for n in self._rows if n)
                self._console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * folded))
            self._live.update(frame, refresh=True)
        self._rows, self._columns = [line.cell_len for line in frame.split("\n")], columns

    def close(self, state: State, now: float) -> None:
        try:
            if self.drawn and not self._out.lost:
                self.draw(state, now)
        finally:
            self._live.stop()
