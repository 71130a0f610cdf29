"""Looks at one rank of a world that is too large to start: what it is built of at full size, and two reduced steps.

Built, a preset's own plan is applied on the meta device. The steps are the training's own, on the CPU, with real tensors.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests import ranks
from titan_cli.plan.target import Target, build

SEQ_LEN = 64

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Built:
    """A stage as `parallelize` leaves it on one rank. Modules are named as in the whole model, the stage itself is ""."""

    parameters: dict[str, tuple[Shape, Shape]]  # the whole one's shape, and that of this rank's part
    dtypes: set[str]
    blocks: list[str]  # that are watched
    units: set[str]  # of FSDP
    hooked: set[str]
    waiting: set[str]  # hand on what has arrived
    replaced: set[str]  # have a forward of their own: recomputed, compiled, or given the keys of other ranks


@dataclass(frozen=True)
class Trained:
    """What two steps of all stages of one rank showed."""

    parameters: set[str]
    without_gradient: set[str]
    dead: tuple[str, ...]  # what the gradient audit says
    compiled: int | None  # blocks
    faults: tuple[str, ...]  # in compile health
    recompiled: list[str]  # in the second step: blocks, "" for the loss


@dataclass(frozen=True)
class Seen:
    """`built`: by the number of the stage."""

    built: dict[int, Built]
    trained: Trained


def full(preset: str) -> Target:
    """The preset as it is."""
    return build(preset, None, [])


def reduced(preset: str) -> Target:
    """The preset's layout, heads, kernels, checkpointing and loss in few features, planned for a CPU.

    Two blocks for each stage, and so many features that every rank has at least a row of each parameter. As many
    micro-batches as the pipeline has ranks, at least two.
    """
    target = full(preset)
    world, stages, shards = target.world, len(target.world.stages), target.world.dp_shard * target.world.cp
    small = {
        "model.dim": target.model.n_heads * shards,
        "model.ffn_dim": 2 * world.tp * shards,
        "model.vocab_size": 16 * world.tp * shards,
        "model.n_layers": 2 * stages,
        "parallelism.pp_layers": [2] * stages,
        "training.seq_len": SEQ_LEN,
        "training.global_batch_size": world.dp * max(2, world.pp),
        "launch.gpu": "cpu",
        "compile.backend": "aot_eager",
    }
    return build(preset, None, [f"{key}={value}" for key, value in small.items()])


def look(preset: str, rank: int) -> Seen:
    """What `rank` of the preset's world has and does. This process can be no other rank afterwards: see `alone`."""
    import torch

    from titan_cli.worker import private
    from titan_cli.worker.parallel import build_mesh

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    target = full(preset)
    private.fake_world(rank, target.world.world_size)
    mesh = build_mesh(target.world, "cpu")  # of the reduced one too: the degrees are the same
    return Seen(build_all(target, mesh), train_two_steps(reduced(preset), mesh))


def build_all(target: Target, mesh: Any) -> dict[int, Built]:
    """The stages of this rank, by number."""
    from torch.distributed.fsdp import FSDPModule

    from titan_cli.worker import private
    from titan_cli.worker.health import CompileWatch
    from titan_cli.worker.parallel import parallelize
    from titan_cli.worker.train import build_model

    built = {}
    for index in own_stages(target, mesh):
        watch = CompileWatch(target.plan.backend)
        model, tp_plan = build_model(target.config, target.world.stages[index])
        parallelize(model, mesh, target.plan, tp_plan, watch)
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        hooks = {name: [hook.__qualname__ for hook in private.hooks(module)] for name, module in modules.items()}
        built[index] = Built(
            parameters={name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in parameters.items()},
            dtypes={str(p.dtype) for p in parameters.values()},
            blocks=list(watch.blocks),
            units={name for name, module in modules.items() if isinstance(module, FSDPModule)},
            hooked={name for name in modules if hooks[name]},
            waiting={name for name in modules if "wait_on_embedding.<locals>.wait" in hooks[name]},
            replaced={name for name, module in modules.items() if "forward" in vars(module)},
        )
    return built


def train_two_steps(target: Target, mesh: Any) -> Trained:
    """Forward, backward and update by what a run is made of; only the tokens are not a text's."""
    import numpy as np
    import torch

    from titan_cli.worker import optim
    from titan_cli.worker.data import Data, Packed
    from titan_cli.worker.health import CompileWatch, audit_gradients, check_compile
    from titan_cli.worker.parallel import materialize, parallelize
    from titan_cli.worker.pipeline import Joined
    from titan_cli.worker.train import Trainer, build_model

    torch.manual_seed(0)
    config, world, plan, device = target.config, target.world, target.plan, torch.device("cpu")
    watch = CompileWatch(plan.backend)
    stages: dict[int, Any] = {}
    for index in own_stages(target, mesh):
        model, tp_plan = build_model(config, world.stages[index])
        parallelize(model, mesh, plan, tp_plan, watch)
        materialize(model, device, config.training.seed)
        stages[index] = model
    whole = stages[0] if world.pp == 1 else Joined(list(stages.values()))
    # From this rank's part of the vocabulary: the others' would be embedded as zeros, whose norm makes gradients explode.
    part = target.model.vocab_size // world.tp
    first = mesh.tp.get_local_rank() * part
    text = Packed(np.random.default_rng(0).integers(first, first + part, 8 * SEQ_LEN + 1), SEQ_LEN, seed=0)
    data = Data(text, text, "", config, mesh.dp_rank, world.dp, begin_id=0, eval_micro_batches=1)
    optimizer = optim.build_optimizer(whole, config.optimizer)
    trainer = Trainer(config, plan, world, mesh, device, whole, stages, optimizer, data, watch)

    parameters = dict(whole.named_parameters())
    first_step: dict[str, Any] = {}

    def inspect() -> None:
        health = check_compile(watch, plan, evaluated=False)
        first_step["without_gradient"] = {name for name, parameter in parameters.items() if parameter.grad is None}
        first_step["dead"] = audit_gradients(whole, list(parameters)).faults
        first_step["compiled"], first_step["faults"] = health.compiled, health.faults

    trainer.train_step([trainer.local(batch) for batch in data.micro_batches(1)], inspect)
    graphs = len(watch.graphs)
    trainer.train_step([trainer.local(batch) for batch in data.micro_batches(2)])
    return Trained(
        parameters=set(parameters),
        recompiled=[graph.block for graph in watch.graphs[graphs:]],
        **first_step,
    )


def own_stages(target: Target, mesh: Any) -> list[int]:
    return [index for index, stage in enumerate(target.world.stages) if stage.rank == mesh.pp.get_local_rank()]


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process of its own, with torch loaded and in no process group. All must be picklable."""
    ours, theirs = ranks._CONTEXT.Pipe(duplex=False)
    process = ranks._CONTEXT.Process(target=_alone, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        (result,) = ranks._collect([ours])
    finally:
        process.kill()
        process.join()
    return result


def _alone(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send_bytes(pickle.dumps((False, function(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
    os._exit(0)
