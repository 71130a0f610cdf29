"""Makes one model run on many ranks, as the plan says: tensor parallel, checkpointing, compile, FSDP, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titan_cli.config.derive import Resolved
from titan_cli.models.common.init import draw
from titan_cli.plan.names import matches
from titan_cli.plan.planner import Plan
from titan_cli.worker import private
from titan_cli.worker.context_parallel import apply_context_parallel
from titan_cli.worker.flex import apply_flex
from titan_cli.worker.health import CompileWatch
from titan_cli.worker.recompute import checkpoint_blocks
from titan_cli.worker.tensor_parallel import apply_tensor_parallel


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run as a grid (pp, dp_replicate, fsdp, tp), by its sides; neighbours in rank are neighbours in tp.

    Each is sliced once: Dynamo guards on the very object that a parameter's placement names.
    """

    pp: DeviceMesh  # 1-D: those that have the other stages
    dp: DeviceMesh  # (dp_replicate, fsdp); fsdp = dp_shard x cp, those that have the other parts of the same parameters
    tp: DeviceMesh  # 1-D
    cp: DeviceMesh | None  # 1-D: those of fsdp that share their sequences; None: there are none

    @property
    def cp_rank(self) -> int:
        """Which part of its sequences this rank computes."""
        return self.cp.get_local_rank() if self.cp else 0

    @property
    def dp_rank(self) -> int:
        """Which of the data-parallel parts of a batch this rank reads."""
        fsdp = self.dp.get_local_rank("dp_replicate") * self.dp["fsdp"].size() + self.dp.get_local_rank("fsdp")
        return fsdp // (self.cp.size() if self.cp else 1)


def build_mesh(world: Resolved, device: str) -> Mesh:
    """Collective: makes the process groups of every dimension."""
    sides = {"pp": world.pp, "dp_replicate": world.dp_replicate, "fsdp": world.dp_shard * world.cp, "tp": world.tp}
    grid = init_device_mesh(device, tuple(sides.values()), mesh_dim_names=tuple(sides))
    cp = None
    if world.cp > 1:
        # From a grid of its own: slicing a part of fsdp out of the first needs what torch keeps private.
        others = world.world_size // (world.cp * world.tp)
        cp = init_device_mesh(device, (others, world.cp, world.tp), mesh_dim_names=("others", "cp", "tp"))["cp"]
    return Mesh(grid["pp"], grid["dp_replicate", "fsdp"], grid["tp"], cp)


def parallelize(model: nn.Module, mesh: Mesh, plan: Plan, tp_plan: Mapping[str, str], watch: CompileWatch) -> None:
    """Change a meta-device model, or one stage of it, in place so that it trains on `mesh`. No name changes.

    `watch` is told of every block and sees what the compiler makes of them.
    """
    for name, value in plan.settings.items():
        if name.startswith("torch."):
            private.apply_setting(name, value)
    # First, because it replaces parameters by DTensors, which everything after it must see.
    if mesh.tp.size() > 1:
        apply_tensor_parallel(model, mesh.tp, tp_plan, plan)
    # Inside the blocks, so before what lies around them.
    if mesh.cp:
        apply_context_parallel(model, mesh.cp)
    # A cure is a hook on an eager module, so it comes after tensor parallel's own hooks, which it waits for.
    for cure in plan.cures:
        CURES[cure["what"]](model)
    apply_flex(model, plan)
    # Around forwards, from the inside out. FSDP's hooks run in Module.__call__, outside of this onion, which is what keeps
    # the graphs whole.
    onion = (lambda: checkpoint_blocks(named_blocks(model), plan), lambda: compile_modules(model, plan, watch))
    for layer in onion if plan.ac == "inside" else reversed(onion):
        layer()
    for name, block in named_blocks(model) if plan.strategy != "whole" else ():  # a whole-model graph would trace it
        block.forward = watch.track(name, str(block.kind), block.forward)
    # Last: it moves parameters into sharded storage and must see the final ones.
    apply_fsdp(model, mesh.dp, plan.dtype, plan.reshard)


def named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The transformer blocks that this rank holds, first to last, with their names."""
    return [(f"layers.{name}", block) for name, block in model.get_submodule("layers").named_children()]


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


def wait_on_embedding(model: nn.Module) -> None:
    """Hand the blocks an embedding that has arrived (the rule tp-embedding-wait says why). Later stages have none."""

    def wait(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return private.wait_tensor(output)

    if model.tok_embeddings is not None:
        model.get_submodule("tok_embeddings").register_forward_hook(wait)


# What a plan's cures mean.
CURES: Mapping[str, Callable[[nn.Module], None]] = {"wait on tok_embeddings output": wait_on_embedding}


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, dtype: str, reshard: bool) -> None:
    """Shard parameters, gradients and optimizer over `mesh` (dp_replicate, fsdp), one unit for each block.

    Also at degree 1: the mixed-precision policy is what casts float32 parameters to the compute type, so one path
    serves every world size. Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks.
    `reshard`: free a unit's gathered parameters after forward, and gather them again in backward.
    """
    # Inputs are not cast: tokens need none, h has the compute type already, and bfloat16 rotary tables would blur positions.
    policy = MixedPrecisionPolicy(getattr(torch, dtype), reduce_dtype=master_dtype(dtype), cast_forward_inputs=False)
    mesh = mesh if mesh["dp_replicate"].size() > 1 else mesh["fsdp"]
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for _, block in named_blocks(model):
        shard(block)
    own = dict(model.named_parameters())
    if "tok_embeddings.weight" in own and ("output.weight" in own or model.output is None):  # a tied head needs it: root unit
        shard(model.get_submodule("tok_embeddings"))
    if "output.weight" in own:
        # The head is the last in forward and the first in backward: keep it gathered in between.
        head = [model.get_submodule("norm"), model.get_submodule("output")]
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a factor becomes PREMUL_SUM, which gloo does not have


def master_dtype(dtype: str) -> torch.dtype:
    """The type of parameters, gradients and optimizer for a compute type: never below float32."""
    return torch.promote_types(getattr(torch, dtype), torch.float32)


def materialize(model: Any, device: torch.device, seed: int) -> None:
    """Give a parallelized meta model (families.Model) its storage and initial weights, of the whole one each rank its part."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            rows, *columns = private.local_slices(parameter)
            drawn = draw(seed, name, parameter.shape, model.init_std(name), rows)
            local.copy_(drawn[(slice(None), *columns)])
    model.init_buffers()
