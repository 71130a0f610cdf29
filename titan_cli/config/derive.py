"""What follows from a whole configuration by arithmetic: ranks, degrees, batch. Pure, and never changes a value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, prod

from titan_cli.config import families
from titan_cli.config import stages as pipeline
from titan_cli.config.schema import Config
from titan_cli.config.stages import Stage
from titan_cli.errors import TitanError
from titan_cli.models.common.decoder import Decoder
from titan_cli.models.deepseek_v3 import config as deepseek_v3


@dataclass(frozen=True)
class Resolved:
    """A configuration's numbers on given hardware. Degrees count ranks, batches count sequences.

    `stages` are the pipeline's, in forward order; without one a single stage has everything. `rules` says for each derived
    field, by its name, which rule gave the number, and `pipeline_bubble` how long a rank waits.
    """

    nodes: int
    ranks_per_node: int
    world_size: int
    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int
    pp: int
    ep: int
    global_batch_size: int
    gradient_accumulation_steps: int
    stages: tuple[Stage, ...]
    rules: Mapping[str, str]

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard


def resolve(config: Config, visible_gpus: int) -> Resolved:
    """All derived numbers. Raises TitanError with every sum that does not come out, and its fix."""
    p = config.parallelism
    families.find(config.model.family)  # without it there is nothing to say of the rest
    rules: dict[str, str] = {}
    ranks_per_node = _ranks_per_node(config, visible_gpus, rules)
    world_size = config.launch.nodes * ranks_per_node
    problems: list[str] = []
    stages: tuple[Stage, ...] = ()
    try:
        model = model_config(config)
        problems += [*_tp_problems(model, config), *_cp_problems(config), *_ep_problems(model, config)]
        stages = _stages(model, config, rules)
    except TitanError as error:
        problems.append(f"{error.message}\n    {error.hint}")
    except ValueError as error:
        problems.append(str(error))
    try:
        dp_shard = _dp_shard(config, world_size, rules)
        global_batch_size = _global_batch_size(config, p.dp_replicate * dp_shard, rules)
        micro_batch = config.training.local_batch_size * p.dp_replicate * dp_shard
        _check_pipeline(config, stages, global_batch_size // micro_batch, micro_batch, rules)
    except ValueError as error:
        problems.insert(0, str(error))
    if problems:
        raise TitanError("\n".join(problems), hint="`titan options parallelism` explains the degrees.")
    rules["gradient_accumulation_steps"] = (
        f"{global_batch_size // micro_batch} = global_batch_size {global_batch_size} / (local_batch_size "
        f"{config.training.local_batch_size} x data-parallel ranks {p.dp_replicate * dp_shard})"
    )
    return Resolved(
        nodes=config.launch.nodes,
        ranks_per_node=ranks_per_node,
        world_size=world_size,
        dp_replicate=p.dp_replicate,
        dp_shard=dp_shard,
        tp=p.tp,
        cp=p.cp,
        pp=p.pp,
        ep=p.ep,
        global_batch_size=global_batch_size,
        gradient_accumulation_steps=global_batch_size // micro_batch,
        stages=stages,
        rules=rules,
    )


def model_config(config: Config) -> Decoder:
    """The flavor's dimensions, with those replaced that the configuration sets. Raises TitanError if they do not fit."""
    m = config.model
    flavors = families.find(m.family).flavors
    if m.flavor not in flavors:
        near = difflib.get_close_matches(m.flavor, flavors, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        message = f"model.flavor: unknown flavor {m.flavor} of {m.family}"
        raise TitanError(message, hint=f"{meant}There are {', '.join(flavors)}.")
    dimensions = m.model_dump(exclude={"family", "flavor", "attention"}, exclude_none=True)
    known = [field.name for field in fields(flavors[m.flavor])]
    if foreign := [f"model.{name}" for name in dimensions if name not in known]:
        message = f"{', '.join(foreign)}: {m.family} has no such dimension"
        raise TitanError(message, hint=f"It has {', '.join(name for name in known if name in type(m).model_fields)}.")
    try:
        return replace(flavors[m.flavor], **dimensions)
    except ValueError as error:
        raise TitanError(f"model: {error}", hint="Change one of the two, or leave both to the flavor.") from None


def not_trained_yet(config: Config) -> list[str]:
    """What this configuration asks for that titan plans and explains but cannot train; empty: nothing. Callers exit 3."""
    p = config.parallelism
    asked = {
        'model.family="deepseek_v3"': (config.model.family == "deepseek_v3", "llama3"),
        f"parallelism.ep={p.ep}": (p.ep > 1, 1),
        "float8.enable=true": (config.float8.enable, "false"),
    }
    return [
        f"{what} can be planned, not trained yet; {what.partition('=')[0]}={instead} can"
        for what, (is_asked, instead) in asked.items()
        if is_asked
    ]


def layout(config: Config) -> str:
    """The degrees above 1 in one phrase, as known without a machine. ep is apart: it takes ranks of the others."""
    p, launch = config.parallelism, config.launch
    if p.dp_shard == -1 and launch.gpus_per_node == "auto" and launch.gpu != "cpu":
        shard = "all visible GPUs"
    else:
        shard = str(resolve(config, visible_gpus=0).dp_shard)
    degrees = {
        "dp_replicate": str(p.dp_replicate),
        "dp_shard": shard,
        "cp": str(p.cp),
        "tp": str(p.tp),
        "pp": str(p.pp),
    }
    product = " x ".join(f"{name} {n}" for name, n in degrees.items() if n != "1") or "1 rank"
    return product if p.ep == 1 else f"{product}, ep {p.ep}"


def _ranks_per_node(config: Config, visible_gpus: int, rules: dict[str, str]) -> int:
    p, launch = config.parallelism, config.launch
    if launch.gpus_per_node != "auto":
        return launch.gpus_per_node
    if launch.gpu != "cpu" and visible_gpus:
        rules["ranks_per_node"] = f"{visible_gpus} = the visible GPUs (launch.gpus_per_node = auto)"
        return visible_gpus
    # Rounded up, so that degrees which do not fill the nodes are reported as such and not as zero ranks.
    ranks = -(-_product(config) // launch.nodes)
    fixed = f"dp_replicate {p.dp_replicate} x dp_shard {max(p.dp_shard, 1)} x cp {p.cp} x tp {p.tp} x pp {p.pp}"
    nodes = f" / {launch.nodes} nodes" if launch.nodes > 1 else ""
    rules["ranks_per_node"] = f"{ranks} = {fixed}{nodes} (launch.gpus_per_node = auto, no GPU)"
    return ranks


def _product(config: Config) -> int:
    """Ranks that the fixed degrees need; dp_shard = -1 counts 1."""
    p = config.parallelism
    return prod((p.dp_replicate, max(p.dp_shard, 1), p.cp, p.tp, p.pp))


def _dp_shard(config: Config, world_size: int, rules: dict[str, str]) -> int:
    """Raises ValueError if the degrees do not multiply to the world, or ep does not divide its part of it."""
    p, launch = config.parallelism, config.launch
    product = _product(config)
    ranks = f"{launch.nodes} x {world_size // launch.nodes} ranks = {world_size}"
    degrees = f"dp_replicate {p.dp_replicate} x dp_shard {p.dp_shard} x cp {p.cp} x tp {p.tp} x pp {p.pp}"
    if p.dp_shard == -1 and world_size % product:
        raise ValueError(
            f"parallelism: {degrees} leaves no whole dp_shard: {ranks} is not a multiple of {product}\n"
            f"    Choose degrees whose product divides {world_size}, or launch.gpus_per_node={product}."
        )
    if p.dp_shard != -1 and product != world_size:
        others = product // p.dp_shard
        shard = (
            f"parallelism.dp_shard={world_size // others}"
            if world_size % others == 0
            else f"degrees that multiply to {world_size}"
        )
        per_node = f", or launch.gpus_per_node={product // launch.nodes}" if product % launch.nodes == 0 else ""
        raise ValueError(f"parallelism: {degrees} = {product}, but {ranks}\n    Set {shard}{per_node}.")
    dp_shard = world_size // product if p.dp_shard == -1 else p.dp_shard
    if (cut := dp_shard * p.cp * p.tp) % p.ep:
        divisors = ", ".join(map(str, _divisors(cut)))
        raise ValueError(f"parallelism.ep = {p.ep} does not divide dp_shard x cp x tp = {cut}\n    ep can be {divisors}.")
    if p.dp_shard == -1:
        rules["dp_shard"] = f"{dp_shard} = {ranks} / (dp_replicate {p.dp_replicate} x cp {p.cp} x tp {p.tp} x pp {p.pp})"
    return dp_shard


def _global_batch_size(config: Config, dp: int, rules: dict[str, str]) -> int:
    """Raises ValueError if it is not a whole number of micro-batches."""
    local, wanted = config.training.local_batch_size, config.training.global_batch_size
    if wanted is None:
        rules["global_batch_size"] = f"{local * dp} = local_batch_size {local} x data-parallel ranks {dp}"
        return local * dp
    if wanted % (local * dp):
        above = wanted // (local * dp) * local * dp + local * dp
        nearest = " or ".join(str(n) for n in (above - local * dp, above) if n)
        raise ValueError(
            f"training.global_batch_size = {wanted} is not a multiple of local_batch_size {local} x data-parallel ranks {dp}"
            f" = {local * dp}\n    Nearest: {nearest}. Or change training.local_batch_size."
        )
    return wanted


def _stages(model: Decoder, config: Config, rules: dict[str, str]) -> tuple[Stage, ...]:
    """Raises ValueError if the blocks cannot be laid out as the configuration wants."""
    p, seq_len = config.parallelism, config.training.seq_len
    stages = pipeline.split(model, seq_len, p.pp, p.pp_schedule, p.pp_layers)
    if p.pp > 1 and p.pp_layers is None:
        flops = pipeline.flops_per_token(model, seq_len, stages)
        blocks, worst = pipeline.in_words(stages), max(flops) * len(flops) / sum(flops)
        rules["stages"] = f"{blocks} blocks: balanced by FLOPs at seq_len {seq_len}, the costliest {worst:.2f} x the mean"
    return stages


def _check_pipeline(config: Config, stages: Sequence[Stage], micro_batches: int, sequences: int, rules: dict[str, str]) -> None:
    """Raises ValueError if the schedule cannot run a step's micro-batches, of `sequences` over all data-parallel ranks."""
    p = config.parallelism
    if p.pp == 1 or not stages:
        return
    if p.reshard_after_forward == "always":
        # Torch's pipelines gather a stage once in a step, whatever is asked for; and a split backward would lose gradients.
        raise ValueError(
            f"parallelism.reshard_after_forward = always frees nothing with pp {p.pp}, where stages stay gathered for a step\n"
            "    Leave it at auto."
        )
    pipeline.check_micro_batches(p.pp_schedule, p.pp, len(stages), micro_batches, sequences)
    if waiting := pipeline.bubble(p.pp_schedule, p.pp, len(stages), micro_batches):
        rules["pipeline_bubble"] = waiting


def _cp_problems(config: Config) -> list[str]:
    cp, seq_len = config.parallelism.cp, config.training.seq_len
    if cp == 1 or seq_len % (2 * cp) == 0:
        return []
    # An early and a late chunk for each rank: a causal query costs more the later it stands.
    chunks = f"parallelism.cp = {cp}: training.seq_len {seq_len} does not divide into 2 x {cp} chunks, two for each rank"
    possible = [1] if seq_len % 2 else _divisors(seq_len // 2)
    return [f"{chunks}\n    cp can be {', '.join(map(str, possible))} with this length."]


def _tp_problems(model: Decoder, config: Config) -> list[str]:
    cut = model.tp_sizes()
    tp, cp, seq_len = config.parallelism.tp, config.parallelism.cp, config.training.seq_len
    if config.parallelism.sequence_parallel:  # the sequence, or what cp leaves of it, is cut between the blocks
        cut |= {"training.seq_len": seq_len} if cp == 1 else {f"training.seq_len / cp {cp} =": seq_len // cp}
    uneven = [f"{name} {size}" for name, size in cut.items() if size % tp]
    if not uneven:
        return []
    possible = ", ".join(map(str, _divisors(gcd(*cut.values()))))
    return [f"parallelism.tp = {tp} does not divide {', '.join(uneven)}\n    tp can be {possible} with these sizes."]


def _ep_problems(model: Decoder, config: Config) -> list[str]:
    ep, family = config.parallelism.ep, config.model.family
    if not isinstance(model, deepseek_v3.DeepSeekV3Config):
        return [f"parallelism.ep = {ep}, but {family} has no experts\n    ep can be 1."] if ep > 1 else []
    if model.n_experts % ep == 0:
        return []
    possible = ", ".join(map(str, _divisors(model.n_experts)))
    return [f"parallelism.ep = {ep} does not divide n_experts {model.n_experts}\n    ep can be {possible}."]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
