"""Splits each sequence over ranks: every rank computes its part of the queries and gathers the keys and values of all.

Gathering, as Llama 3 was trained (2407.21783, section 3.3.2), works with every attention kernel, on every device, inside
compiled blocks; with grouped queries the keys and values are a small part of what a block computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_cli.models.common.attention import SDPA, Flex
from titan_cli.worker import private
from titan_cli.worker.data import Batch

Kernel = Callable[..., Tensor]


@lru_cache(maxsize=2)  # asked for in every micro-batch
def positions(length: int, rank: int, cp: int) -> Tensor:
    """Where the tokens of `rank` lie in a sequence, (length / cp,).

    Of 2 x cp equal chunks it has one from the front and its mirror image from the back: under a causal mask late queries
    see more keys, and each such pair sees as many as any other.
    """
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def cut(batch: Batch, rank: int, cp: int) -> Batch:
    """This rank's part of each sequence of a micro-batch: (B, T) -> (B, T / cp)."""
    length = batch.inputs.shape[1]
    if cp == 1:
        return replace(batch, length=length)
    where = positions(length, rank, cp)
    return replace(batch.map(lambda tensor: tensor[:, where]), positions=where, length=length)


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let every attention kernel of the model see the keys and values of all ranks of `mesh` (1-D)."""
    for module in model.modules():
        if isinstance(module, Flex):  # its mask knows which keys each query sees
            module.forward = with_all_keys(module.forward, mesh)  # type: ignore[method-assign]
        elif isinstance(module, SDPA):
            module.last = private.attend_last
            module.forward = with_all_keys(in_two_parts(module.forward, mesh), mesh)  # type: ignore[method-assign]


def with_all_keys(forward: Kernel, mesh: DeviceMesh) -> Kernel:
    """`forward`, given the keys and values of the whole sequence."""
    group = private.group_name(mesh)

    def gathered(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        mine = torch.stack((k, v))  # (2, B, H, T/cp, D): one collective for both
        halves = private.gather(mine, group).unflatten(-2, (2, -1))  # (cp, 2, B, H, 2, T/2cp, D)
        front, back = halves.unbind(-3)
        chunks = torch.cat((front, back.flip(0)))  # (2cp, 2, B, H, T/2cp, D), in the order of the sequence
        k, v = chunks.movedim(0, -3).flatten(-3, -2)  # (B, H, T, D) each
        return forward(q, k, v, mask)

    return gathered


def in_two_parts(forward: Kernel, mesh: DeviceMesh) -> Kernel:
    """A causal `forward` whose queries are the last positions of its keys, called for each of the rank's two chunks."""
    rank, cp = mesh.get_local_rank(), mesh.size()

    def both(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        chunk = q.shape[2] // 2
        parts = []
        for queries, index in zip(q.chunk(2, dim=2), (rank, 2 * cp - 1 - rank), strict=True):
            end = (index + 1) * chunk
            parts.append(forward(queries, k[:, :, :end], v[:, :, :end], mask))
        return torch.cat(parts, dim=2)

    return both
