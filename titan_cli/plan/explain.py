"""A plan in a person's words: the model as a tree with what lies around each part, and a reason for every decision."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_cli.config.derive import resolve
from titan_cli.config.layers import load
from titan_cli.config.stages import held_by
from titan_cli.errors import TitanError
from titan_cli.plan.cells import CELLS
from titan_cli.plan.facts import Facts
from titan_cli.plan.planner import judge, named
from titan_cli.plan.rules import RULES, Finding, Rule, rule_id
from titan_cli.plan.target import Target, build, make_facts, planned_gpu, planned_torch
from titan_cli.runs.folder import RunFolder

INDENT = "  "


@dataclass(frozen=True)
class Line:
    """One line of text; a heading is set off where the terminal can."""

    text: str
    heading: bool = False


def explain(target: Target, width: int = 80) -> list[Line]:
    """The whole explanation of a target's plan, in lines of at most `width` columns (long words excepted)."""
    plan = target.plan
    lines = [Line(title(target), heading=True), Line("")]
    lines += [Line(text) for text in tree(target)]
    for heading, rows in (
        ("stages", stages(target)),
        ("because", [(f["rule"], f"{f['verdict']}: {f['because']}") for f in plan.findings if f["verdict"] != "forbid"]),
        ("settings", [(key, str(value)) for key, value in plan.settings.items()]),
        ("rejected", [(f"{r['strategy']}, AC {r['ac']}", f"{r['rule']}: {r['because']}") for r in plan.rejected]),
        ("expect", [(mode, expected(plan.expect.get(mode, {}))) for mode in ("train", "eval") if plan.wraps]),
        ("warning", [("", note) for note in plan.notes]),
        ("memory", [("", f"{target.states.sentence()}, before activations")]),
    ):
        if rows:
            lines += [Line(""), Line(heading, heading=True)]
            lines += [Line(text) for label, value in rows for text in row(label, value, width)]
    return lines


def title(target: Target) -> str:
    """Preset, hardware, layout, torch: what this plan is for."""
    world, facts = target.world, target.facts
    degrees = [("dp_replicate", world.dp_replicate), ("dp_shard", world.dp_shard), ("cp", world.cp), ("tp", world.tp)]
    degrees += [("pp", world.pp), ("ep", world.ep)]
    layout = " x ".join(f"{name} {n}" for name, n in degrees if n > 1) or "1 rank"
    where = target.gpu.name if target.gpu else target.visible[0].name if target.visible else "CPU"
    hardware = f"{world.world_size} x {where}" if world.world_size > 1 else where
    return f"{target.name} on {hardware}: {layout}, torch {facts.torch_text}"


def tree(target: Target) -> list[str]:
    """The model's parts in forward order, each with its onion: "FSDP(AC(compile(TransformerBlock)))"."""
    plan, first = target.plan, 0
    waited = any("tok_embeddings" in cure["what"] for cure in plan.cures)
    whole = plan.strategy == "whole"
    parts = [("tok_embeddings", onion("Embedding", False, False, plan.ac), "waited for" if waited else "")]
    for kind, count in target.facts.blocks:
        if not count:
            continue
        names = f"layers.{first}" + (f" .. {first + count - 1}" if count > 1 else "")
        first += count
        ac = {"none": "", "full": ", full AC", "selective": f", AC{selected(plan.ac_option)}"}[plan.ac_mode]
        core = onion("TransformerBlock", plan.strategy == "block", plan.ac_mode != "none", plan.ac)
        parts.append((names, core, f"{count} {kind}{ac}"))
        if plan.strategy in ("submodule", "norm"):
            inner = [w["target"] for w in plan.wraps if w["kind"] == kind and w["target"].startswith("layers.*.")]
            parts += [("  ." + name.removeprefix("layers.*."), f"compile({name.rsplit('.', 1)[-1]})", "") for name in inner]
    parts.append(("norm", onion("RMSNorm", plan.strategy == "norm", False, plan.ac), ""))
    parts.append(("output", onion("tied head" if target.facts.tied else "Linear", False, False, plan.ac), ""))
    parts.append(("loss", "compile(cross-entropy)" if plan.loss else "cross-entropy", ""))
    if whole:
        parts.insert(0, ("model", f"compile({type(target.model).__name__.removesuffix('Config')})", "with everything below"))
    if plan.settings.get("flex.compile"):
        parts.append(("attention", "compile(flex_attention)", "on its own"))
    left, middle = (max(len(part[i]) for part in parts) for i in (0, 1))
    return [f"{INDENT}{name:<{left}}  {core:<{middle}}  {note}".rstrip() for name, core, note in parts]


def stages(target: Target) -> list[tuple[str, str]]:
    """What lies on each rank of the pipeline, and the derived rules about it; empty without a pipeline."""
    world = target.world
    if world.pp == 1:
        return []
    held = [(f"pp rank {rank}", held_by(rank, world.stages)) for rank in range(world.pp)]
    derived = {"split": world.rules.get("stages"), "bubble": world.rules.get("pipeline_bubble")}
    return [*held, *((name, rule) for name, rule in derived.items() if rule)]


def selected(option: str) -> str:
    """What selective checkpointing selects: " by operator", " every 2nd block"; nothing for the other modes."""
    if option in ("", "op"):
        return " by operator" if option else ""
    n = int(option)
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f" every {n}{ending} block"


def onion(core: str, compiled: bool, checkpointed: bool, ac: str) -> str:
    layers = [("compile", compiled), ("AC", checkpointed)]
    for name, there in layers if ac == "outside" else reversed(layers):
        core = f"{name}({core})" if there else core
    return f"FSDP({core})"


