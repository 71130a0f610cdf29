"""Whether a run can fit: exact bytes for parameters, gradients and optimizer on one device, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from titan_cli.config.derive import Resolved
from titan_cli.config.stages import held_by
from titan_cli.plan.names import lookup

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class States:
    """Bytes on the fullest device. Activations, buffers of collectives and fragmentation come on top."""

    parameters: int
    gathered: int  # parameters of all FSDP's ranks, where they stay gathered between forward and backward
    gradients: int
    optimizer: int
    where: str = ""  # with a pipeline: its fullest rank, and what lies there

    @property
    def total(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.optimizer

    def sentence(self) -> str:
        sizes = {
            "parameters": self.parameters,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "AdamW": self.optimizer,
        }
        listed = " + ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size)
        return f"{listed} = {self.total / 2**30:.2f} GiB on each device{self.where}"


def states(
    shapes: Shapes,
    world: Resolved,
    tp_plan: Mapping[str, str],
    cut_dim: Mapping[str, int | None],
    dtype: str,
    stay_gathered: bool = False,
) -> States:
    """Parameters and gradients in the master type (float32, or float64 under float64), AdamW's two moments in the same.

    With `stay_gathered` FSDP keeps what it gathers, in the type of compute. With a pipeline the rank counts whose stages
    have the most, and its gradients are whole: they are added up unsharded until the last micro-batch
    (torch.distributed.pipelining.stage, backward_maybe_with_nosync).
    """
    master, compute = {"float64": (8, 8), "float32": (4, 4), "bfloat16": (4, 2)}[dtype]
    whole, held = [0] * world.pp, [0] * world.pp
    for name, shape in shapes.items():
        rank = next(stage.rank for stage in world.stages if stage.holds(name))
        style = lookup(name.rpartition(".")[0], tp_plan)
        cut = _cut(shape, style, world, cut_dim)
        whole[rank] += prod(cut)
        held[rank] += prod(_sharded(cut, style, world))
    sizes = [
        States(
            parameters=mine * master,
            gathered=full * compute if stay_gathered else 0,
            gradients=(full if world.pp > 1 else mine) * master,
            optimizer=2 * mine * master,
        )
        for mine, full in zip(held, whole, strict=True)
    ]
    if world.pp == 1:
        return sizes[0]
    fullest = max(range(world.pp), key=lambda rank: sizes[rank].total)
    return replace(sizes[fullest], where=f" of pp rank {fullest}, the fullest ({held_by(fullest, world.stages)})")


def local_shape(
    name: str, shape: tuple[int, ...], world: Resolved, tp_plan: Mapping[str, str], cut_dim: Mapping[str, int | None]
) -> tuple[int, ...]:
    """What rank 0 holds of a parameter: tensor parallel cuts first, then FSDP cuts the rows, the first ranks getting more.

    Routed experts are cut among the ep ranks by expert instead, and then by FSDP among the dp_shard x cp x tp / ep ranks
    that hold the same experts: by expert while there is one for each rank, else by each expert's rows.
    """
    style = lookup(name.rpartition(".")[0], tp_plan)
    return tuple(_sharded(_cut(shape, style, world, cut_dim), style, world))


def _cut(shape: tuple[int, ...], style: str | None, world: Resolved, cut_dim: Mapping[str, int | None]) -> list[int]:
    """What tensor parallel leaves, or expert parallel of experts."""
    local, cut = list(shape), cut_dim[style] if style else None
    if cut is not None and cut < len(local):  # the bias of a rowwise layer is whole on every rank
        local[cut] = ceil(local[cut] / (world.ep if style == "experts" else world.tp))
    return local


def _sharded(cut: list[int], style: str | None, world: Resolved) -> list[int]:
    """What FSDP leaves of that."""
    local, ranks, rows = list(cut), world.dp_shard * world.cp, 0
    if style == "experts":
        ranks = ranks * world.tp // world.ep
        rows = 1 if ranks > local[0] else 0
    local[rows] = ceil(local[rows] / ranks)
    return local
