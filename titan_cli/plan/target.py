"""From a preset and overrides to everything the verbs start with: configuration, layout, facts, plan, memory. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from titan_cli import hardware
from titan_cli.config.derive import Resolved, model_config, resolve
from titan_cli.config.layers import Loaded, Origin, load
from titan_cli.config.schema import Config
from titan_cli.errors import TitanError
from titan_cli.models.llama3.config import Llama3Config
from titan_cli.models.llama3.tp_plan import CUT_DIM, TP_PLAN
from titan_cli.plan import fit
from titan_cli.plan.facts import Facts, parse_version
from titan_cli.plan.planner import Plan, make_plan


@dataclass(frozen=True)
class Target:
    """What a verb works on. `gpu` is the device planned for, None on a CPU or when `launch.gpu` leaves it to the machine."""

    name: str
    config: Config
    origins: dict[str, Origin]
    world: Resolved
    model: Llama3Config
    device: str
    gpu: hardware.Gpu | None
    visible: tuple[hardware.Visible, ...]
    plan: Plan
    states: fit.States


def build(preset: str | None, config_file: str | None, overrides: Sequence[str]) -> Target:
    """Resolve, derive and plan. Raises TitanError for every problem that needs no machine to be seen."""
    return from_config(Path(preset).stem if preset else "config", load(preset, config_file, overrides))


def from_config(name: str, loaded: Loaded) -> Target:
    """As `build`, from a configuration that is loaded already."""
    config = loaded.config
    gpu = _gpu(config.launch.gpu)
    visible = () if config.launch.gpu == "cpu" else hardware.visible_gpus()
    device = "cuda" if gpu or (config.launch.gpu == "auto" and visible) else "cpu"
    world = resolve(config, len(visible))
    # The batch is part of what a run is: a continuation on other hardware must not derive another one.
    batch = config.training.model_copy(update={"global_batch_size": world.global_batch_size})
    config = config.model_copy(update={"training": batch})
    plan = make_plan(facts(config, world, device, gpu, visible), config.compile.strategy, config.compile.force)
    model = model_config(config)
    states = fit.states(model.shapes(), world, TP_PLAN, CUT_DIM, config.training.dtype)
    return Target(name, config, loaded.origins, world, model, device, gpu, visible, plan, states)


def facts(config: Config, world: Resolved, device: str, gpu: hardware.Gpu | None, visible: Sequence[hardware.Visible]) -> Facts:
    capability = gpu.capability if gpu else visible[0].capability if device == "cuda" else None
    return Facts(
        family=config.model.family,
        blocks=(("dense", model_config(config).n_layers),),
        attention=config.model.attention,
        dp_replicate=world.dp_replicate,
        dp_shard=world.dp_shard,
        cp=world.cp,
        tp=world.tp,
        pp=world.pp,
        ep=world.ep,
        ac_mode=config.activation_checkpoint.mode,
        dtype=config.training.dtype,
        loss=config.compile.loss,
        backend=config.compile.backend,
        torch=parse_version(version("torch")),
        device="cuda" if device == "cuda" else "cpu",
        capability=capability,
        cxx_compiler=hardware.has_cxx_compiler(),
    )


def _gpu(name: str) -> hardware.Gpu | None:
    if name in ("auto", "cpu"):
        return None
    gpu = hardware.known(name)
    if gpu is None:
        known = ["auto", "cpu", *(g.name for g in hardware.GPUS)]
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise TitanError(f"launch.gpu={name}: unknown device", f"{meant}known: {', '.join(known)}")
    return gpu
