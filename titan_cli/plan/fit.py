"""Whether a run can fit: exact bytes for parameters, gradients and optimizer on one device, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from titan_cli.config.derive import Resolved
from titan_cli.plan.names import lookup

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class States:
    """Bytes on the fullest device. Activations, buffers of collectives and fragmentation come on top."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def sentence(self) -> str:
        parts = (("parameters", self.parameters), ("gradients", self.gradients), ("AdamW", self.optimizer))
        listed = " + ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
        return f"{listed} = {self.total / 2**30:.2f} GiB on each device"


def states(
    shapes: Shapes, world: Resolved, tp_plan: Mapping[str, str], cut_dim: Mapping[str, int | None], dtype: str
) -> States:
    """Parameters and gradients in the master type (float32, or float64 under float64), AdamW's two moments in the same."""
    item = 8 if dtype == "float64" else 4
    elements = sum(prod(local_shape(name, shape, world, tp_plan, cut_dim)) for name, shape in shapes.items())
    return States(elements * item, elements * item, 2 * elements * item)


def local_shape(
    name: str, shape: tuple[int, ...], world: Resolved, tp_plan: Mapping[str, str], cut_dim: Mapping[str, int | None]
) -> tuple[int, ...]:
    """What rank 0 holds of a parameter: tensor parallel cuts first, then FSDP cuts the rows, the first ranks getting more.

    Routed experts are cut among the ep ranks by expert instead, and then by FSDP among the dp_shard x cp x tp / ep ranks
    that hold the same experts: by expert while there is one for each rank, else by each expert's rows.
    """
    local = list(shape)
    style = lookup(name.rpartition(".")[0], tp_plan)
    cut = cut_dim[style] if style else None
    parts, sharded = world.tp, world.dp_shard * world.cp
    if style == "experts":
        parts, sharded = world.ep, sharded * world.tp // world.ep
    if cut is not None:
        local[cut] = ceil(local[cut] / parts)
    rows = 1 if style == "experts" and sharded > local[0] else 0
    local[rows] = ceil(local[rows] / sharded)
    return tuple(local)
