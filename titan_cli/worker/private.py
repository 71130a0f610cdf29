"""The only module that names what torch keeps private or does not document. Each name is guarded and tested."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor whose collective has finished; differentiable. (torch.ops has no public twin.)"""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole, one slice for each dimension. No communication."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    # Moved once already between releases, hence imported where it is used.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def set_collective_timeout(seconds: float) -> None:
    """Change the timeout of every process group's collectives. Compiling needs a longer one than training."""
    for group in dist.distributed_c10d._pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
