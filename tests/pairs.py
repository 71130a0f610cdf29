"""Every feature of a layout, how it is asked for, and the cells that hold every pair of them to the model on one rank.

The tests run the cells and docs/parallelism.md tells of them; both read what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Literal

from tests.cells import make_target
from titan_cli.config.derive import not_trained_yet
from titan_cli.errors import TitanError
from titan_cli.plan.planner import Refused
from titan_cli.plan.target import Target

TORCH = "2.13.0"  # that the page is written for; on the other supported ones rules may refuse more
OTHERS = ("2.11.0", "2.14.1")

PP = "parallelism.pp=2 parallelism.pp_schedule="
AC = "activation_checkpoint.mode="
# A GPU's plan, made on any machine.
GPU = "launch.gpu=H200-141 compile.backend=inductor training.dtype=bfloat16"


@dataclass(frozen=True)
class Feature:
    """`has` looks for it in a target; `words` are overrides that ask for it, by one way or by several."""

    about: str
    has: Callable[[Target], bool]
    words: tuple[str, ...]


def schedule(name: str, words: str = "") -> Feature:
    return Feature(
        f"pipeline, {name}",
        lambda t: t.world.pp > 1 and t.config.parallelism.pp_schedule == name,
        (f"{PP}{name} {words}".strip(),),
    )


def checkpointing(about: str, mode: str, option: str = "") -> Feature:
    words = AC + mode + (f" activation_checkpoint.selective_option={option}" if option else "")
    return Feature(about, lambda t: (t.plan.ac_mode, t.plan.ac_option) == (mode, option), (words,))


def strategy(about: str, name: str) -> Feature:
    return Feature(about, lambda t: t.plan.strategy == name, (f"compile.strategy={name}",))


def shards(target: Target) -> bool:
    return target.world.dp_shard * target.world.cp > 1


FEATURES = {
    "fsdp": Feature("FSDP2 shards parameters", lambda t: t.world.dp_shard > 1, ("parallelism.dp_shard=2",)),
    "replicate": Feature("copies of the model", lambda t: t.world.dp_replicate > 1, ("parallelism.dp_replicate=2",)),
    "reshard": Feature(
        "FSDP frees gathered parameters after forward",
        lambda t: t.plan.reshard and shards(t),
        (
            "parallelism.dp_shard=2 parallelism.reshard_after_forward=always",
            "parallelism.cp=2 parallelism.reshard_after_forward=always",
        ),
    ),
    "keep": Feature(
        "FSDP keeps them until backward",
        lambda t: not t.plan.reshard and shards(t),
        (
            "parallelism.dp_shard=2 parallelism.reshard_after_forward=never",
            "parallelism.cp=2 parallelism.reshard_after_forward=never",
        ),
    ),
    "accumulate": Feature(
        "several micro-batches a step (in a pipeline, too)",
        lambda t: t.world.gradient_accumulation_steps > 1,
        ("training.global_batch_size=4", "training.global_batch_size=8"),
    ),
    "batch": Feature(
        "several sequences a micro-batch",
        lambda t: t.config.training.local_batch_size > 1,
        ("training.local_batch_size=2 training.global_batch_size=8",),
    ),
    "tp": Feature(
        "tensor parallel, sequence parallel between the blocks",
        lambda t: t.world.tp > 1 and t.plan.sequence_parallel,
        ("parallelism.tp=2 parallelism.sequence_parallel=true",),
    ),
    "tp-whole": Feature(
        "tensor parallel, activations whole between the blocks",
        lambda t: t.world.tp > 1 and not t.plan.sequence_parallel,
        ("parallelism.tp=2 parallelism.sequence_parallel=false",),
    ),
    "loss-parallel": Feature(
        "logits stay cut by vocabulary",
        lambda t: t.plan.loss_parallel,
        ("parallelism.tp=2 parallelism.loss_parallel=true",),
    ),
    "async-tp": Feature(
        "tensor parallel, communication overlapped",
        lambda t: t.facts.async_tp,
        (f"parallelism.tp=2 parallelism.async_tp=true {GPU}",),
    ),
    "cp": Feature("context parallel", lambda t: t.world.cp > 1, ("parallelism.cp=2",)),
    "gpipe": schedule("GPipe"),
    "1f1b": schedule("1F1B"),
    "interleaved": schedule("Interleaved1F1B"),
    "izb": schedule("InterleavedZeroBubble"),
    "zbv": schedule("ZBVZeroBubble"),
    "dualpipe": schedule("DualPipeV", "training.global_batch_size=8"),
    "pp-layers": Feature(
        "stages cut by hand",
        lambda t: t.world.pp > 1 and t.config.parallelism.pp_layers is not None,
        tuple(f"parallelism.pp=2 parallelism.pp_layers={layers}" for layers in ("[1,3]", "[0,1,2,1]", "[0,1,1,1,1,0]")),
    ),
    "stages": Feature(
        "more than two stages a rank",
        lambda t: len(t.world.stages) > 2 * t.world.pp > 2,
        (f"{PP}Interleaved1F1B parallelism.pp_layers=[0,1,1,1,1,0]", "parallelism.pp=2 parallelism.pp_layers=[0,1,1,1,1,0]"),
    ),
    "tied": Feature("the embedding is the head", lambda t: t.facts.tied, ("model.tie_embeddings=true",)),
    # So long that its mask has several tiles of 128 also where context parallel cuts the sequence.
    "flex": Feature(
        "FlexAttention, documents masked",
        lambda t: t.facts.attention == "flex",
        ("model.attention=flex training.seq_len=320",),
    ),
    "full-ac": checkpointing("every block checkpointed", "full"),
    "nth-ac": checkpointing("every 2nd block checkpointed", "selective", "2"),
    "op-ac": checkpointing("checkpointed by operator", "selective", "op"),
    "block": strategy("each block compiled", "block"),
    "submodule": strategy("each submodule compiled", "submodule"),
    "norm": strategy("only norms compiled", "norm"),
    "whole": strategy("the whole model compiled", "whole"),
    "loss": Feature(
        "the loss compiled", lambda t: t.plan.loss, ("compile.loss=true", "compile.strategy=block compile.loss=true")
    ),
    "ep": Feature("expert parallel", lambda t: t.world.ep > 1, ("parallelism.ep=2 parallelism.dp_shard=2",)),
    "deepseek": Feature("DeepSeek-V3", lambda t: t.facts.family == "deepseek_v3", ("model.family=deepseek_v3",)),
    "float8": Feature("matmuls in float8", lambda t: t.facts.float8, (f"float8.enable=true {GPU}",)),
}

# float64 on the CPU; small, and deep enough for six stages, of which the first and the last have no block.
SMALL = ("training.dtype=float64", "compile.backend=aot_eager", "model.n_layers=4", "model.dim=64", "model.ffn_dim=128")
EAGER = "compile.strategy=off"
COMPILING = ("block", "submodule", "norm", "whole", "loss")
ON_GPUS = ("async-tp", "float8")

# Trained in eager. Every pair that is not refused, of layouts, checkpointing and attention, is in one of these, of 4 ranks ...
EAGER_CELLS = (
    "fsdp replicate reshard batch tied full-ac",
    "fsdp tp keep loss-parallel tied nth-ac flex",
    "fsdp tp-whole reshard loss-parallel tied op-ac",
    "fsdp cp reshard op-ac batch",
    "fsdp tp reshard nth-ac flex",
    "replicate tp loss-parallel batch nth-ac",
    "replicate tp-whole full-ac",
    "replicate cp keep tied op-ac",
    "cp tp reshard tied op-ac",
    "cp tp-whole keep loss-parallel batch nth-ac flex",
    "fsdp gpipe keep full-ac flex pp-layers",
    "cp gpipe keep nth-ac",
    "replicate gpipe op-ac pp-layers",
    "tp loss-parallel gpipe batch",
    "tp-whole gpipe",
    "fsdp 1f1b keep nth-ac pp-layers",
    "cp 1f1b keep op-ac flex",
    "replicate 1f1b batch",
    "tp loss-parallel 1f1b full-ac",
    "tp-whole loss-parallel 1f1b",
    "fsdp interleaved keep op-ac batch stages",
    "cp interleaved keep full-ac stages",
    "replicate interleaved nth-ac flex stages",
    "tp loss-parallel interleaved stages op-ac",
    "tp-whole interleaved stages",
    "fsdp izb keep full-ac stages batch",
    "cp izb keep nth-ac",
    "replicate izb pp-layers",
    "tp izb stages",
    "tp-whole loss-parallel izb stages",
    "fsdp zbv keep nth-ac pp-layers",
    "cp zbv keep full-ac",
    "replicate zbv batch",
    "tp loss-parallel zbv pp-layers",
    "tp-whole zbv",
    "fsdp dualpipe keep full-ac",
    "cp dualpipe keep batch pp-layers",
    "replicate dualpipe nth-ac",
    "tp dualpipe",
    "tp-whole loss-parallel dualpipe",
)
# ... and three or four dimensions are in these, of 8 ranks.
WIDE_CELLS = (
    "fsdp tp 1f1b loss-parallel full-ac",
    "cp tp interleaved loss-parallel op-ac flex",
    "fsdp replicate cp flex batch",
    "fsdp replicate tp reshard",
    "fsdp cp tp-whole keep nth-ac",
    "fsdp cp izb keep",
    "fsdp tp-whole dualpipe",
    "replicate cp gpipe full-ac",
    "replicate tp zbv",
)
# Compiled, each in a set of ranks of its own. A schedule that splits backward needs checkpointing by operator inside the
# compiled block: in eager it is an error.
COMPILED_CELLS = (
    "block tp 1f1b loss-parallel op-ac batch pp-layers",
    "block cp interleaved keep nth-ac stages flex",
    "block fsdp tp tied full-ac",
    "submodule fsdp 1f1b keep nth-ac batch pp-layers",
)
SLOW_COMPILED_CELLS = (
    "block fsdp gpipe keep full-ac flex",
    "block replicate izb op-ac",
    "block tp-whole zbv op-ac",
    "block cp dualpipe op-ac",
    "block tp zbv full-ac",
    "block replicate tp-whole batch nth-ac",
    "block cp tp op-ac flex",
    "submodule tp gpipe loss-parallel full-ac flex",
    "submodule cp interleaved keep op-ac stages",
    "submodule tp-whole izb",
    "submodule replicate zbv full-ac",
    "submodule fsdp dualpipe",
    "submodule fsdp tp-whole reshard tied",
    "submodule replicate batch",
    "norm replicate gpipe nth-ac flex",
    "norm tp 1f1b loss-parallel full-ac batch",
    "norm fsdp interleaved keep op-ac stages",
    "norm cp izb keep",
    "norm tp-whole zbv pp-layers",
    "norm fsdp dualpipe",
    "norm cp tp-whole reshard tied",
    "block fsdp tp 1f1b loss-parallel full-ac",
    "block cp tp interleaved loss-parallel op-ac flex",
)


@dataclass(frozen=True)
class Cell:
    """A combination of features that one test trains, in eager unless one of them compiles."""

    features: tuple[str, ...]
    words: tuple[str, ...]
    target: Target

    @property
    def on_one_rank(self) -> tuple[str, ...]:
        """The words for the same model and batch without layout, checkpointing and compiler."""
        kept = ("model.", "training.global_batch_size=", "training.seq_len=")
        return (*SMALL, EAGER, *(word for word in self.words if word.startswith(kept) and word not in SMALL))

    @property
    def world_size(self) -> int:
        return self.target.world.world_size

    @property
    def has(self) -> frozenset[str]:
        """Also what was not asked for, such as several micro-batches."""
        return frozenset(name for name, feature in FEATURES.items() if feature.has(self.target))


def combine(features: Sequence[str], torch: str | None = None) -> Cell:
    """The features in one configuration, asked for in those of their ways that need the fewest ranks.

    Raises TitanError if no way is allowed, by a rule (Refused) rather than by a check; ValueError if all contradict themselves.
    """
    fixed = SMALL if set(features) & {*COMPILING, *ON_GPUS} else (*SMALL, EAGER)
    found: list[Cell] = []
    refused: list[TitanError] = []
    for ways in product(*(FEATURES[name].words for name in features)):
        asked = {word for way in ways for word in way.split()}
        if len({word.partition("=")[0] for word in asked}) < len(asked):
            continue  # one option, two values
        words = (*fixed, *sorted(asked))
        try:
            cell = Cell(tuple(features), words, make_target(words, torch))
        except TitanError as error:
            refused.append(error)
        else:
            found += [cell] if cell.has >= set(features) else []
    if found:
        return min(found, key=lambda cell: cell.world_size)
    if refused:
        raise next((error for error in refused if isinstance(error, Refused)), refused[0])
    raise ValueError(f"{' and '.join(features)} are values of one option")


@dataclass(frozen=True)
class Outcome:
    """What is known of one or two features together. `cell` trains them; or `name` refuses them, for a `reason`."""

    kind: Literal["equal", "refused", "planned", "one option"]
    cell: str = ""
    name: str = ""
    reason: str = ""


def every_cell() -> tuple[str, ...]:
    return EAGER_CELLS + WIDE_CELLS + COMPILED_CELLS + SLOW_COMPILED_CELLS


@cache
def allowed(torch: str) -> dict[str, Cell]:
    """The cells that a torch's rules do not refuse."""
    found = {}
    for name in every_cell():
        with suppress(Refused):
            found[name] = combine(name.split(), torch)
    return found


