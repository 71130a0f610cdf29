"""A run that is stopped and continued computes, to the last bit, what an undisturbed one computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cells import corpus
from tests.ranks import run_ranks
from titan_cli.runs import records
from titan_cli.runs.folder import COMMIT_MARKER, RunFolder, committed_steps

FIXED = (
    "training.seq_len=32", "training.global_batch_size=4", "training.dtype=float32", "launch.gpu=cpu", "training.steps=8",
    "lr_schedule.warmup_steps=2", "checkpoint.interval=3", "checkpoint.keep=0", "metrics.log_every=1", "metrics.eval_every=4",
    "metrics.eval_sequences=4",
)  # fmt: skip


def run_worker(overrides: list[str], folder: Path, warm: bool = True) -> None:
    """Train the run in `folder` to its end, on the ranks of the caller, through the worker's own loop."""
    import warnings

    import torch
    import torch.distributed as dist

    from titan_cli.plan.target import build as build_target
    from titan_cli.worker import train
    from titan_cli.worker.report import Reporter
    from titan_cli.worker.stop import StopRequest

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    target = build_target(None, None, [*FIXED, *overrides])
    run = RunFolder(folder)
    trainer = train.build(target.config, target.plan, target.world, torch.device("cpu"), run)
    if warm:
        trainer.warm_up()
    attempt = run.attempt(1)
    if dist.get_rank() == 0:
        attempt.path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    trainer.run_steps(run, Reporter(attempt, dist.get_rank()), StopRequest())


def resumed_cells(cells: list[list[str]], folders: list[Path]) -> None:
    """For each cell: a run to the end; a copy without its last checkpoints, continued; and one without warm-up."""
    import torch.distributed as dist

    for overrides, folder in zip(cells, folders, strict=True):
        run_worker(overrides, folder / "whole")
        if dist.get_rank() == 0:
            whole = RunFolder(folder / "whole")
            shutil.copytree(whole.checkpoint(3), RunFolder(folder / "resumed").checkpoint(3))
            # Torn: everything but the marker, and of a later step. It must not be picked.
            shutil.copytree(whole.checkpoint(6), RunFolder(folder / "resumed").checkpoint(6))
            (RunFolder(folder / "resumed").checkpoint(6) / COMMIT_MARKER).unlink()
        dist.barrier()
        run_worker(overrides, folder / "resumed")
        run_worker(overrides, folder / "cold", warm=False)


def losses(folder: Path) -> dict[int, Any]:
    metrics = records.read(RunFolder(folder).metrics)
    return {m["step"]: (m["loss"], m["grad_norm"], m.get("val_loss")) for m in metrics}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_continued_run_is_bit_equal(world: int, tmp_path: Path) -> None:
    data = corpus(tmp_path)
    cells = [
        [f"data.path={data}", f"parallelism.dp_shard={world}", compiled]
        for compiled in ("compile.strategy=off", "compile.backend=aot_eager")
    ]
    folders = [tmp_path / "eager", tmp_path / "compiled"]
    run_ranks(world, resumed_cells, cells, folders)
    for folder in folders:
        whole = losses(folder / "whole")
        assert sorted(whole) == list(range(1, 9)), folder
        assert whole[8][2] is not None, "evaluated at the last step"
        resumed = losses(folder / "resumed")
        assert sorted(resumed) == [4, 5, 6, 7, 8], f"{folder}: continued from the torn checkpoint"
        assert resumed == {step: whole[step] for step in resumed}, folder
        assert committed_steps(RunFolder(folder / "resumed")) == [3, 6, 8]
        # The warm-up leaves weights, optimizer, random numbers and data as they were.
        assert losses(folder / "cold") == whole, folder


def other_layout(overrides: list[str], folder: Path) -> None:
    run_worker(overrides, folder)


@pytest.mark.slow
def test_a_checkpoint_continues_under_another_layout(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    saved = [f"data.path={data}", "compile.backend=aot_eager"]
    run_ranks(1, other_layout, [*saved, "training.steps=6"], tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "four")
    run_ranks(1, other_layout, [*saved, "compile.strategy=off"], tmp_path / "one")  # and without compile
    run_ranks(4, other_layout, [*saved, "parallelism.tp=2", "parallelism.dp_shard=2"], tmp_path / "four")
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert [four[step][0] for step in (7, 8)] == pytest.approx([one[step][0] for step in (7, 8)], rel=1e-5)


@pytest.mark.slow
def test_workers_killed_at_random_moments_lose_nothing() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "crash_test.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "3", "--steps", "200"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 losses differ" in done.stdout


def resumed_in_other_layouts(layouts: list[list[str]], common: list[str], folder: Path) -> None:
    """A run to the end in the first layout; then in each other one from the last checkpoint but one of the run before."""
    import torch.distributed as dist

    for number, layout in enumerate(layouts):
        run = RunFolder(folder / str(number))
        if number and dist.get_rank() == 0:
            step = 3 * number
            shutil.copytree(RunFolder(folder / str(number - 1)).checkpoint(step), run.checkpoint(step))
        dist.barrier()
        run_worker([*common, *layout], run.path)


def test_a_run_continues_in_another_layout(tmp_path: Path) -> None:
    layouts = [["parallelism.dp_shard=2"], ["parallelism.tp=2"], ["parallelism.pp=2"]]
    common = [f"data.path={corpus(tmp_path)}", "training.dtype=float64", "compile.strategy=off"]
    run_ranks(2, resumed_in_other_layouts, layouts, common, tmp_path)
    whole, cut, piped = (losses(tmp_path / str(number)) for number in range(len(layouts)))
    assert sorted(cut) == [4, 5, 6, 7, 8]
    assert sorted(piped) == [7, 8], "continued from what tensor parallel saved"
    for run in (cut, piped):
        for step, (loss, norm, held_out) in run.items():
            assert loss == pytest.approx(whole[step][0], rel=1e-9), step
            assert norm == pytest.approx(whole[step][1], rel=1e-9), step
            assert held_out is None or held_out == pytest.approx(whole[step][2], rel=1e-9), step
