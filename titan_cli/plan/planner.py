"""Facts in, plan out: the first candidate that no rule forbids, with every setting and cure it needs. Pure, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from titan_cli.errors import ExitCode, TitanError
from titan_cli.plan.facts import Facts
from titan_cli.plan.rules import RULES, Finding, Wrapping

# Best first. Whole-model, submodule and norm-only wrappings are no candidates yet.
CANDIDATES = (Wrapping("block", "inside"), Wrapping("block", "outside"), Wrapping("off", "inside"))


@dataclass(frozen=True)
class Plan:
    """How one run is wrapped. Plain data: the worker applies it as written and decides nothing."""

    strategy: str
    ac: str
    ac_mode: str
    dtype: str
    backend: str
    loss: bool
    torch: str
    device: str
    capability: tuple[int, int] | None
    wraps: tuple[dict[str, Any], ...]
    cures: tuple[dict[str, str], ...]
    settings: dict[str, Any]
    findings: tuple[dict[str, Any], ...]
    rejected: tuple[dict[str, str], ...]
    schema: int = 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote. Raises TypeError for fields of another schema."""
        tuples = {k: tuple(content[k]) for k in ("wraps", "cures", "findings", "rejected")}
        capability = content["capability"]
        return cls(**{**content, **tuples, "capability": None if capability is None else tuple(capability)})

    def sentence(self) -> str:
        """One line for a dashboard: "each block compiled (inductor), AC outside"."""
        what = "eager" if self.strategy == "off" else f"each {self.strategy} compiled ({self.backend})"
        return what + ("" if self.ac_mode == "none" else f", {self.ac_mode} AC {self.ac}")


def make_plan(facts: Facts, strategy: str = "auto", force: bool = False) -> Plan:
    """The best safe plan, or the named strategy's.

    Raises TitanError (refused) when a rule forbids every wrapping of the named strategy and `force` is not set.
    """
    rejected: list[tuple[Wrapping, Finding]] = []
    for wrapping in _candidates(strategy):
        findings = [f for rule in RULES if (f := rule(facts, wrapping))]
        forbidden = [f for f in findings if f.verdict == "forbid"]
        if not forbidden or (force and strategy != "auto"):
            return _plan(facts, wrapping, findings, rejected)
        rejected += [(wrapping, f) for f in forbidden]
    finding = rejected[-1][1]
    raise TitanError(
        f"compile.strategy={strategy} is refused for this layout by the rule {finding.rule}: {finding.because}",
        "leave compile.strategy at auto for the best safe wrapping, or set compile.force=true to use it all the same",
        ExitCode.REFUSED,
    )


def _candidates(strategy: str) -> tuple[Wrapping, ...]:
    if strategy == "auto":
        return CANDIDATES
    named = tuple(w for w in CANDIDATES if w.strategy == strategy)
    if not named:
        known = ", ".join(dict.fromkeys(w.strategy for w in CANDIDATES))
        raise TitanError(f"compile.strategy={strategy} cannot be trained yet", f"use one of: auto, {known}", ExitCode.REFUSED)
    return named


def _plan(facts: Facts, wrapping: Wrapping, findings: list[Finding], rejected: list[tuple[Wrapping, Finding]]) -> Plan:
    settings = {key: value for f in findings for key, value in f.settings.items()}
    backend = settings.pop("backend", "inductor" if facts.backend == "auto" else facts.backend)
    compiled = wrapping.strategy != "off"
    wraps = tuple({"target": "layers.*", "kind": kind, "fullgraph": True} for kind, _ in facts.blocks)
    return Plan(
        strategy=wrapping.strategy,
        ac=wrapping.ac,
        ac_mode=facts.ac_mode,
        dtype=facts.dtype,
        backend=str(backend),
        loss=compiled and facts.loss,
        torch=".".join(map(str, facts.torch)),
        device=facts.device,
        capability=facts.capability,
        wraps=wraps if compiled else (),
        cures=tuple({"rule": f.rule, "what": f.cure} for f in findings if f.cure),
        settings=settings,
        findings=tuple(_finding(f) for f in findings),
        rejected=tuple({**dataclasses.asdict(w), "rule": f.rule, "because": f.because} for w, f in rejected),
    )


def _finding(finding: Finding) -> dict[str, Any]:
    content = {name: getattr(finding, name) for name in ("rule", "verdict", "because", "evidence")}
    return content | {"sources": list(finding.sources)}