def outcome(features: Sequence[str], torch: str = TORCH) -> Outcome:
    """Where the features are trained together; else what refuses them; else that they can only be planned here.

    Raises AssertionError for those that are allowed, would run on the CPU, and are in no cell.
    """
    for name, cell in allowed(torch).items():
        if cell.has >= set(features):
            return Outcome("equal", cell=name)
    try:
        target = combine(features, torch).target
    except Refused as error:
        return Outcome("refused", name=error.rule, reason=error.because)
    except TitanError as error:
        return Outcome("refused", name="check", reason=error.message.splitlines()[0])
    except ValueError:
        return Outcome("one option")
    if problems := not_trained_yet(target.config):
        return Outcome("refused", name="not trained yet", reason=problems[0])
    assert set(features) & set(ON_GPUS), f"{' and '.join(features)}: neither trained in a cell, nor refused"
    return Outcome("planned")


def outcomes(torch: str = TORCH) -> dict[tuple[str, ...], Outcome]:
    """Of every feature, and of every two that are allowed alone."""
    alone = {(name,): outcome((name,), torch) for name in FEATURES}
    allowed = [name for (name,), found in alone.items() if found.kind != "refused"]
    return alone | {pair: outcome(pair, torch) for pair in combinations(allowed, 2)}


def id_of(cell: str) -> str:
    """How pytest calls a cell."""
    return cell.replace(" ", "+")


