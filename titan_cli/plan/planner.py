"""Facts in, plan out: the first candidate that no rule forbids, with every setting and cure it needs. Pure, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_cli.errors import ExitCode, TitanError
from titan_cli.plan.candidates import CANDIDATES, ON_REQUEST, WRAPS, Wrapping
from titan_cli.plan.facts import NEWEST, Facts
from titan_cli.plan.rules import RULES, Finding, Rule, rule_id

Found = tuple[str, Finding]  # a rule's id and what it says


@dataclass(frozen=True)
class Plan:
    """How one run is wrapped. Plain data: the worker applies it as written and decides nothing."""

    strategy: str
    ac: str
    ac_mode: str
    ac_option: str
    dtype: str
    backend: str
    loss: bool
    sequence_parallel: bool
    loss_parallel: bool
    reshard: bool
    torch: str
    device: str
    capability: tuple[int, int] | None
    wraps: tuple[dict[str, Any], ...]
    cures: tuple[dict[str, str], ...]
    settings: dict[str, Any]
    findings: tuple[dict[str, Any], ...]
    rejected: tuple[dict[str, str], ...]
    expect: dict[str, Any]
    notes: tuple[str, ...] = ()
    schema: int = 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote. Raises TypeError for fields of another schema."""
        tuples = {k: tuple(content[k]) for k in ("wraps", "cures", "findings", "rejected", "notes")}
        capability = content["capability"]
        return cls(**{**content, **tuples, "capability": None if capability is None else tuple(capability)})

    def sentence(self) -> str:
        """One line for a dashboard: "each block compiled (inductor), full AC outside"."""
        parts = {"whole": "whole model", "block": "each block", "submodule": "each submodule", "norm": "only norms", "off": ""}
        what = f"{parts[self.strategy]} compiled ({self.backend})" if self.wraps else "eager"
        return what + ("" if self.ac_mode == "none" else f", {self.ac_mode} AC {self.ac}")


class Refused(TitanError):
    """No wrapping is safe: the rule that forbids them, or else the last one, and the nearest that is."""

    def __init__(self, wanted: str, found: Found, nearest: str) -> None:
        rule, finding = found
        hint = f"nearest that works: {nearest}" if nearest else ""
        super().__init__(f"{wanted} is refused by the rule {rule}: {finding.because}", hint, ExitCode.REFUSED)
        self.rule, self.because, self.nearest = rule, finding.because, nearest

    def to_json(self) -> dict[str, Any]:
        refused = {"exit": int(self.code), "rule": self.rule, "because": self.because, "nearest": self.nearest}
        return {"schema": 1, "refused": refused}


def make_plan(facts: Facts, strategy: str = "auto", force: bool = False, without: str = "") -> Plan:
    """The best safe plan, or the named strategy's; `without` leaves out one rule, to see what it is for.

    With `force`, where every wrapping of the named strategy is forbidden, its first is taken and the plan's notes say so.
    Raises Refused otherwise.
    """
    rules = [rule for rule in RULES if rule_id(rule) != without]
    rejected: list[tuple[Wrapping, Found]] = []
    candidates = named(strategy)
    for wrapping in candidates:
        findings = judge(facts, wrapping, rules)
        forbidden = [found for found in findings if found[1].verdict == "forbid"]
        if not forbidden:
            return build_plan(facts, wrapping, findings, rejected)
        rejected += [(wrapping, found) for found in forbidden]
    if force and strategy != "auto":
        return build_plan(facts, candidates[0], judge(facts, candidates[0], rules), [])
    wanted = "this layout" if strategy == "auto" else f"compile.strategy={strategy}"
    # A rule that forbids every wrapping is the reason, before one that only some have.
    by_all = [f for _, f in rejected if sum(rule == f[0] for _, (rule, _) in rejected) == len(candidates)]
    found = (by_all or [f for _, f in rejected])[-1]
    raise Refused(wanted, found, found[1].instead or _next_safe(facts, rules))


def named(strategy: str) -> tuple[Wrapping, ...]:
    """The wrappings of a strategy, best first; all that are chosen by themselves for auto."""
    return CANDIDATES if strategy == "auto" else tuple(w for w in (*CANDIDATES, *ON_REQUEST) if w.strategy == strategy)


def judge(facts: Facts, wrapping: Wrapping, rules: Sequence[Rule] = RULES) -> list[Found]:
    """What the rules say of one wrapping."""
    return [(rule_id(rule), finding) for rule in rules if (finding := rule(facts, wrapping))]


