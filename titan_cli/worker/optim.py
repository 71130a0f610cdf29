"""AdamW, its learning rate over the steps, and the one gradient clip. Knows steps and tensors, no data and no files."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_cli.config import schema


def build_optimizer(model: nn.Module, config: schema.Optimizer) -> torch.optim.AdamW:
    """AdamW over matrices (with weight decay) and vectors (without)."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.ndim >= 2) == matrices]} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(groups, fused=True)  # one kernel for all parameters, on the CPU too
    configure(optimizer, config)
    return optimizer


def configure(optimizer: torch.optim.Optimizer, config: schema.Optimizer) -> None:
    """Set what the configuration says. Also after loading a checkpoint, which brings the values of the run that saved it."""
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=decay)


def learning_rate(step: int, steps: int, peak: float, schedule: schema.LrSchedule) -> float:
    """The rate of the 1-based `step` of `steps`: linear warm-up to `peak`, then down to min_share x peak at the last step.

    cosine: half a cosine over all steps after warm-up (1608.03983). wsd: constant, then linear over the last
    decay_share of the steps (2404.06395).
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "cosine":
        begin = schedule.warmup_steps
    else:
        begin = max(schedule.warmup_steps, steps - round(steps * schedule.decay_share))
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    remaining = 0.5 * (1 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1 - done
    return peak * (schedule.min_share + (1 - schedule.min_share) * remaining)


def clip_gradients(model: nn.Module, max_norm: float, pipe: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scale all gradients so that their joint L2 norm is at most `max_norm`; returns the norm before, the same on every rank.

    Every parameter is a DTensor on one mesh (tensor_parallel.apply_tensor_parallel), so torch's own norm sums each shard
    once; `pipe` are the ranks that hold the stages of a pipeline.
    """
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if pipe:
        squares = norm.square()
        dist.all_reduce(squares, group=pipe)
        norm = squares.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