def test_of(cell: str) -> str:
    """The test that trains a cell."""
    kind = "compiled" if cell in COMPILED_CELLS + SLOW_COMPILED_CELLS else "eager"
    return f"test_{kind}[{id_of(cell)}]"


def markdown() -> str:
    """docs/parallelism.md."""
    found = outcomes()
    labels = {cell: f"E{i}" for i, cell in enumerate(EAGER_CELLS + WIDE_CELLS, 1)}
    labels |= {cell: f"C{i}" for i, cell in enumerate(COMPILED_CELLS + SLOW_COMPILED_CELLS, 1)}
    parts = [INTRODUCTION, "## Features", "", "| name | what | asked for by |", "|---|---|---|"]
    parts += [f"| {name} | {f.about} | `{f.words[0]}` |" for name, f in FEATURES.items()]
    parts += ["", "## Pairs", "", PAIRS, ""]
    parts += [line for name in FEATURES for line in row(name, found, labels)]
    parts += ["", "## Refused", "", *refusals(found), "", "## Refused on other versions", "", *elsewhere(found)]
    parts += ["", "## Tests", "", "| | test in `tests/test_pairs.py` | ranks | set |", "|---|---|---|---|"]
    for cell, label in labels.items():
        size = "slow" if cell in WIDE_CELLS + SLOW_COMPILED_CELLS else "fast"
        parts.append(f"| {label} | `{test_of(cell)}` | {allowed(TORCH)[cell].world_size} | {size} |")
    return "\n".join(parts) + "\n"


