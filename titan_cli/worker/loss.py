"""The loss: summed negative log-likelihood of a micro-batch's labels, of whole logits or of logits cut by vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_cli.plan.planner import Plan
from titan_cli.worker import private

# Logits and labels (B, T) to the sum over all labels, (). A label of IGNORED counts as nothing.
LossSum = Callable[[Tensor, Tensor], Tensor]

IGNORED = -100  # torch's default


def make_loss(plan: Plan, tp_mesh: DeviceMesh) -> LossSum:
    """The loss for the logits that the plan's head gives. Every rank of `tp_mesh` (1-D) returns the same sum."""
    return vocab_parallel(tp_mesh) if plan.loss_parallel else cross_entropy_sum


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood in at least float32. logits (B, T, V), labels (B, T) -> ()."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def vocab_parallel(mesh: DeviceMesh) -> LossSum:
    """`cross_entropy_sum` for logits of which each rank of `mesh` (1-D) has the next V/tp columns, (B, T, V/tp).

    Collective: three numbers for each token are reduced, and no rank ever holds a whole row of logits. The gradient is that
    of this rank's columns, exactly; backward communicates nothing.
    """
    group, rank = private.group_name(mesh), mesh.get_local_rank()

    def vocab_parallel_cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return _VocabParallel.apply(logits, labels, rank * logits.shape[-1], group)

    return vocab_parallel_cross_entropy_sum


class _VocabParallel(torch.autograd.Function):
    """Written out because autograd would keep float32 probabilities, the largest tensor of a step; exp is cheap.

    Kept are the logits in their own type and two numbers for each token. (Their sum, the log of the row's sum, would do,
    but large logits would round it.)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: str) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (B, T, V/tp)
        largest = private.all_reduce(wide.amax(-1), "max", group)  # (B, T)
        shifted = wide - largest.unsqueeze(-1)
        exp_sum = shifted.exp().sum(-1)
        column = labels - first  # (B, T), the label's here, if it is one of these
        here = (column >= 0) & (column < wide.shape[-1])
        own = shifted.gather(-1, torch.where(here, column, 0).unsqueeze(-1)).squeeze(-1)
        total, target = private.all_reduce(torch.stack((exp_sum, torch.where(here, own, 0))), "sum", group)
        log_total = total.log()
        ctx.save_for_backward(logits, labels, largest, log_total)
        ctx.first = first
        return torch.where(labels != IGNORED, log_total - target, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, largest, log_total = ctx.saved_tensors
        # Not as in forward, largest first: to the compiler that would be the same tensor, and it would keep it, in float32.
        below = largest.unsqueeze(-1) - logits.to(largest.dtype)
        probabilities = (-log_total.unsqueeze(-1) - below).exp()  # of this rank's columns, (B, T, V/tp)
        columns = torch.arange(logits.shape[-1], device=logits.device) + ctx.first
        excess = probabilities - (columns == labels.unsqueeze(-1)).to(largest.dtype)
        counted = torch.where(labels != IGNORED, gradient, 0)
        return (excess * counted.unsqueeze(-1)).to(logits.dtype), None, None, None
