"""Where everything of a run lies. Paths only: launcher, workers and readers share this layout and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Attempt:
    """One start of a run: attempts/N/."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def torchrun_log(self) -> Path:
        return self.path / "torchrun.log"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.log"

    def rank_events(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.events.jsonl"

    def rank_error(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.error.json"


@dataclass(frozen=True)
class RunFolder:
    """runs/NAME/. Files at the root are those of the latest attempt."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def origin(self) -> Path:
        return self.path / "config.origin.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def command(self) -> Path:
        return self.path / "command.txt"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the launcher."""
        return self.path / ".lock"

    @property
    def workers_lock(self) -> Path:
        """Shared by all workers: they can outlive a launcher that was killed, while they save."""
        return self.path / ".workers.lock"

    @property
    def fork(self) -> Path:
        """Names the checkpoint of another run that this one started from; absent in most."""
        return self.path / "fork.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / str(number))

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        folder = self.path / "attempts"
        names = [p.name for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
        return [self.attempt(n) for n in sorted(map(int, names))]

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


# Written last, after every rank's part is on disk: a folder without it, or with half of it, is torn and is never picked.
COMMIT_MARKER = "COMMITTED"


def committed_steps(run: RunFolder) -> list[int]:
    """Steps of the committed checkpoints, oldest first."""
    if not run.checkpoints.is_dir():
        return []
    found = [(m, p) for p in run.checkpoints.iterdir() if (m := _STEP.fullmatch(p.name))]
    return sorted(int(m.group(1)) for m, p in found if _committed(p / COMMIT_MARKER))


def last_committed(run: RunFolder) -> int:
    """The step of the newest committed checkpoint; 0: there is none."""
    return (committed_steps(run) or [0])[-1]


def _committed(marker: Path) -> bool:
    try:
        return "step" in json.loads(marker.read_text())
    except (OSError, ValueError):
        return False