INTRODUCTION = f"""# Parallelism

What can be combined: every two features below are trained together by a test that finds them equal to one rank, or they are
refused, with a reason, before anything starts. Generated from `tests/pairs.py` by
`TITAN_UPDATE_GOLDEN=1 pytest tests/test_pairs.py`, for torch {TORCH}.

Equal means: in float64, with the same weights and the same global batches, the losses and gradient norms of two steps and every
whole gradient of the first are those of the same model on one rank, in eager, within 1e-9 (relative; of a gradient by its L2
norm). Ranks hold as many bytes of parameters as planned. Where something is compiled, nothing broke a graph, fell to eager or
compiled again. All this on CPUs, over gloo, compiled by aot_eager: rounding in bfloat16, inductor's kernels and NCCL are not
what is shown here. `tests/test_parallel.py` trains for longer, and in float32.

    pytest tests/test_pairs.py -m "not slow"
    pytest "tests/test_pairs.py::{test_of(EAGER_CELLS[2])}"

FlexAttention has no backward on a CPU (`flex-on-cpu`). The tests plan without this rule and lift torch's refusal: in eager and
with aot_eager the gradients are right (`tests/test_attention.py`).

Asynchronous tensor parallel needs GPUs of one machine. Its pairs are planned and applied, and not proven: that needs several
GPUs. `tests/test_tensor_parallel.py` shows on a CPU that its layout computes the same, and what inductor fuses.
"""
PAIRS = "Two values of one option, such as two schedules, are no pair. E and C are the tests at the end, eager and compiled."