def expected(kinds: dict[str, dict[str, int]]) -> str:
    """ "dense: graphs 1, breaks 0; moe: graphs 3, breaks 2"."""
    each = [f"{kind}: graphs {e['graphs']}, breaks {e['breaks']}" for kind, e in kinds.items()]
    return "; ".join(each) or "not predicted"


def row(label: str, value: str, width: int) -> Iterator[str]:
    """A labelled text, wrapped and indented; the label on a line of its own."""
    if label and len(label) + len(value) + 6 <= width:
        yield f"{INDENT}{label}  {value}"
        return
    if label:
        yield f"{INDENT}{label}"
    yield from textwrap.wrap(value, width, initial_indent=INDENT * 2, subsequent_indent=INDENT * 2, break_on_hyphens=False)


def deciding(target: Target) -> str:
    """The rules that made the plan what it is, most decisive first: those that rejected, then cures; "-" if none."""
    rejecting = [r["rule"] for r in target.plan.rejected]
    curing = [f["rule"] for f in target.plan.findings if f["verdict"] == "cure"]
    return ", ".join(dict.fromkeys([*rejecting, *curing])) or "-"


def target(
    preset: str | None, config: str | None, overrides: Sequence[str], run: str | None, torch: str | None, without: str
) -> Target:
    """The target to explain: of a preset or file, or of an existing run. Raises TitanError if there is no such run."""
    if run is None:
        return build(preset, config, overrides, torch, without)
    runs_dir = load(overrides=[o for o in overrides if o.startswith("launch.runs_dir=")]).config.launch.runs_dir
    file = RunFolder(Path(runs_dir).expanduser() / run).config
    if not file.is_file():
        raise TitanError(f"--run {run}: there is no {file}", "launch.runs_dir=FOLDER names another folder of runs")
    return replace(build(None, str(file), overrides, torch, without), name=run)


def rule_list() -> list[tuple[str, str, str]]:
    """(id, what it does, the first sentence of its page) of every rule."""
    return [(rule_id(rule), on_cell(rule_id(rule)).verdict, summary(rule)) for rule in RULES]


def summary(rule: Rule) -> str:
    return " ".join(inspect.cleandoc(rule.__doc__ or "").split("\n\n")[0].split())


def known_rule(name: str) -> Rule:
    """The rule of that id. Raises TitanError (usage) with the nearest one."""
    rule = next((rule for rule in RULES if rule_id(rule) == name), None)
    if rule is None:
        near = difflib.get_close_matches(name, CELLS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise TitanError(f"there is no rule {name}", f"{meant}`titan explain-compile --rules` lists them")
    return rule


def page(name: str, width: int = 80) -> list[Line]:
    """A rule's own page: its docstring, and what it says of its smallest cell. Raises TitanError for an unknown one."""
    text = inspect.cleandoc(known_rule(name).__doc__ or "")
    lines = [Line(name, heading=True), Line("")]
    for paragraph in text.split("\n\n"):
        lines += [Line(t) for t in textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)] + [Line("")]
    found = on_cell(name)
    lines += [Line("smallest case", heading=True), *(Line(t) for t in row(CELLS[name].command, found.because, width))]
    lines += [Line(""), Line("evidence", heading=True)]
    lines += [Line(t) for t in row("", f"{found.evidence}: {', '.join(found.sources)}", width)]
    return lines


def on_cell(name: str) -> Finding:
    """What the rule `name` says of its cell: of the first wrapping that the cell allows for which it says anything."""
    cell, rule, facts = CELLS[name], known_rule(name), cell_facts(name)
    strategy = next((o.partition("=")[2] for o in cell.overrides if o.startswith("compile.strategy=")), "auto")
    return next(finding for wrapping in named(strategy) for _, finding in judge(facts, wrapping, [rule]))


def cell_facts(name: str) -> Facts:
    """The facts of a rule's cell; a machine without a compiler is no matter of configuration, and is pretended."""
    cell = CELLS[name]
    config = load(cell.preset, None, cell.overrides).config
    facts = make_facts(config, resolve(config, 0), planned_gpu(config.launch.gpu), (), planned_torch(cell.torch))
    return replace(facts, cxx_compiler=name != "cpu-without-compiler")


def markdown() -> str:
    """docs/compile-rules.md: every rule's page with its smallest case and sources."""
    parts = [
        "# Compile rules",
        "",
        "Generated from `titan_cli/plan/rules.py` by `TITAN_UPDATE_GOLDEN=1 pytest tests/test_explain.py`.",
        "",
    ]
    parts += ["| rule | does | evidence |", "|---|---|---|"]
    found = {rule_id(rule): on_cell(rule_id(rule)) for rule in RULES}
    parts += [f"| [{name}](#{name}) | {f.verdict} | {f.evidence} |" for name, f in found.items()]
    for rule in RULES:
        name = rule_id(rule)
        paragraphs = inspect.cleandoc(rule.__doc__ or "").split("\n\n")
        parts += ["", f"## {name}", "", "\n\n".join(" ".join(p.split()) for p in paragraphs), ""]
        parts += [f"Smallest case: `{CELLS[name].command}`", "", f"> {found[name].verdict}: {found[name].because}", ""]
        if found[name].settings:
            parts += [f"Sets: {', '.join(f'`{k} = {v}`' for k, v in found[name].settings.items())}", ""]
        parts += [f"Evidence: {found[name].evidence}. Sources: {', '.join(found[name].sources)}."]
    return "\n".join(parts) + "\n"
