"""Trains one configuration through the worker's own code, inside a rank of tests/ranks.py, and returns what it computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_cli.plan.target import Target, build

HORIZON = 20  # of the learning rate, so that cells of fewer steps follow the same curve
TEXT = "def f(x):\n    return {n}\n\n\nclass C{n}:\n    value = {n}\n"
# What every cell has, unless it says otherwise.
FIXED = (
    "training.seq_len=32", "training.global_batch_size=4", "launch.gpu=cpu", "lr_schedule.warmup_steps=2", "optimizer.lr=1e-3",
    "metrics.eval_sequences=16", "data.val_every=2",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Losses of all steps; gradients of the first step before clipping, whole; final parameters' names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]
    keys: list[str]
    parameter_bytes: int  # on this rank, and what the fit says of the fullest
    planned_bytes: int
    held_out: float | None  # loss of the evaluation afterwards, of cells that compile nothing
    faults: tuple[str, ...]  # of compile health in the first step, and graphs that were made later


def corpus(folder: Path, sizes: Sequence[int] = (40,) * 40) -> Path:
    """A few small source files, so that no test waits for the whole standard library. A size of 1 is about 20 tokens."""
    for n, size in enumerate(sizes):
        (folder / f"m{n:02d}.py").write_text("".join(TEXT.format(n=n * 31 + i) for i in range(size)))
    return folder


def make_target(overrides: Sequence[str], torch: str | None = None) -> Target:
    """What a cell's overrides mean, for the installed torch or another. FlexAttention is planned on the CPU as on a GPU."""
    return build(None, None, [*FIXED, *overrides], torch, without="flex-on-cpu")


def train_cells(cells: Sequence[Sequence[str]], data: Path, steps: Sequence[int]) -> list[Trained]:
    """One result for each list of overrides and number of steps. Collective; every rank returns the same."""
    results = []
    for overrides, n in zip(cells, steps, strict=True):
        try:
            results.append(train_cell(overrides, data, n))
        except Exception as error:
            error.add_note(f"in the cell {' '.join(overrides)}")
            raise
    return results


def train_cell(overrides: Sequence[str], data: Path, steps: int, cures: bool = True) -> Trained:
    import torch
    import torch.distributed as dist

    from titan_cli.runs.folder import RunFolder
    from titan_cli.worker import optim, private, train
    from titan_cli.worker.health import check_compile

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    target = make_target([f"data.path={data}", f"training.steps={steps}", *overrides])
    plan = target.plan if cures else replace(target.plan, cures=())
    trainer = train.build(target.config, plan, target.world, torch.device("cpu"), RunFolder(data / "no-run"))
    gradients: dict[str, Any] = {}
    faults: list[str] = []

    def keep() -> None:
        faults.extend(check_compile(trainer.watch, plan, evaluated=False).faults)
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = whole(parameter.grad)

    losses, norms, graphs = [], [], []
    for step in range(1, steps + 1):
        for group in trainer.optimizer.param_groups:
            group["lr"] = optim.learning_rate(step, HORIZON, 1e-3, target.config.lr_schedule)
        batches = [trainer.local(batch) for batch in trainer.data.micro_batches(step)]
        with private.allow_flex_on_cpu():
            loss, norm = trainer.train_step(batches, keep if step == 1 else None)
        graphs.append(len(trainer.watch.graphs))
        everywhere = loss.clone()
        dist.all_reduce(everywhere)
        losses.append(float(everywhere) / target.world.tp)
        norms.append(float(norm))
    if graphs[-1] > graphs[0]:
        faults.append(f"recompiled after the first step: {private.recompile_reasons()}")
    with private.allow_flex_on_cpu():
        held_out = None if plan.wraps else trainer.evaluate()
    held = sum(local(p).numel() * p.element_size() for p in trainer.model.parameters())
    return Trained(
        losses, norms, gradients, list(trainer.model.state_dict()), held, target.states.parameters, held_out, tuple(faults)
    )


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
