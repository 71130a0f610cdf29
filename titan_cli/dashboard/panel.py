"""The one panel that says why a run failed. Formats what it is given; finds nothing out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_cli.dashboard.state import clean

if TYPE_CHECKING:
    from rich.panel import Panel


@dataclass(frozen=True)
class Failure:
    """`rich.print(it)` draws the panel, `str(it)` gives plain lines that begin with `error: `."""

    title: str
    rows: tuple[tuple[str, str], ...]
    hint: tuple[str, ...]

    def __str__(self) -> str:
        rows = [f"  {label}: {value}" for label, value in self.rows]
        return "\n".join([f"error: {self.title}", *rows, *(f"hint: {line}" for line in self.hint)])

    def __rich__(self) -> Panel:
        from rich import box
        from rich.panel import Panel
        from rich.text import Text

        width = max((len(label) for label, _ in self.rows), default=0) + 2
        lines = [Text(f"{label:<{width}}", "dim").append(value, "default") for label, value in self.rows]
        body = Text("\n").join([*lines, *(Text(line, "bold") for line in self.hint)])
        body.overflow = "fold"
        # Without side borders: a path or a command that is folded can still be copied.
        return Panel(body, title=Text(self.title), title_align="left", box=box.HORIZONTALS, border_style="red")


def failure(title: str, rows: Sequence[tuple[str, object]], hint: str) -> Failure:
    """What failed, rows of (label, value) in the order to read them (None and empty ones are left out), and what to do."""
    kept = tuple((label, clean(value)) for label, value in rows if value not in (None, ""))
    return Failure(clean(title), kept, tuple(clean(line) for line in hint.splitlines()))
