"""The run folder's files: whole records, whatever dies while writing; and paths."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from titan_cli.runs import records
from titan_cli.runs.folder import COMMIT_MARKER, RunFolder, committed_steps
from titan_cli.runs.records import Event, Tail


def test_a_record_comes_back_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records.append(path, {"loss": math.nan, "ranks": {"peak": [1.0, math.inf]}, "text": "ü\n"})
    event = Event("alert", "x", attempt=1, rank=0, level="alert", data={"n": 1})
    records.append(path, event)
    assert records.read(path) == [{"loss": None, "ranks": {"peak": [1.0, None]}, "text": "ü\n"}, asdict(event)]


def test_half_a_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records.append(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "lo')  # killed here
    records.append(path, {"n": 3})
    assert [r["n"] for r in records.read(path)] == [1, 3]


def test_a_tail_gives_each_record_once_and_only_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    records.append(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": ')
    assert tail.read() == [{"n": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert tail.read() == [{"n": 2}]
    assert tail.read() == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert records.read_json(path) == {}
    records.write_json(path, {"step": 1})
    records.write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_of_a_step_that_ran_twice_the_later_attempt_counts() -> None:
    rows = [{"step": 1, "attempt": 1}, {"step": 2, "attempt": 1}, {"step": 2, "attempt": 2}, {"step": 3, "attempt": 2}]
    assert [(r["step"], r["attempt"]) for r in records.latest_metrics(rows)] == [(1, 1), (2, 2), (3, 2)]


def test_only_marked_checkpoints_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert committed_steps(run) == []
    for step in (20, 3, 100, 101):
        run.checkpoint(step).mkdir(parents=True)
    for step in (20, 3):
        records.write_json(run.checkpoint(step) / COMMIT_MARKER, {"step": step})
    (run.checkpoint(100) / COMMIT_MARKER).touch()  # what a power loss leaves of a file that was not synced
    (run.checkpoints / "step-old").mkdir()
    assert committed_steps(run) == [3, 20]


def test_attempts_in_order(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.attempts() == []
    for number in (10, 9, 1):
        run.attempt(number).path.mkdir(parents=True)
    assert [a.number for a in run.attempts()] == [1, 9, 10]
    assert run.attempt(3).rank_log(7) == tmp_path / "attempts" / "3" / "rank-0007.log"
