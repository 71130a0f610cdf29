"""The dashboard: frames and lines against goldens, records in any order, and terminals that go away.

Rewrite the goldens with `TITAN_UPDATE_GOLDEN=1 python -m pytest tests/test_dashboard.py`, then read the diff.
"""

import io
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from titan_cli.dashboard import plain, state
from titan_cli.dashboard.panel import failure
from titan_cli.dashboard.render import duration, render, spark, svg
from titan_cli.dashboard.screen import Screen, use_tty
from titan_cli.dashboard.state import Point, State, update, with_log
from titan_cli.runs.records import Event, Kind

GOLDEN = Path(__file__).parent / "golden"
T0 = 1_800_000_000.0
HEALTH = "32/32 blocks compiled, 0 breaks, 0 recompiles"
HOSTILE = [
    "[bold red]not markup[/] [/nor this] :smile:",
    "\x1b[31mred\x1b[0m \x1b[2J\x1b[H cleared? \x1b]0;a title\x07 \x1bc \x9b31m \x08\x07\x00\x7f",
    "downloading  10%\rdownloading  90%\r",
    "tab\there, \u202eright to left\u202c, lone \udc80, wide 日本語テキスト",
    "",
    "x" * 5000,
]


def event(kind: Kind, message: str = "", at: float = 0, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return asdict(Event(kind, message, attempt, time=T0 + at, **fields))


def metrics(step: int, at: float = 0, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    known = {
        "schema": 1, "step": step, "time": T0 + at, "attempt": attempt, "loss": 3 + 900 / (100 + step), "grad_norm": 1.0234,
        "lr": 3e-4, "tokens": step * 524_288, "tok_per_s": 412_031.2, "tok_per_s_per_device": 51_503.9, "mfu": 0.4131,
        "tflops_per_device": 408.6, "memory_peak_gib": 65.2, "memory_reserved_gib": 70.1, "data_wait_s": 0.0042,
        "step_s": 1.2724,
    }  # fmt: skip
    return known | fields


def ranks(n: int) -> dict[str, Any]:
    memory = [64.0 + (r % 7) / 10 for r in range(n)]
    memory[n // 2] = 71.25
    return {"step_s": {"min": 1.2612, "median": 1.2719, "max": 1.9034, "argmax": n - 2}, "memory_peak_gib": memory}


def after(*records: dict[str, Any], log: list[str] | None = None) -> State:
    s = State(
        "llama3-8b-2d-270115-0800-ab12", "llama3-8b-2d", "each block compiled, AC inside, TP first, FSDP last", 10_000, T0
    )
    for record in records:
        s = update(s, record)
    return with_log(s, log or [])


COMPILING = [event("phase", "", 1, phase="starting"), event("phase", "32 blocks with inductor", 9, phase="compiling")]
RUNNING = [
    *COMPILING,
    event("compile_health", HEALTH, 70, rank=0),
    event("gradient_audit", "291/291 gradients alive", 71, rank=0),
    event("phase", "", 72, rank=0, phase="running"),
    *(metrics(s, 72 + 1.27 * s, ranks=ranks(8)) for s in range(10, 610, 10)),
    metrics(610, 847, val_loss=4.3011, ranks=ranks(8)),
    event("checkpoint", "saved", 849, rank=0, step=600),
]
LOG = [f"step {s}: a line from the worker" for s in range(40)]
ALERTS = [
    *(event("alert", "3 gradients are zero: tok_embeddings.weight", 80, rank=r, level="alert", step=1) for r in range(8)),
    event("compile_health", "recompiled layers.0: a dimension changed from 8192 to 8191", 90, rank=5, level="warn", step=12),
    event("alert", "loss spike: 9.1 is six times the spread of the last 100 steps above their mean, training goes on", 95,
          level="warn", rank=0, step=3),
    *(event("alert", f"another one, number {i}", 100 + i, level="warn") for i in range(60)),
]  # fmt: skip
NAN = [
    *RUNNING[:40],
    metrics(360, 529, loss=None, grad_norm=None),
    event("alert", "loss is not finite", 530, level="alert", step=360),
]
CONTINUED = [
    *RUNNING,
    event("exit", "rank 3 was killed", 900, phase="failed", level="alert", data={"code": 14}),
    event("attempt", "continues from step 600", 960, attempt=2, step=600),
    event("phase", "", 990, attempt=2, phase="running"),
    metrics(610, 1000, attempt=2, mfu=None, tflops_per_device=None),
]

FRAMES = {
    "compile-80x24": (after(*COMPILING, log=LOG[:3]), T0 + 52, 80, 24),
    "running-60x24": (after(*RUNNING, log=LOG), T0 + 850, 60, 24),
    "running-80x24": (after(*RUNNING, log=LOG), T0 + 850, 80, 24),
    "running-200x24": (after(*RUNNING, log=LOG), T0 + 850, 200, 24),
    "running-80x10": (after(*RUNNING, log=LOG), T0 + 850, 80, 10),
    "running-20x6": (after(*RUNNING, log=LOG), T0 + 850, 20, 6),
    "ranks-80x24": (after(*RUNNING, metrics(620, 860, ranks=ranks(512))), T0 + 861, 80, 24),
    "alerts-80x24": (after(*RUNNING, *ALERTS), T0 + 850, 80, 24),
    "nan-80x24": (after(*NAN), T0 + 531, 80, 24),
    "stalled-80x24": (after(*RUNNING), T0 + 1300, 80, 24),
    "continued-80x24": (after(*CONTINUED), T0 + 1001, 80, 24),
    "done-80x24": (
        after(*RUNNING, event("exit", "trained 10,000 steps", 901, phase="done", data={"code": 0})),
        T0 + 9000,
        80,
        24,
    ),
    "hostile-80x24": (after(*COMPILING, event("alert", HOSTILE[1] + HOSTILE[0], 10), log=HOSTILE), T0 + 52, 80, 24),
}


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"dashboard-{name}.txt"
    if os.environ.get("TITAN_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", FRAMES)
def test_frame(name: str) -> None:
    s, now, width, height = FRAMES[name]
    console = Console(width=width, height=height, file=io.StringIO(), no_color=True, force_terminal=False, _environ={})
    console.print(render(s, now, width, height))
    check_golden(name, console.file.getvalue())  # type: ignore[attr-defined]


def test_a_frame_fits_any_terminal() -> None:
    states = [(s, now) for s, now, *_ in FRAMES.values()]
    for width in [*range(0, 30, 3), 1, 49, 50, 71, 72, 80, 110, 160, 200, 600]:
        for height in (0, 1, 9, 100):
            for s, now in states:
                lines = render(s, now, width, height).plain.split("\n")
                assert len(lines) <= max(1, height)
                assert max(map(cell_len, lines)) <= max(1, width)


def test_a_frame_holds_no_control_bytes() -> None:
    s = State("run\x1b[2J", "preset\nx", "plan\x07", 10, T0, phase="odd\x1bphase", note="\x9b1m")
    s = with_log(update(s, event("alert", HOSTILE[1], rank=0)), HOSTILE)
    text = render(s, T0, 80, 24).plain + svg(s, T0) + plain.heartbeat(s, T0)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\udc80]", text)


def test_svg_is_one_picture_of_the_frame() -> None:
    s, now, *_ = FRAMES["running-80x24"]
    picture = svg(s, now)
    words = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    assert "titan train --preset llama3-8b-2d" in words
    assert HEALTH in words
    assert svg(s, now) == picture


def test_the_order_of_records_does_not_matter() -> None:
    seen = set()
    for seed in range(20):
        records = CONTINUED + ALERTS[:10] + RUNNING[30:40]  # some of them twice
        random.Random(seed).shuffle(records)
        s = after(*records)
        alerts = frozenset((a.message, a.count) for a in s.alerts)
        seen.add((s.attempt, s.phase, s.step, s.losses, s.val, tuple(s.metrics.items()), alerts, s.saved))
    assert len(seen) == 1


def test_a_continuation_voids_what_it_runs_again() -> None:
    first = [metrics(s, s) for s in (10, 20, 30, 40)]
    s = after(*first, metrics(30, 90, attempt=2, loss=1.0), metrics(40, 50, loss=9.0))
    assert [(p.step, p.attempt) for p in s.losses] == [(10, 1), (20, 1), (30, 2)]
    assert (s.attempt, s.step, s.metrics["loss"]) == (2, 30, 1.0)


def test_a_new_attempt_forgets_the_processes_and_keeps_the_run() -> None:
    s = after(*RUNNING, *ALERTS[:9], event("attempt", "", 960, attempt=2, step=600))
    assert (s.phase, s.health, s.metrics, s.recent_step_s, s.step) == ("starting", "", {}, (), 600)
    assert len(s.alerts) == 2
    assert s.losses


def test_phases_come_from_the_launcher_and_rank_0() -> None:
    s = after(event("phase", at=5, phase="running"), event("phase", at=6, phase="compiling", rank=3))
    assert s.phase == "running"
    assert after(event("phase", at=9, phase="running"), event("phase", at=5, phase="compiling")).phase == "running"
    assert after(event("phase", at=5, phase="running"), event("phase", at=9, rank=0, phase="running")).phase_since == T0 + 5


def test_metrics_mean_that_it_runs() -> None:
    assert after(*COMPILING, metrics(1, 70)).phase == "running"
    assert after(event("phase", at=80, phase="saving"), metrics(2, 81)).phase == "saving"


def test_a_late_recompile_marks_the_health_line_and_does_not_replace_it() -> None:
    s = after(event("compile_health", HEALTH, 1), event("compile_health", "recompiled layers.0", 2, level="warn", rank=0))
    assert (s.health, s.health_level, s.alerts[0].message) == (HEALTH, "warn", "recompiled layers.0")


def test_any_rank_can_spoil_the_health_line_and_only_rank_0_writes_it() -> None:
    good, bad = event("compile_health", HEALTH, rank=0), event("compile_health", "31/32 blocks compiled", rank=3)
    assert after(good, bad).health == HEALTH
    spoiled = after(good, bad | {"level": "alert"})
    assert (spoiled.health, spoiled.health_level) == (HEALTH, "alert")


def test_the_end_is_the_launchers_to_tell() -> None:
    ended = event("exit", "exit 0", 9, rank=0, phase="done", data={"code": 0})
    assert after(*RUNNING, ended).phase == "running"
    assert plain.line(ended) == ""
    assert plain.line(ended | {"rank": None}) == 'exit="exit 0" phase=done code=0 attempt=1'


def test_equal_alerts_are_one_with_a_count_and_a_repeated_record_is_not_counted() -> None:
    said = [event("alert", "no gradient", at=r, rank=r) for r in range(512)]
    (alert,) = after(*said, *said).alerts
    assert (alert.count, alert.rank, alert.level) == (512, 0, "alert")


def test_the_state_stays_small() -> None:
    s = after(*(metrics(i, i, ranks=ranks(512)) for i in range(1100)), *(event("alert", f"{i}") for i in range(2000)))
    for i in range(1100):
        s = update(s, event("alert", "always the same", i, rank=i))
    s = with_log(s, ["x" * 10_000] * 10_000)
    assert (len(s.losses), len(s.alerts), len(s.log)) == (state.LOSSES, state.ALERTS, state.LOG)
    assert len(repr(s)) < 200_000


@pytest.mark.parametrize("junk", [None, "text", -1, True, [], {}, 1e308, float("nan"), 10**400, {"min": "x"}])
def test_odd_values_do_not_stop_the_dashboard(junk: Any) -> None:
    whole = [metrics(1, ranks=ranks(2)), event("alert", "x", data={"code": 1}), event("phase", phase="running")]
    for record in [*whole, *whole[:2], event("compile_health"), event("checkpoint"), event("exit")]:
        for key in record:
            s = after(*RUNNING[:10], record | {key: junk})
            render(s, T0, 80, 24)
            plain.line(record | {key: junk})
            plain.heartbeat(s, T0)
    assert after({}, {"schema": 2}, {"kind": "from the future"}) == after()


def test_spark_and_duration() -> None:
    assert spark([Point(i, 1, x) for i, x in enumerate([8.0, 4.0, None, 1.0])]) == "█▄×▁"
    assert spark([Point(0, 1, 2.0)]) == "▁"
    assert [duration(s) for s in (-1, 43, 723, 3720, 273600)] == ["0s", "43s", "12m 03s", "1h 02m", "3d 04h"]


def test_plain_lines() -> None:
    lines = map(plain.line, [*COMPILING, *RUNNING[2:6], *RUNNING[-2:], *NAN[-2:], *ALERTS[7:10], *CONTINUED[-4:]])
    hostile = [event("alert", HOSTILE[1] + HOSTILE[0] + '"quoted" \\', level="warn"), event("phase", "a\nb", phase="running")]
    check_golden("plain", "\n".join([*lines, *map(plain.line, hostile)]) + "\n")


def test_plain_lines_hold_no_control_bytes() -> None:
    for text in HOSTILE:
        for record in (event("alert", text), event("phase", text, phase="running"), metrics(1) | {"kind": text}):
            assert plain.line(record).isprintable()


def test_plain_leaves_out_what_says_nothing_new() -> None:
    assert plain.line(event("phase", phase="compiling", rank=3)) == ""
    assert plain.line({"schema": 1}) == ""
    assert plain.line({"loss": 1.0}) == ""


def test_screen_prints_lines_and_a_heartbeat_after_a_minute_of_silence() -> None:
    out = io.StringIO()
    with Screen.open(after(), tty=False, stream=out) as screen:
        screen.tick(T0)
        screen.feed(COMPILING, ["a log line is not printed"])
        for at in range(1, 200):
            screen.tick(T0 + at)
        screen.feed([metrics(1, 200), *ALERTS[:8]])
        for at in range(200, 260):
            screen.tick(T0 + at)
    check_golden("screen", out.getvalue())


def test_the_end_is_printed_even_if_an_alert_said_the_same() -> None:
    out = io.StringIO()
    screen = Screen.open(after(), tty=False, stream=out)
    screen.feed([event("alert", "hang", level="alert"), event("exit", "hang", level="alert", phase="failed")])
    assert [line.split("=")[0] for line in out.getvalue().splitlines()] == ["alert", "exit"]


class Terminal(io.StringIO):
    """Counts writes; raises `error` from the write number `last` on."""

    def __init__(self, error: Exception | None = None, last: int = 0) -> None:
        super().__init__()
        self.error, self.last, self.writes = error, last, 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += 1
        if self.error and self.writes > self.last:
            raise self.error
        return super().write(text)


@pytest.fixture(autouse=True)
def _a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def test_screen_draws_at_most_four_frames_a_second() -> None:
    out = Terminal()
    with Screen.open(after(*RUNNING), tty=True, stream=out) as screen:
        for i in range(200):
            screen.tick(T0 + i / 100)
    assert out.writes <= 8 + 2


def test_the_last_frame_stays_and_the_cursor_comes_back() -> None:
    out = Terminal()
    with Screen.open(after(*COMPILING), tty=True, stream=out) as screen:
        screen.tick(T0)
        assert "\x1b[?25l" in out.getvalue()
        screen.feed([event("exit", "all steps done", 100, phase="done")])
    last = out.getvalue().rpartition("titan")[2]
    assert "all steps done" in last
    assert last.index("\n", last.rindex("done")) < last.index("\x1b[?25h")
    size = len(out.getvalue())
    screen.close()
    assert len(out.getvalue()) == size


def test_the_cursor_comes_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    screen = Screen.open(after(), tty=True, stream=out)
    screen.tick(T0)
    monkeypatch.setattr("titan_cli.dashboard.render.render", broken)
    with pytest.raises(ZeroDivisionError), screen:
        screen.tick(T0 + 1)
    assert "\x1b[?25h" in out.getvalue()


def test_a_narrower_terminal_leaves_nothing_of_the_old_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    screen = Screen.open(after(*COMPILING), tty=True, stream=out)
    sizes = iter([(100, 24), (40, 24), (40, 24)])
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size(next(sizes)))
    monkeypatch.setattr(out, "fileno", lambda: 2)
    screen.tick(T0 + 60)
    old = [len(line) for line in render(screen.state, T0 + 60, 100, 24).plain.split("\n")]
    out.truncate(0)
    screen.tick(T0 + 61)
    # Rows of the old frame once the terminal has folded them, less the one that the cursor is in.
    assert out.getvalue().count("\x1b[1A") == sum(-(-n // 40) for n in old) - 1
    screen.close()


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("I/O on closed file")])
def test_a_closed_terminal_drops_the_dashboard(tty: bool, error: Exception) -> None:
    out = Terminal(error, last=1)
    with Screen.open(after(), tty, stream=out) as screen:
        for i in range(5):
            screen.feed([metrics(i, i)], ["line"])
            screen.tick(T0 + i)
        assert screen.lost
        writes = out.writes
        screen.feed([metrics(9)])
        screen.tick(T0 + 900)
    assert out.writes == writes == 2
    assert screen.state.step == 9


def test_a_slow_terminal_is_not_a_closed_one() -> None:
    screen = Screen.open(after(), False, stream=Terminal(BlockingIOError()))
    screen.feed([metrics(1)])
    assert not screen.lost


def test_a_closed_pipe_does_not_change_the_exit_status() -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        "from titan_cli.dashboard.screen import Screen; from titan_cli.dashboard.state import State\n"
        "s = Screen.open(State('r', 'p', '', 1, 0.0), False)\n"
        "s.feed([{'loss': 1.0, 'step': 1}]); assert s.lost"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=write, timeout=60)
    os.close(write)
    assert done.returncode == 0


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    screen = Screen.open(after(), use_tty(sys.stderr, {}))
    screen.feed([metrics(1)])
    assert screen.lost


