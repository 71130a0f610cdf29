"""One frame of the dashboard, as Rich text: what to show of a state in so many columns and rows. Writes nowhere.

The layout is computed here, line by line, instead of by Rich's tables: every line is known to fit, what is dropped first on a
small terminal is one list, and text from workers is never read as markup.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from titan_cli.dashboard.state import BEFORE_TRAINING, FINAL, Alert, Point, State, clean, clock, eta_s

_LABEL = 11  # columns of a label and the space after it
_LOG_ROWS = 8
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLE = {"running": "green", "done": "bold green", "failed": "bold red", "stopped": "yellow", "stopping": "yellow"}
_LEVEL_STYLE = {"info": "green", "warn": "yellow", "alert": "bold red"}


class _Section(NamedTuple):
    keep: int  # 0 is dropped last
    lines: Sequence[Text]


def render(state: State, now: float, width: int, height: int) -> Text:
    """The frame, at most `width` columns and `height` rows; each row is one line of the text."""
    width, height = max(1, width), max(1, height)
    sections = [
        _Section(0, [_header(state, now, width)]),
        _Section(6, _about(state)),
        _Section(1, [_progress(state, now, width)]),
        _Section(2, _loss(state, width)),
        _Section(5, _grid(state, width)),
        _Section(7, _ranks(state, width)),
        _Section(4, _health(state, width)),
        _Section(3, _alerts(state, now, width, height)),
    ]
    lines = [_fit(line, width) for line in _within(sections, height)]
    lines += [_fit(line, width) for line in _log(state, width, height - len(lines))]  # what is left is the log's
    frame = Text("\n", no_wrap=True, overflow="crop").join(lines)
    frame.no_wrap, frame.overflow = True, "crop"
    return frame


def svg(state: State, now: float, width: int = 100, height: int = 24) -> str:
    """The frame as an SVG picture, for documents."""
    # The picture depends on its arguments alone: NO_COLOR and the like are about the reader's terminal.
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False
    )
    console.print(render(state, now, width, height))
    return console.export_svg(title=f"titan train --preset {clean(state.preset)}", unique_id="titan")


def spark(points: Sequence[Point]) -> str:
    """Losses as a row of bars, one a column. × stands for NaN and infinity."""
    known = [p.loss for p in points if p.loss is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join("×" if p.loss is None else _BARS[round((p.loss - low) * scale)] for p in points)


def duration(seconds: float) -> str:
    """43s, 12m 03s, 1h 02m, 3d 04h."""
    s = int(min(max(0, seconds), 1e10))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h {s % 3600 // 60:02}m"
    return f"{s // 86400}d {s % 86400 // 3600:02}h"


def _within(sections: Sequence[_Section], height: int) -> list[Text]:
    """The lines of all sections in order, without those of the least important ones that have no room."""
    rows = [0] * len(sections)
    for i in sorted(range(len(sections)), key=lambda i: sections[i].keep):
        rows[i] = min(len(sections[i].lines), height - sum(rows))
    return list(chain.from_iterable(section.lines[:n] for section, n in zip(sections, rows, strict=True)))


def _fit(line: Text, width: int) -> Text:
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line


def _between(left: Text, right: str, width: int) -> Text:
    """`left`, and `right` at the right edge if both fit."""
    gap = width - left.cell_len - len(right)
    return left.append(" " * gap).append(right, "dim") if right and gap >= 2 else left


def _header(state: State, now: float, width: int) -> Text:
    left = Text.assemble(("titan", "bold"), "  ", (clean(state.run), "bold cyan"))
    attempt = f"attempt {state.attempt}" if state.attempt > 1 else ""
    saved = f"saved {state.saved:,}" if state.saved is not None else ""
    elapsed = duration(clock(state, now) - state.started)
    right = " · ".join(filter(None, (attempt, saved, elapsed)))
    if state.preset:
        preset = Text(f"  {clean(state.preset)}")
        if left.cell_len + preset.cell_len + len(right) + 2 <= width:
            left.append_text(preset)
    return _between(left, right, width)


def _about(state: State) -> list[Text]:
    """The plan; under it what the current phase says of itself, for as long as there are no numbers to look at."""
    texts = [state.plan, state.note if state.phase != "running" else ""]
    return [Text(clean(text), "dim") for text in texts if text]


def _progress(state: State, now: float, width: int) -> Text:
    since = state.started if state.phase_since is None else state.phase_since
    elapsed = "" if state.phase in FINAL else f" {duration(now - since)}"
    left = Text(clean(state.phase), _PHASE_STYLE.get(state.phase, "yellow")).append(elapsed)
    total, eta = state.total_steps, eta_s(state)
    done = min(1.0, state.step / total) if total > 0 else 0.0
    right = f"{state.step:,}/{total:,}" + (f"  {int(100 * done)}%" if width >= 40 else "")
    if eta is not None and state.phase not in BEFORE_TRAINING:
        right += f"  ETA {duration(eta)}"
    bar = width - left.cell_len - len(right) - 4
    if bar < 8:
        return left.append("  ").append(right)
    filled = int(bar * done)
    return left.append("  ").append("━" * filled, "green").append("─" * (bar - filled), "dim").append("  ").append(right)


def _loss(state: State, width: int) -> list[Text]:
    """The loss and its curve. Without numbers yet there is nothing to say."""
    if "loss" not in state.metrics:
        return []
    loss = state.metrics["loss"]
    line = _labelled("loss").append(_number(loss, ".4f", "NaN"), "bold red" if loss is None else "bold")
    origin = 32 if width >= 72 else 0  # columns for where the curve begins
    room = width - line.cell_len - 2 - origin
    if room < 8 or len(state.losses) < 2:
        return [line]
    shown = state.losses[-room:]
    line.append("  ").append(spark(shown), "cyan")
    return [line.append(f"  from {_number(shown[0].loss, '.4f', 'NaN')} at step {shown[0].step:,}", "dim") if origin else line]


def _grid(state: State, width: int) -> list[Text]:
    """Label and value cells in as many columns as fit."""
    if not state.metrics:
        return []
    columns = 1 if width < 50 else 2 if width < 110 else 3 if width < 160 else 5
    cell = (width - 2 * (columns - 1)) // columns
    cells = [_cell(label, values, cell) for label, values in _cells(state)]
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    return [Text("  ").join(row) for row in rows]


def _cell(label: str, values: Sequence[str], width: int) -> Text:
    """The first value that fits: they are given longest first."""
    room = max(0, width - _LABEL)
    text = _labelled(label).append(next((v for v in values if len(v) <= room), values[-1]))
    text.truncate(width, overflow="ellipsis", pad=True)
    return text


def _cells(state: State) -> list[tuple[str, Sequence[str]]]:
    m = state.metrics
    tflops, reserved = m.get("tflops_per_device"), m.get("memory_reserved_gib")
    peak, where = m.get("memory_peak_gib"), ""
    if worst := state.rank_memory_gib:
        peak, where = worst.max, f", rank {worst.rank}"
    memory = f"{_gib(peak)} GiB{where}"
    mfu, grad_norm = _number(m.get("mfu"), ".1%"), _number(m.get("grad_norm"), ".3f", "NaN" if "grad_norm" in m else "-")
    val = _number(state.val.loss, ".4f", "NaN") if state.val else "-"
    return [
        ("val loss", [f"{val} at step {state.val.step:,}", val] if state.val else ["-"]),
        ("grad norm", [grad_norm]),
        ("lr", [_number(m.get("lr"), ".3e")]),
        ("tok/s", [_number(m.get("tok_per_s"), ",.0f")]),
        ("per device", [f"{_number(m.get('tok_per_s_per_device'), ',.0f')} tok/s"]),
        ("MFU", [mfu] if tflops is None else [f"{mfu}  ({tflops:.3g} TFLOP/s)", mfu]),
        ("step", [f"{_number(m.get('step_s'), '.3f')} s"]),
        ("data wait", [f"{_number(m.get('data_wait_s'), '.3f')} s"]),
        ("memory", [f"{memory} ({_gib(reserved)} reserved)", memory] if reserved is not None else [memory]),
        ("tokens", [_number(m.get("tokens"), ",.0f")]),
    ]


def _ranks(state: State, width: int) -> list[Text]:
    """Where the ranks differ: the slowest one and the fullest device, by name."""
    quantities = (("step", state.rank_step_s, ".3f", "s"), ("memory", state.rank_memory_gib, ".1f", "GiB"))
    parts = [
        f"{name} {s.min:{spec}} to {s.max:{spec}} {unit} (rank {s.rank}), median {s.median:{spec}}"
        for name, s, spec, unit in quantities
        if s is not None and state.ranks > 1
    ]
    return _rows(f"{state.ranks} ranks", parts, " · ", width)


def _rows(label: str, parts: Sequence[str], separator: str, width: int, style: str = "") -> list[Text]:
    """All parts on one labelled row if they fit, else each on its own."""
    joined = separator.join(parts)
    rows = [joined] if len(joined) <= width - _LABEL else parts
    return [_labelled("" if i else label).append(row, style) for i, row in enumerate(rows) if row]


def _health(state: State, width: int) -> list[Text]:
    parts = [part for part in (state.health, state.audit) if part]
    if parts and state.health_level != "info":
        parts[0] = f"▲ {parts[0]}"
    return _rows("compile", parts, ", ", width, _LEVEL_STYLE[state.health_level])


def _alerts(state: State, now: float, width: int, height: int) -> list[Text]:
    """A stall, then the alerts: those of this attempt first, the severe before the mild, causes before consequences."""
    lines = [Text(f"▲ no step for {duration(s)}", "yellow") for s in [_stalled_s(state, now)] if s]
    ordered = sorted(state.alerts, key=lambda a: (-a.attempt, a.level != "alert", a.time))
    shown = ordered[: max(1, height // 6)]
    for alert in shown:
        folded = textwrap.wrap(_alert(state, alert), max(20, width - 2), max_lines=2, placeholder=" …")
        lines += [Text(("  " if i else "▲ ") + part, _LEVEL_STYLE[alert.level]) for i, part in enumerate(folded)]
    hidden = len(ordered) - len(shown) + state.more_alerts
    return [*lines, Text(f"  and {hidden} more", "dim")] if hidden else lines


def _alert(state: State, alert: Alert) -> str:
    where = [
        f"attempt {alert.attempt}" if alert.attempt != state.attempt else "",
        f"step {alert.step:,}" if alert.step is not None else "",
        f"rank {alert.rank}" if alert.rank is not None else "",
    ]
    times = f" (×{alert.count:,})" if alert.count > 1 else ""
    prefix = ", ".join(filter(None, where))
    return (f"{prefix}: " if prefix else "") + alert.message + times


def _stalled_s(state: State, now: float) -> float | None:
    """Seconds since the last step, when that is much longer than a log interval takes."""
    last = state.metrics.get("time")
    if state.phase != "running" or last is None or not state.recent_step_s or len(state.losses) < 2:
        return None
    interval = (state.losses[-1].step - state.losses[-2].step) * max(state.recent_step_s)
    waited = now - last
    return waited if waited > max(60.0, 5 * interval) else None


def _log(state: State, width: int, height: int) -> list[Text]:
    rows = min(_LOG_ROWS, height - 1)
    if not state.log or rows < 1:
        return []
    return [Text("─" * width, "dim"), *(Text(line, "dim") for line in state.log[-rows:])]


def _labelled(label: str) -> Text:
    return Text().append(f"{label:<{_LABEL - 1}} ", "dim")


def _number(value: float | None, spec: str, none: str = "-") -> str:
    return none if value is None else format(value, spec)


def _gib(value: float | None) -> str:
    return _number(value, ".1f" if value and value >= 10 else ".2f")
