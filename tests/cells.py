"""Trains one configuration through the worker's own code, inside a rank of tests/ranks.py, and returns what it computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HORIZON = 20  # of the learning rate, so that cells of fewer steps follow the same curve
TEXT = "def f(x):\n    return {n}\n\n\nclass C{n}:\n    value = {n}\n"


@dataclass(frozen=True)
class Trained:
    """Losses of all steps; gradients of the first step before clipping, whole; final parameters' names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]
    keys: list[str]
    parameter_bytes: int  # on this rank, and what the fit says of the fullest
    planned_bytes: int


def corpus(folder: Path) -> Path:
    """A few small source files, so that no test waits for the whole standard library."""
    for n in range(40):
        (folder / f"m{n:02d}.py").write_text("".join(TEXT.format(n=n * 31 + i) for i in range(40)))
    return folder


def train_cells(cells: Sequence[Sequence[str]], data: Path, steps: Sequence[int]) -> list[Trained]:
    """One result for each list of overrides and number of steps. Collective; every rank returns the same."""
    return [train_cell(overrides, data, n) for overrides, n in zip(cells, steps, strict=True)]


def train_cell(overrides: Sequence[str], data: Path, steps: int, cures: bool = True) -> Trained:
    import torch
    import torch.distributed as dist

    from titan_cli.plan.target import build as build_target
    from titan_cli.runs.folder import RunFolder
    from titan_cli.worker import optim, train

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fixed = [
        "training.seq_len=32",
        "training.global_batch_size=4",
        "launch.gpu=cpu",
        "lr_schedule.warmup_steps=2",
        "optimizer.lr=1e-3",
    ]
    target = build_target(None, None, [*fixed, f"data.path={data}", f"training.steps={steps}", *overrides])
    plan = target.plan if cures else replace(target.plan, cures=())
    trainer = train.build(target.config, plan, target.world, torch.device("cpu"), RunFolder(data / "no-run"))
    gradients: dict[str, Any] = {}

    def keep() -> None:
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = whole(parameter.grad)

    losses, norms = [], []
    for step in range(1, steps + 1):
        for group in trainer.optimizer.param_groups:
            group["lr"] = optim.learning_rate(step, HORIZON, 1e-3, target.config.lr_schedule)
        loss, norm = train.train_step(
            trainer.model,
            trainer.optimizer,
            trainer.loss_sum,
            trainer.data.micro_batches(step),
            trainer.tokens_per_step,
            max_norm=1.0,
            inspect=keep if step == 1 else None,
        )
        everywhere = loss.clone()
        dist.all_reduce(everywhere)
        losses.append(float(everywhere) / target.world.tp)
        norms.append(float(norm))
    held = sum(local(p).numel() * p.element_size() for p in trainer.model.parameters())
    return Trained(losses, norms, gradients, list(trainer.model.state_dict()), held, target.states.parameters)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
