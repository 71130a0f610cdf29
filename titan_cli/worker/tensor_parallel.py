"""Cuts a model along a tensor-parallel mesh where the family's TP_PLAN says. It knows torch's styles, no FSDP, no compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from titan_cli.plan.names import lookup
from titan_cli.plan.planner import Plan
from titan_cli.worker import private


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, tp_plan: Mapping[str, str], plan: Plan) -> None:
    """Cut the model, or the stage of a pipeline, along the 1-D `mesh` where `tp_plan` says.

    Every parameter becomes a DTensor on the mesh, replicated where it is not cut: one mesh for all is what makes the
    gradient norm right. What goes from one block (or stage) to the next is a plain tensor, this rank's part.
    """
    style_of = styles(plan)
    found = {name: lookup(name, tp_plan) for name, _ in model.named_modules()}  # a stage's missing modules are not named
    parallelize_module(model, mesh, {name: style_of[word] for name, word in found.items() if word})
    if plan.settings.get("tp.symmetric_memory"):
        private.enable_symmetric_memory(mesh)


def styles(plan: Plan) -> Mapping[str, ParallelStyle]:
    """The words of models/*/tp_plan.py in torch's styles, for activations (B, T, D) cut or whole between the blocks.

    Cut along the sequence, a rowwise output is reduce-scattered and gathered again after the norm; whole, it is all-reduced.
    Both send as many bytes, but cut ones need 1/tp of the memory, and norms 1/tp of the time.
    """
    between = Shard(1) if plan.sequence_parallel else Replicate()
    fused = bool(plan.settings.get("tp.symmetric_memory"))
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "colwise": ColwiseOfRows() if fused else ColwiseParallel(),
        "rowwise": RowwiseToRows() if fused else RowwiseParallel(output_layouts=between),
        "sequence": SequenceParallel() if plan.sequence_parallel else OnWhole(),
        "gather": GatherFirst(as_rows=fused),
        "head": Head(between, Shard(-1) if plan.loss_parallel else Replicate()),
    }


class OnWhole(ParallelStyle):
    """The whole module on the whole input, on every rank: what is left of a norm's cut without sequence parallel."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_replicated(module: nn.Module, inputs: tuple) -> tuple:
            return (DTensor.from_local(inputs[0], device_mesh, (Replicate(),), run_check=False),)  # (B, T, D)

        module.register_forward_pre_hook(as_replicated)
        return distribute_module(module, device_mesh)  # replicates the parameters


class GatherFirst(ParallelStyle):
    """Gather the first argument along the sequence once, for all column-parallel modules inside; leave the others.

    Where it is whole already this moves nothing in forward, and in backward it is where the column-parallel modules'
    gradients, a part of the sum on each rank, are all-reduced: once, before the norm multiplies them with its weight.
    `as_rows`: a batch of one becomes rows, (T, D).
    """

    def __init__(self, as_rows: bool) -> None:
        super().__init__()
        self.as_rows = as_rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple) -> tuple:
            first = inputs[0]  # from a norm: a DTensor, here (B, T/tp, D) or (B, T, D)
            if self.as_rows and first.shape[0] == 1:
                first = first.flatten(0, 1)
            return (first.redistribute(placements=(Replicate(),)), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


# Rows are for async tensor parallel. Torch gathers along the dimension that comes first in memory, and of a batch of one
# makes the result a view; but the compiler fuses an all-gather only with matmuls that take its result as it is. So the
# batch is taken off before the all-gather, and put back by the modules that have used it.


class ColwiseOfRows(ParallelStyle):
    """Column parallel; what it makes of rows (T, D) is a batch of one, (1, T, features/tp)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def with_batch(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            return output.unflatten(0, (1, -1)) if output.ndim == 2 else output

        ColwiseParallel()._apply(module, device_mesh)
        module.register_forward_hook(with_batch)
        return module


class RowwiseToRows(ParallelStyle):
    """Row parallel, reduce-scattered along the sequence; a batch of one as rows, for the all-gather of its backward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def reduce_scatter(module: nn.Module, inputs: tuple, output: Any) -> Tensor:  # a DTensor, to be summed: (B, T, D)
            if output.shape[0] > 1:
                return output.redistribute(placements=(Shard(1),)).to_local()  # (B, T/tp, D)
            return output.flatten(0, 1).redistribute(placements=(Shard(0),)).to_local().unflatten(0, (1, -1))

        RowwiseParallel(output_layouts=Partial(), use_local_output=False)._apply(module, device_mesh)
        module.register_forward_hook(reduce_scatter)
        return module


class Head(ParallelStyle):
    """Logits as plain tensors: (B, T, V), or with `logits` Shard(-1) this rank's columns of them, (B, T, V/tp).

    A tied head has no weight of its own to cut; it is given the embedding's, which is cut in the same way.
    """

    def __init__(self, hidden: Placement, logits: Placement) -> None:
        super().__init__()
        self.hidden, self.logits = hidden, logits

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: ParallelStyle = ColwiseParallel(input_layouts=self.hidden, output_layouts=self.logits)
        tied = PrepareModuleInputOutput(
            input_layouts=(self.hidden, None),
            desired_input_layouts=(Replicate(), None),
            output_layouts=(Shard(-1),),
            desired_output_layouts=(self.logits,),
        )
        return (own if list(module.parameters()) else tied)._apply(module, device_mesh)