def row(name: str, found: dict[tuple[str, ...], Outcome], labels: dict[str, str]) -> list[str]:
    """A feature's item: what it is trained with, by test, and what it is refused with, by rule."""
    others: dict[str, list[str]] = {}
    for pair, outcome in found.items():
        if name in pair and (len(pair) == 2 or outcome.kind == "refused"):
            (other,) = set(pair) - {name} or {"with anything"}
            text = {"equal": labels.get(outcome.cell, ""), "refused": f"refused by {outcome.name}", "planned": "planned only"}
            others.setdefault(text.get(outcome.kind, ""), []).append(other)
    others.pop("", None)  # two values of one option
    order = sorted(others, key=lambda text: (" " in text, text[:1], len(text), text))
    return [f"- **{name}**: " + "; ".join(f"{text}: {', '.join(others[text])}" for text in order)]


def refusals(found: dict[tuple[str, ...], Outcome]) -> list[str]:
    """What refuses, with all that it refuses and its reason in the first case."""
    cases: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    rules = {outcome.name for outcome in found.values() if outcome.kind == "refused"} - {"check", "not trained yet"}
    for pair, outcome in found.items():
        if outcome.kind == "refused":
            cases.setdefault((outcome.name, "" if outcome.name in rules else outcome.reason), []).append(pair)
    lines = []
    for (name, _), pairs in cases.items():
        what = f"[{name}](compile-rules.md#{name})" if name in rules else name
        each = ", ".join(" + ".join(pair) if len(pair) > 1 else f"{pair[0]} with anything" for pair in pairs)
        lines.append(f"- {what}: {each}. {found[pairs[0]].reason}.")
    return lines


def elsewhere(found: dict[tuple[str, ...], Outcome]) -> list[str]:
    """Pairs that are trained on TORCH and refused on another supported version, by rule."""
    lines = []
    for torch in OTHERS:
        there: dict[str, list[str]] = {}
        for features, here in found.items():
            other = outcome(features, torch)
            if here.kind == "equal" and other.kind == "refused":
                there.setdefault(other.name, []).append(" + ".join(features))
        lines += [f"- torch {torch}, [{rule}](compile-rules.md#{rule}): {', '.join(pairs)}." for rule, pairs in there.items()]
    return lines
