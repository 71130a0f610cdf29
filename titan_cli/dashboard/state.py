"""What the dashboard knows: one frozen value, folded over the run folder's records. Knows nothing of terminals or files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

# Bounds, so that a run of a million steps on 512 ranks costs what a short one does.
LOSSES = 512  # points of the loss curve: more than the widest terminal has columns
RECENT = 20  # step times that the ETA looks back on
ALERTS = 50  # different alerts that are kept; later ones are only counted
SEEN = 1000  # occurrences of one alert that are told apart
LOG = 50  # log lines
TEXT = 400  # characters of one message or log line

BEFORE_TRAINING = ("starting", "building", "compiling")
FINAL = ("done", "failed", "stopped")

_NUMBERS = (
    "time", "loss", "grad_norm", "lr", "tokens", "tok_per_s", "tok_per_s_per_device", "mfu", "tflops_per_device",
    "memory_peak_gib", "memory_reserved_gib", "data_wait_s", "step_s",
)  # fmt: skip

_CHECKS = {"compile_health": "health", "gradient_audit": "audit"}  # kind of event: field of State

# CSI, then the sequences that carry a string (OSC, DCS, ...), then the short ones; 7-bit and 8-bit introducers.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]"
)


class Point(NamedTuple):
    """One loss. None: not finite."""

    step: int
    attempt: int
    loss: float | None


class Spread(NamedTuple):
    """One quantity over all ranks; `rank` is the one with the maximum."""

    min: float
    median: float
    max: float
    rank: int


@dataclass(frozen=True)
class Alert:
    """Something that went wrong, as often as it was said in the same words (by any rank, at any step)."""

    level: str
    message: str
    attempt: int
    time: float
    rank: int | None
    step: int | None
    seen: frozenset[tuple[float, int | None]]  # (time, rank): a record that is read twice counts once

    @property
    def count(self) -> int:
        return len(self.seen)


@dataclass(frozen=True)
class State:
    """All that a frame shows. The first five are given by whoever starts or attaches to the run; records fill the rest."""

    run: str
    preset: str
    plan: str
    total_steps: int
    started: float  # seconds since the epoch, as every time here
    attempt: int = 1
    phase: str = "starting"
    phase_since: float | None = None
    note: str = ""  # what the last phase event said
    step: int = 0
    saved: int | None = None  # step of the last committed checkpoint
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of the newest step; None: not finite
    metrics_of: tuple[int, int] = (0, 0)  # (attempt, step)
    val: Point | None = None
    losses: tuple[Point, ...] = ()  # in step order
    recent_step_s: tuple[float, ...] = ()
    ranks: int = 0
    rank_step_s: Spread | None = None
    rank_memory_gib: Spread | None = None
    health: str = ""
    health_level: str = "info"
    audit: str = ""
    alerts: tuple[Alert, ...] = ()  # in time order
    more_alerts: int = 0
    log: tuple[str, ...] = ()


def update(state: State, record: Mapping[str, Any]) -> State:
    """The state after one more record: an event (it has `kind`) or metrics (it has `loss`). Anything else changes nothing."""
    if "kind" in record:
        return _event(state, record)
    if "loss" in record:
        return _metrics(state, record)
    return state


def with_log(state: State, lines: Iterable[str]) -> State:
    """The state after these log lines. Only the last ones are looked at: a worker may print ten thousand at once."""
    # A progress bar redraws its line by carriage returns: what stands after the last one is what a terminal would show.
    last = (clean(line.rstrip("\r\n").rpartition("\r")[2]).rstrip() for line in tuple(lines)[-LOG:])
    return replace(state, log=(*state.log, *(line for line in last if line))[-LOG:])


def eta_s(state: State) -> float | None:
    """Seconds to the last step at the median of the recent step times; None before the first step and after the end."""
    if not state.recent_step_s or state.phase in FINAL:
        return None
    return max(0, state.total_steps - state.step) * median(state.recent_step_s)


def clock(state: State, now: float) -> float:
    """The time to show: it stands still once the run has ended."""
    if state.phase in FINAL and state.phase_since is not None:
        return state.phase_since
    return now


def leads(event: Mapping[str, Any]) -> bool:
    """Whether this rank speaks for the run: the launcher (None) and rank 0 do. 512 ranks saying "compiling" are one phase.

    How the run ended only the launcher knows: rank 0 may end well while another one fails.
    """
    rank = event.get("rank")
    return rank is None or (rank == 0 and event["kind"] != "exit")


def alert_level(event: Mapping[str, Any]) -> str | None:
    """`warn` or `alert` for an event that must be seen, else None."""
    level = event.get("level")
    if level in ("warn", "alert"):
        return str(level)
    return "alert" if event.get("kind") == "alert" else None


def clean(text: object) -> str:
    """Text that is safe on any terminal: no escape sequences, no control or direction characters, one line, bounded."""
    bare = _ESCAPE.sub("", str(text)[: 4 * TEXT])
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in bare)[:TEXT]


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """A natural number of ordinary size, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _event(state: State, event: Mapping[str, Any]) -> State:
    time = number(event.get("time")) or state.phase_since or state.started
    attempt = whole(event.get("attempt")) or state.attempt
    kind, message, step = clean(event["kind"]), clean(event.get("message", "")), whole(event.get("step"))
    state = _continued(_alerted(state, event, attempt, time), attempt, time)
    if kind == "checkpoint" and step is not None:  # of any attempt: it is the run's
        return replace(state, saved=max(step, state.saved or 0))
    if attempt < state.attempt:
        return state
    if kind in _CHECKS and (leads(event) or alert_level(event)):
        return _checked(state, event, _CHECKS[kind], message)
    if not leads(event):
        return state
    if kind in ("phase", "exit", "attempt"):
        if kind == "attempt" and step is not None and state.metrics_of[0] < attempt:
            state = replace(state, step=step)  # where the continuation starts
        return _phase(state, event, message, time)
    return state


