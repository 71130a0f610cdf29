"""From a preset and overrides to everything the verbs start with: configuration, layout, facts, plan, memory. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from titan_cli import hardware
from titan_cli.config import families
from titan_cli.config.derive import Resolved, model_config, resolve
from titan_cli.config.layers import Origin, load
from titan_cli.config.schema import Config
from titan_cli.errors import ExitCode, TitanError
from titan_cli.models.common.decoder import Decoder
from titan_cli.plan import fit
from titan_cli.plan.facts import OLDEST, Facts, Version, parse_version
from titan_cli.plan.names import lookup
from titan_cli.plan.planner import Plan, make_plan


@dataclass(frozen=True)
class Target:
    """What a verb works on. `gpu` is the device planned for, None on a CPU or when `launch.gpu` leaves it to the machine."""

    name: str
    config: Config
    origins: dict[str, Origin]
    world: Resolved
    model: Decoder
    gpu: hardware.Gpu | None
    visible: tuple[hardware.Visible, ...]
    facts: Facts
    plan: Plan
    states: fit.States

    @property
    def device(self) -> str:
        return self.plan.device


def build(
    preset: str | None, config_file: str | None, overrides: Sequence[str], torch: str | None = None, without: str = ""
) -> Target:
    """Resolve, derive and plan, for the installed torch or another one; `without` leaves one rule out.

    Raises TitanError for every problem that needs no machine to be seen.
    """
    loaded = load(preset, config_file, overrides)
    config = loaded.config
    gpu = planned_gpu(config.launch.gpu)
    visible = () if config.launch.gpu == "cpu" else hardware.visible_gpus()
    world = resolve(config, len(visible))
    config = fixed(config, world)
    facts = make_facts(config, world, gpu, visible, planned_torch(torch))
    plan = make_plan(facts, config.compile.strategy, config.compile.force, without)
    model = model_config(config)
    family = families.find(config.model.family)
    if config.model.family not in families.FLAVORS:
        check_cuts(family, model, world.tp)
    states = fit.states(model.shapes(), world, family.tp_plan, family.cut_dim, config.training.dtype, not plan.reshard)
    name = Path(preset).stem if preset else "config"
    return Target(name, config, loaded.origins, world, model, gpu, visible, facts, plan, states)


def check_cuts(family: families.Family, model: Decoder, tp: int) -> None:
    """Raise TitanError (refused) where the TP_PLAN of a user's own family does not fit its parameters."""
    words = family.cut_dim
    wrong = [
        f'{pattern} = "{word}"; the styles are {", ".join(words)}'
        for pattern, word in family.tp_plan.items()
        if word not in words
    ]
    for name in model.shapes() if not wrong else ():
        word = lookup(name.rpartition(".")[0], family.tp_plan)
        if word is None and tp > 1:
            wrong.append(f"no style for {name}: with tp = {tp} each module that has parameters needs one")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise TitanError(f"{family.package}.tp_plan: {wrong[0]}{more}", f"{families.GUIDE}.", ExitCode.REFUSED)


def fixed(config: Config, world: Resolved) -> Config:
    """The configuration with what a continuation on other hardware, or from another folder, must not read differently."""
    paths = {
        name: str(Path(path).expanduser().absolute()) for name in ("data", "tokenizer") if (path := getattr(config, name).path)
    }
    changed = {name: getattr(config, name).model_copy(update={"path": path}) for name, path in paths.items()}
    batch = config.training.model_copy(update={"global_batch_size": world.global_batch_size})
    return config.model_copy(update={**changed, "training": batch})


def planned_torch(asked: str | None) -> Version:
    """The version to plan for: the one asked for, or the installed one. Raises TitanError (usage) for one that is too old."""
    text = asked or version("torch")
    try:
        parsed = parse_version(text)
    except ValueError as error:
        raise TitanError(f"--torch {text}: {error}", "for example --torch 2.14.1") from None
    if parsed < OLDEST:
        raise TitanError(f"torch {text}: titan supports torch >= 2.11", "plan for a newer one, or install it")
    return parsed


def make_facts(
    config: Config, world: Resolved, gpu: hardware.Gpu | None, visible: Sequence[hardware.Visible], torch: Version
) -> Facts:
    """The planner's view of a resolved configuration."""
    model, parallelism, ac = model_config(config), config.parallelism, config.activation_checkpoint
    capability = gpu.capability if gpu else visible[0].capability if visible else None
    return Facts(
        family=config.model.family,
        blocks=model.block_kinds(),
        attention=config.model.attention,
        tied=model.tie_embeddings,
        dp_replicate=world.dp_replicate,
        dp_shard=world.dp_shard,
        cp=world.cp,
        tp=world.tp,
        pp=world.pp,
        ep=world.ep,
        pp_schedule=parallelism.pp_schedule,
        sequence_parallel=parallelism.sequence_parallel,
        loss_parallel=parallelism.loss_parallel,
        async_tp=parallelism.async_tp,
        reshard={"auto": world.pp == 1, "always": True, "never": False}[parallelism.reshard_after_forward],
        ac_mode=ac.mode,
        ac_option=ac.selective_option,
        float8=config.float8.enable,
        dtype=config.training.dtype,
        loss=config.compile.loss,
        backend=config.compile.backend,
        torch=torch,
        device="cuda" if capability else "cpu",
        capability=capability,
        cxx_compiler=hardware.has_cxx_compiler(),
    )


def planned_gpu(name: str) -> hardware.Gpu | None:
    if name in ("auto", "cpu"):
        return None
    gpu = hardware.known(name)
    if gpu is None:
        known = ["auto", "cpu", *(g.name for g in hardware.GPUS)]
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise TitanError(f"launch.gpu={name}: unknown device", f"{meant}known: {', '.join(known)}")
    return gpu