def ascii_terminal() -> Terminal:
    class Ascii(Terminal):
        encoding = "ascii"

    return Ascii()


@pytest.mark.parametrize(
    ("stream", "environ", "expected"),
    [
        (Terminal, {"TERM": "xterm", "NO_COLOR": "", "CI": ""}, True),
        (io.StringIO, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"CI": "true"}, False),
        (ascii_terminal, {}, False),
    ],
)
def test_use_tty(stream: Callable[[], io.StringIO], environ: dict[str, str], expected: bool) -> None:
    assert use_tty(stream(), environ) is expected


def test_importing_the_screen_is_cheap() -> None:
    code = "import sys, titan_cli.dashboard.screen, titan_cli.dashboard.panel; print({'rich', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "set()\n"


def test_failure_panel() -> None:
    rows = [
        ("rank", 3),
        ("step", 17),
        ("phase", "running"),
        ("exception", "OutOfMemoryError: [tried] to allocate \x1b[31m2.00 GiB"),
        ("code", None),
        ("log", "runs/llama3-8b-2d-270115-0800-ab12/attempts/1/rank-0003.log"),
    ]
    panel = failure("rank 3 ran out of device memory", rows, "try a smaller batch:\n  titan train training.local_batch_size=1")
    console = Console(width=80, file=io.StringIO(), no_color=True, _environ={})
    console.print(panel)
    check_golden("failure", f"{panel}\n\n{console.file.getvalue()}")  # type: ignore[attr-defined]
