"""Kills workers at random moments, repeats the line, and compares the losses with a run that nobody disturbed.

    python benchmarks/crash_test.py --kills 20            # one rank
    python benchmarks/crash_test.py --kills 20 parallelism.dp_shard=2

Exit 0 if every loss is bit-equal and every death was reported as one (exit 14).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from titan_cli.errors import ExitCode
from titan_cli.runs import records
from titan_cli.runs.folder import RunFolder, committed_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        common = [f"launch.runs_dir={folder}", f"training.steps={args.steps}", "checkpoint.interval=2", *args.overrides]
        train = [sys.executable, "-m", "titan_cli.cli", "train", "--preset", "llama3-debug", *common]
        undisturbed = RunFolder(Path(folder) / "undisturbed")
        subprocess.run([*train, "--run", undisturbed.name], check=True, stderr=subprocess.DEVNULL)
        victim = RunFolder(Path(folder) / "victim")
        for kill in range(1, args.kills + 1):
            report = kill_once([*train, "--run", victim.name], victim, chance)
            print(f"kill {kill}: {report}", flush=True)
        subprocess.run([*train, "--run", victim.name], check=True, stderr=subprocess.DEVNULL)
        wrong = differing(undisturbed, victim)
    print(f"{args.kills} kills, {args.steps} steps, {len(wrong)} losses differ{': ' + str(wrong[:5]) if wrong else ''}")
    return 1 if wrong else 0


def kill_once(command: list[str], run: RunFolder, chance: random.Random) -> str:
    """Start or continue the run, kill one of its workers after a random time, and wait for the launcher's verdict."""
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    attempts = len(run.attempts()) + 1
    while not (pids := worker_pids(run, attempts)):
        time.sleep(0.05)
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode} before a worker had started"
    # Half of the deaths while starting, half while training and saving.
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, 4))
    else:
        before = len(records.read(run.metrics))
        while len(records.read(run.metrics)) == before and launcher.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1))
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(chance.choice(pids), signal.SIGKILL)
    code = launcher.wait()
    if code == ExitCode.DONE:
        return "the run was done before"
    assert code == ExitCode.WORKER_KILLED, f"exit {code} instead of {ExitCode.WORKER_KILLED}"
    torn = sum(1 for path in run.checkpoints.glob("step-*")) - len(committed_steps(run))
    step = max((record["step"] for record in records.read(run.metrics)), default=0)
    return f"at step {step}, commits {committed_steps(run)[-1:]}, torn checkpoints {torn}"


def worker_pids(run: RunFolder, attempt: int) -> list[int]:
    events = [e for path in run.attempt(attempt).path.glob("rank-*.events.jsonl") for e in records.read(path)]
    return [event["data"]["pid"] for event in events if "pid" in event["data"]]


def differing(a: RunFolder, b: RunFolder) -> list[tuple[int, float, float]]:
    """(step, loss, loss) of the steps that do not agree to the last bit, or that one of them does not have."""
    left, right = ({r["step"]: r["loss"] for r in records.latest_metrics(records.read(run.metrics))} for run in (a, b))
    return [(step, left.get(step), right.get(step)) for step in sorted(left | right) if left.get(step) != right.get(step)]


if __name__ == "__main__":
    sys.exit(main())