def _continued(state: State, attempt: int, time: float) -> State:
    """A higher attempt: what described the processes of the earlier one is gone, what describes the run stays."""
    if attempt <= state.attempt:
        return state
    return replace(
        state, attempt=attempt, phase="starting", phase_since=time, note="", health="", health_level="info", audit="",
        metrics={}, recent_step_s=(), ranks=0, rank_step_s=None, rank_memory_gib=None,
    )  # fmt: skip


def _phase(state: State, event: Mapping[str, Any], message: str, time: float) -> State:
    phase = event.get("phase")
    if not isinstance(phase, str) or (state.phase_since is not None and time < state.phase_since):
        return state
    if phase == state.phase:  # said by the launcher and by rank 0: it began when the first of them said so
        return replace(state, note=message or state.note, phase_since=state.phase_since or time)
    return replace(state, phase=clean(phase), phase_since=time, note=message)


def _checked(state: State, event: Mapping[str, Any], name: str, message: str) -> State:
    """A result of the checks after warm-up. A later recompile does not replace it, but the line is no longer a clean one."""
    level = alert_level(event)
    line: dict[str, Any] = {name: message if level is None else getattr(state, name) or message}
    if level is not None:
        line["health_level"] = "alert" if "alert" in (level, state.health_level) else "warn"
    return replace(state, **line)


def _alerted(state: State, event: Mapping[str, Any], attempt: int, time: float) -> State:
    level = alert_level(event)
    if level is None:
        return state
    message, rank, step = clean(event.get("message", "")), whole(event.get("rank")), whole(event.get("step"))
    new = Alert(level, message, attempt, time, rank, step, frozenset({(time, rank)}))
    same = [a for a in state.alerts if (a.level, a.message, a.attempt) == (level, message, attempt)]
    if not same and len(state.alerts) >= ALERTS:  # the first ones stay: later ones are often only their consequences
        return replace(state, more_alerts=state.more_alerts + 1)
    if same:
        seen = same[0].seen | new.seen
        if len(seen) > SEEN:
            return state
        new = replace(min(same[0], new, key=lambda a: a.time), seen=seen)
    others = [a for a in state.alerts if a not in same]
    return replace(state, alerts=tuple(sorted([*others, new], key=lambda a: a.time)))


def _metrics(state: State, record: Mapping[str, Any]) -> State:
    step, time = whole(record.get("step")), number(record.get("time"))
    if step is None:
        return state
    attempt = whole(record.get("attempt")) or state.attempt
    state = _continued(state, attempt, time or state.started)
    state = replace(state, losses=_inserted(state.losses, Point(step, attempt, number(record["loss"]))))
    if "val_loss" in record and (state.val is None or (attempt, step) >= (state.val.attempt, state.val.step)):
        state = replace(state, val=Point(step, attempt, number(record["val_loss"])))
    if attempt < state.attempt or (attempt, step) < state.metrics_of:
        return state
    step_s, repeated = number(record.get("step_s")), (attempt, step) == state.metrics_of
    recent = state.recent_step_s if repeated or step_s is None else (*state.recent_step_s, step_s)[-RECENT:]
    ranks = record.get("ranks")
    state = replace(
        state,
        step=step,
        metrics={k: number(record[k]) for k in _NUMBERS if k in record},
        metrics_of=(attempt, step),
        recent_step_s=recent,
        **(_per_rank(ranks) if isinstance(ranks, Mapping) else {}),
    )
    late = time is not None and state.phase_since is not None and time < state.phase_since
    if state.phase in BEFORE_TRAINING and not late:  # a reader that attached late has missed the event
        state = replace(state, phase="running", phase_since=time or state.phase_since, note="")
    return state


def _per_rank(ranks: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of State that come from `ranks`: a few numbers, however many ranks there are."""
    memory = ranks.get("memory_peak_gib")
    gib = list(map(number, memory)) if isinstance(memory, list) else []
    return {"ranks": len(gib), "rank_memory_gib": _spread_of(gib), "rank_step_s": _spread(ranks.get("step_s"))}


def _spread_of(values: list[float | None]) -> Spread | None:
    known = [x for x in values if x is not None]
    return Spread(min(known), median(known), max(known), values.index(max(known))) if known else None


def _spread(summary: object) -> Spread | None:
    if not isinstance(summary, Mapping):
        return None
    low, mid, high = (number(summary.get(k)) for k in ("min", "median", "max"))
    rank = whole(summary.get("argmax"))
    if low is None or mid is None or high is None or rank is None:
        return None
    return Spread(low, mid, high, rank)


def _inserted(points: tuple[Point, ...], new: Point) -> tuple[Point, ...]:
    """Points with one more. A continuation's first step voids what earlier attempts did from that step on.

    The result depends only on the set of points, not on the order in which they were read.
    """
    if not points or (new.step > points[-1].step and new.attempt >= points[-1].attempt):
        return (*points, new)[-LOSSES:]
    others = [p for p in points if (p.step, p.attempt) != (new.step, new.attempt)]
    kept: list[Point] = []
    for point in sorted([*others, new], key=lambda p: (p.step, -p.attempt)):
        if not kept or point.attempt >= kept[-1].attempt:
            kept.append(point)
    return tuple(kept)[-LOSSES:]
