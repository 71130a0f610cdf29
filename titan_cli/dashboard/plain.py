"""The dashboard where there is no terminal: one `key=value` line a record, and no control bytes whatever it holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from titan_cli.dashboard.state import State, alert_level, clean, clock, leads, number, whole

# In the order of the line. Enough digits to compare two runs.
_FIELDS = (
    ("loss", ".4f"),
    ("val_loss", ".4f"),
    ("grad_norm", ".4g"),
    ("lr", ".4g"),
    ("tok_per_s", ".0f"),
    ("mfu", ".4f"),
    ("memory_peak_gib", ".2f"),
    ("data_wait_s", ".4f"),
    ("step_s", ".4f"),
)


def line(record: Mapping[str, Any]) -> str:
    """One line for metrics or an event, without the newline; empty for a record that says nothing new of the run."""
    if "kind" in record:
        return _event(record)
    if "loss" in record and whole(record.get("step")) is not None:
        return _metrics(record)
    return ""


def heartbeat(state: State, now: float) -> str:
    """The line that says that the run is still watched, while it has nothing else to say."""
    now = clock(state, now)
    since = state.started if state.phase_since is None else state.phase_since
    last = state.metrics.get("time")
    return _joined(
        [
            ("heartbeat_s", f"{now - state.started:.0f}"),
            ("phase", state.phase),
            ("phase_s", f"{now - since:.0f}"),
            ("step", state.step),
            ("steps", state.total_steps),
            ("last_step_s_ago", None if last is None else f"{now - last:.0f}"),
        ]
    )


def _metrics(record: Mapping[str, Any]) -> str:
    values: list[tuple[str, object]] = [("step", record["step"])]
    for name, spec in _FIELDS:
        value = number(record.get(name))
        values.append((name, None if value is None else format(value, spec)))
    # A null is left out, but for the loss: a step without one would look like a bug of ours instead of a run that diverges.
    return _joined([(k, "nan") if k == "loss" and v is None else (k, v) for k, v in values])


def _event(event: Mapping[str, Any]) -> str:
    kind, level = clean(event["kind"]), alert_level(event)
    if level is None and not leads(event):
        return ""
    message, phase, data = clean(event.get("message") or ""), event.get("phase"), event.get("data")
    key = "alert" if level and kind != "exit" else kind
    first = [("phase", phase)] if kind == "phase" and phase else [(key, _quoted(message))]
    return _joined(
        [
            *first,
            ("phase", phase if kind == "exit" else None),
            ("level", level),
            ("kind", kind if key != kind else None),
            ("code", whole(data.get("code")) if isinstance(data, Mapping) else None),
            ("step", whole(event.get("step"))),
            ("rank", whole(event.get("rank")) if level else None),
            ("attempt", whole(event.get("attempt"))),
            ("message", _quoted(message) if kind == "phase" and message else None),
        ]
    )


def _joined(pairs: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in pairs if value is not None)


class _Quoted(str):
    """Text that has its quotes already."""


def _quoted(text: str) -> _Quoted:
    return _Quoted(json.dumps(text, ensure_ascii=False))


def _value(value: object) -> str:
    if isinstance(value, _Quoted):
        return value
    text = clean(value)
    return _quoted(text) if not text or any(c in ' "=\\' for c in text) else text
