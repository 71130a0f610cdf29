"""Trains on one GPU with each activation-checkpointing mode and attention kernel, and prints speed, memory and losses.

    python benchmarks/modes.py [--model L8|1B] [--steps N] [--only PATTERN]

Each row is a run of `titan train` in a process of its own, all with the same seed and data. `off` is eager. The last columns
are the mean loss of the last 10 steps, and the mean difference of a step's loss from the eager run with the same attention,
as a share of it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {
    "L8": ["model.flavor=8b", "model.n_layers=8", "model.tie_embeddings=false"],
    "1B": ["model.tie_embeddings=false"],
}
BATCH = {"L8": 2, "1B": 4}
COMMON = (
    "data.source=python-stdlib", "tokenizer.name=titan", "metrics.log_every=1", "checkpoint.at_end=false",
    "checkpoint.interval=0", "launch.gpu=auto", "launch.gpus_per_node=1", "lr_schedule.warmup_steps=5",
)  # fmt: skip
AC = {
    "none": [],
    "full": ["activation_checkpoint.mode=full"],
    "2": ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_option=2"],
    "op": ["activation_checkpoint.mode=selective"],
}
# (attention, checkpointing, strategy). The eager runs come first: the others are held to them.
ROWS = [
    ("sdpa", "none", "off"), ("sdpa", "none", "auto"), ("sdpa", "op", "auto"), ("sdpa", "2", "auto"), ("sdpa", "full", "auto"),
    ("flex", "op", "off"), ("flex", "none", "auto"), ("flex", "op", "auto"), ("flex", "full", "auto"),
]  # fmt: skip


def run(model: str, attention: str, ac: str, strategy: str, steps: int, folder: Path) -> tuple[str, list[dict], float, str]:
    """(what failed, metrics, seconds from the command to the end of step 1, compile health)."""
    name = f"{model}-{attention}-{ac}-{strategy}"
    batch = [f"training.local_batch_size={BATCH[model]}", f"training.global_batch_size={BATCH[model]}"]
    overrides = [*COMMON, *MODELS[model], *batch, *AC[ac], f"model.attention={attention}", f"compile.strategy={strategy}"]
    command = [sys.executable, "-m", "titan_cli.cli", "train", "--preset", "llama3-1b", "--run", name, *overrides]
    done = subprocess.run(
        [*command, f"training.steps={steps}", f"launch.runs_dir={folder}"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr[-1500:]}", [], 0.0, ""
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / name / "attempts/1/rank-0000.events.jsonl").read_text().splitlines()]
    health = "; ".join(e["message"] for e in events if e["kind"] in ("compile_health", "alert"))
    started = json.loads((folder / name / "status.json").read_text())["started"]
    return "", metrics, metrics[0]["time"] - started, health


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="L8")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--only", default="", help="rows that this regular expression finds, for example 'flex|none off'")
    arguments = parser.parse_args()
    eager: dict[str, list[float]] = {}
    print("| model | attention | AC | compile | tok/s | MFU | GiB | reserved | step 1, s | last 10 | off eager | health |")
    with tempfile.TemporaryDirectory() as folder:
        for attention, ac, strategy in ROWS:
            if not re.search(arguments.only, f"{attention} {ac} {strategy}"):
                continue
            failed, metrics, first, health = run(arguments.model, attention, ac, strategy, arguments.steps, Path(folder))
            if failed:
                print(f"| {arguments.model} | {attention} | {ac} | {strategy} | {failed}", flush=True)
                continue
            losses = [m["loss"] for m in metrics]
            reference = eager.setdefault(attention, losses)
            off = sum(abs(a - b) / b for a, b in zip(losses, reference, strict=True)) / len(losses)
            timed = sorted(m["tok_per_s"] for m in metrics[4:])
            last = metrics[-1]
            memory = (f"{last[key]:.1f}" for key in ("memory_peak_gib", "memory_reserved_gib"))
            row = (f"{timed[len(timed) // 2]:,.0f}", f"{last['mfu']:.1%}", *memory, f"{first:.0f}")
            row += (f"{sum(losses[-10:]) / 10:.4f}", f"{off:.1e}", health)
            print(f"| {' | '.join((arguments.model, attention, ac, strategy, *row))} |", flush=True)


if __name__ == "__main__":
    main()
