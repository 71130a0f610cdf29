"""The only module that names what torch keeps private or does not document. Each name is guarded and tested."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

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


def backend(name: str) -> Callable[..., Any]:
    """torch.compile's backend of that name as a callable."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def graph_breaks() -> list[str]:
    """Reasons of the graph breaks of this process so far, one for each break, first line only."""
    from torch._dynamo.utils import counters

    return [reason.strip().splitlines()[0] for reason, count in counters["graph_break"].items() for _ in range(count)]


def recompile_reasons() -> list[str]:
    """Why code was compiled again, oldest first: the guard that failed, and the user's line that it comes from.

    Without the change between training and evaluation, which every piece of code sees once.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    first = [" ".join(reason.strip().splitlines()[0].partition("(HINT")[0].split()) for reason in found]
    return [reason for reason in first if "GLOBAL_STATE changed: grad_mode" not in reason]


def apply_setting(name: str, value: object) -> None:
    """Set torch.a.b.c to a value; if it is a function (a setter without a name in a config), call it with the value."""
    path, _, last = name.rpartition(".")
    assert path.startswith("torch."), f"{name} is not torch's: what sets it must be applied by the module that it is for"
    owner: Any = torch
    for depth, part in enumerate(path.split(".")[1:], start=2):
        if not hasattr(owner, part):
            import_module(".".join(path.split(".")[:depth]))
        owner = getattr(owner, part)
    if callable(getattr(owner, last)):
        getattr(owner, last)(value)
    else:
        setattr(owner, last, value)
