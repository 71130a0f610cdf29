"""Makes one model run on many ranks, as the plan says: tensor parallel, checkpointing, compile, FSDP, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from titan_cli.config.derive import Resolved
from titan_cli.models.common.init import draw
from titan_cli.plan.names import lookup, matches
from titan_cli.plan.planner import Plan
from titan_cli.worker import private
from titan_cli.worker.health import CompileWatch


def build_mesh(world: Resolved, device: str) -> DeviceMesh:
    """The ranks as a grid (dp_replicate, dp_shard, tp): neighbours in rank are neighbours in tp, the chattiest dimension."""
    return init_device_mesh(
        device, (world.dp_replicate, world.dp_shard, world.tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan, tp_plan: Mapping[str, str]) -> CompileWatch:
    """Change a meta-device model in place so that it trains on `mesh`. Names of parameters and modules do not change.

    Returns what watches the compiler, to be asked after the first step.
    """
    watch = CompileWatch(plan.backend)
    for name, value in plan.settings.items():
        private.apply_setting(name, value)
    # First, because it replaces parameters by DTensors, which everything after it must see.
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"], tp_plan)
    # A cure is a hook on an eager module, so it comes after tensor parallel's own hooks, which it waits for.
    for cure in plan.cures:
        CURES[cure["what"]](model)
    # Around forwards, from the inside out. FSDP's hooks run in Module.__call__, outside of this onion, which is what keeps
    # the graphs whole.
    onion = (checkpoint_blocks, compile_modules)
    for layer in onion if plan.ac == "inside" else reversed(onion):
        layer(model, plan, watch)
    for name, block in named_blocks(model) if plan.strategy != "whole" else ():  # a whole-model graph would trace it
        block.forward = watch.track(name, str(block.kind), block.forward)
    # Last: it moves parameters into sharded storage and must see the final ones.
    apply_fsdp(model, mesh["dp_replicate", "dp_shard"], plan.dtype)
    return watch


def named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The transformer blocks that this rank holds, first to last, with their names."""
    return [(f"layers.{name}", block) for name, block in model.get_submodule("layers").named_children()]


def checkpoint_blocks(model: nn.Module, plan: Plan, watch: CompileWatch) -> None:
    """Keep only the inputs of each block, and run its forward again in backward."""
    if plan.ac_mode == "full":
        for _, block in named_blocks(model):
            block.forward = checkpointed(block.forward)


def compile_modules(model: nn.Module, plan: Plan, watch: CompileWatch) -> None:
    """Compile what the plan's wraps name, in place.

    Wrapping the bound method instead of the module keeps every name. (A closure around it, never functools.partial, which
    Dynamo does not look into: "found no compiled frames".)
    """
    kinds = {name: block.kind for name, block in named_blocks(model)}
    for name, module in model.named_modules():
        kind = kinds.get(".".join(name.split(".")[:2]))  # None outside of the blocks
        for wrap in plan.wraps:
            if matches(name, wrap["target"]) and kind in (None, wrap["kind"]):
                module.forward = torch.compile(module.forward, backend=watch.backend, fullgraph=wrap["fullgraph"])
                break


def checkpointed(forward: Callable) -> Callable:
    """`forward` that keeps only its inputs and runs again in backward."""

    def recompute(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)  # nothing in a block is random

    return recompute


def wait_on_embedding(model: nn.Module) -> None:
    """Hand the blocks an embedding that has arrived (the rule tp-embedding-wait says why)."""

    def wait(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return private.wait_tensor(output)

    model.get_submodule("tok_embeddings").register_forward_hook(wait)


# What a plan's cures mean.
CURES: Mapping[str, Callable[[nn.Module], None]] = {"wait on tok_embeddings output": wait_on_embedding}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, tp_plan: Mapping[str, str]) -> None:
    """Cut the model along `mesh` where the family's TP_PLAN says, with sequence parallel between the cuts.

    Every parameter becomes a DTensor on the mesh, replicated where it is not cut: one mesh for all is what makes the
    gradient norm right.
    """
    found = {name: lookup(name, tp_plan) for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: STYLES[style]() for name, style in found.items() if style})


class GatherFirst(ParallelStyle):
    """Gather the first argument along the sequence once, for all column-parallel modules inside; leave the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple) -> tuple:
            cut = inputs[0]  # (B, T/tp, D), from a sequence-parallel norm: a DTensor
            return (cut.redistribute(placements=(Replicate(),)), *inputs[1:])  # (B, T, D)

        module.register_forward_pre_hook(gather)
        return module


class Head(ParallelStyle):
    """Logits from a sequence-parallel input, gathered to the whole vocabulary. A tied head has no weight of its own to cut."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: ParallelStyle = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        tied = PrepareModuleInputOutput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(Replicate(), None),
            output_layouts=(Shard(-1),),
            desired_output_layouts=(Replicate(),),
        )
        return (own if list(module.parameters()) else tied)._apply(module, device_mesh)


# The words of models/*/tp_plan.py in torch's styles.
STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "sequence": SequenceParallel,
    "gather": GatherFirst,
    "head": Head,
}


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, dtype: str) -> None:
    """Shard parameters, gradients and optimizer over `mesh` (dp_replicate, dp_shard), one unit for each block.

    Also at degree 1: the mixed-precision policy is what casts float32 parameters to the compute type, so one path
    serves every world size. Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks.
    """
    # Inputs are not cast: tokens need none, h has the compute type already, and bfloat16 rotary tables would blur positions.
    policy = MixedPrecisionPolicy(getattr(torch, dtype), reduce_dtype=master_dtype(dtype), cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"], mp_policy=policy)
    for _, block in named_blocks(model):
        shard(block)
    if "output.weight" in dict(model.named_parameters()):  # a tied head needs the embedding: both stay in the root unit
        shard(model.get_submodule("tok_embeddings"))
        # The head is the last in forward and the first in backward: keep it gathered in between.
        head = [model.get_submodule("norm"), model.get_submodule("output")]
        shard(head, reshard_after_forward=False)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a factor becomes PREMUL_SUM, which gloo does not have


def master_dtype(dtype: str) -> torch.dtype:
    """The type of parameters, gradients and optimizer for a compute type: never below float32."""
    return torch.promote_types(getattr(torch, dtype), torch.float32)


class Initializable(Protocol):
    """What a model of models/ offers to be given its weights."""

    def to_empty(self, *, device: torch.device) -> object: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def init_std(self, name: str) -> float | None: ...
    def init_buffers(self) -> None: ...


def materialize(model: Initializable, device: torch.device, seed: int) -> None:
    """Give a parallelized meta model its storage and the weights of the whole one's `init_weights`: each rank its part."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            rows, *columns = private.local_slices(parameter)
            drawn = draw(seed, name, parameter.shape, model.init_std(name), rows)
            local.copy_(drawn[(slice(None), *columns)])
    model.init_buffers()