def _next_safe(facts: Facts, rules: Sequence[Rule]) -> str:
    for wrapping in CANDIDATES:
        if not any(finding.verdict == "forbid" for _, finding in judge(facts, wrapping, rules)):
            return f"compile.strategy={wrapping.strategy}"
    return ""


def build_plan(facts: Facts, wrapping: Wrapping, findings: list[Found], rejected: list[tuple[Wrapping, Found]]) -> Plan:
    """The plan of one wrapping: the rules' settings that are the plan's own go to their places, torch's stay settings."""
    settings: dict[str, Any] = {key: value for _, finding in findings for key, value in finding.settings.items()}
    backend = settings.pop("backend", "inductor" if facts.backend == "auto" else facts.backend)
    breaks = {kind: settings.pop(f"expect.{kind}.breaks", 0) for kind in facts.kinds}
    fullgraph = {kind: settings.pop(f"wraps.{kind}.fullgraph", wrapping.strategy != "whole") for kind in facts.kinds}
    wraps = {
        (target, kind): {"target": target, "kind": kind, "fullgraph": fullgraph[kind]}
        for kind in facts.kinds
        for target in WRAPS[wrapping.strategy][kind]
    }
    forbidden = [f"forced although {rule} forbids it: {f.because}" for rule, f in findings if f.verdict == "forbid"]
    newer = f"torch {facts.torch_text} is newer than the rules' evidence: not checked on this version: run titan verify"
    return Plan(
        strategy=wrapping.strategy,
        ac=wrapping.ac,
        ac_mode=facts.ac_mode,
        ac_option=facts.ac_option if facts.ac_mode == "selective" else "",
        dtype=facts.dtype,
        backend=str(backend),
        loss=wrapping.strategy != "off" and facts.loss,
        sequence_parallel=facts.tp > 1 and facts.sequence_parallel,
        loss_parallel=facts.tp > 1 and facts.loss_parallel,
        reshard=facts.reshard,
        torch=facts.torch_text,
        device=facts.device,
        capability=facts.capability,
        wraps=tuple(wraps.values()),
        cures=tuple({"rule": rule, "what": f.cure} for rule, f in findings if f.cure),
        settings=settings,
        findings=tuple(_finding(*found) for found in findings),
        rejected=tuple({"strategy": w.strategy, "ac": w.ac, "rule": rule, "because": f.because} for w, (rule, f) in rejected),
        expect=expectation(wrapping, facts, breaks, any(f.cure for _, f in findings)),
        notes=(*forbidden, *([newer] if facts.torch[:2] > NEWEST[:2] else [])),
    )


def expectation(wrapping: Wrapping, facts: Facts, breaks: dict[str, int], waited: bool) -> dict[str, Any]:
    """What Dynamo should report after warm-up, by mode and kind of block: graphs (one for each piece of code) and breaks.

    A break cuts a piece of code in two, so each adds a graph. Under tensor parallel the first block's input is of another
    type (still in flight) than the others', and has a graph of its own unless it is waited for. Where only every N-th block
    is checkpointed, inside the compiled region, those blocks are another piece of code; outside of it they are not. A stage
    of a pipeline may lack some of it and make fewer graphs. Nothing is expected of a whole-model graph: where it breaks
    depends on the model.
    """
    if wrapping.strategy in ("off", "whole"):
        return {"train": {}, "eval": {}, "recompiles_after_warmup": 0}
    pieces = {"block": {"dense": 1, "moe": 1}, "submodule": {"dense": 3, "moe": 4}, "norm": {"dense": 1, "moe": 1}}
    first = facts.kinds[0]
    in_flight = {kind: int(kind == first and facts.tp > 1 and not waited) for kind in facts.kinds}
    forms = {kind: facts.ac_forms(kind) if wrapping.ac == "inside" else 1 for kind in facts.kinds}
    kinds = {
        kind: {
            "graphs": pieces[wrapping.strategy][kind] * forms[kind] + breaks[kind] + in_flight[kind],
            "breaks": breaks[kind],
        }
        for kind in facts.kinds
    }
    return {"train": kinds, "eval": kinds, "recompiles_after_warmup": 0}


def _finding(rule: str, finding: Finding) -> dict[str, Any]:
    content = {name: getattr(finding, name) for name in ("verdict", "because", "evidence")}
    return {"rule": rule, **content, "sources": list(finding.sources)}
