"""Counts what was compiled instead of assuming it, and looks at every gradient once, beside what the plan expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_cli.plan.planner import Plan
from titan_cli.worker import private


@dataclass(frozen=True)
class Graph:
    """One graph that Dynamo handed to the backend: while which block ran, in which mode, with how many operators."""

    block: str
    mode: str
    ops: int


@dataclass
class CompileWatch:
    """Sits between Dynamo and the backend and sees every graph that is made and every call of compiled code.

    `track` marks the blocks: what is compiled or called while a block's forward runs is counted as that block's.
    """

    backend_name: str
    graphs: list[Graph] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    blocks: dict[str, str] = field(default_factory=dict)  # name -> kind
    _current: str = ""

    def backend(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The callable to give to torch.compile: the named backend, observed."""
        mode = "train" if torch.is_grad_enabled() else "eval"
        ops = sum(node.op in ("call_function", "call_method", "call_module") for node in module.graph.nodes)
        self.graphs.append(Graph(self._current, mode, ops))
        compiled = private.backend(self.backend_name)(module, inputs)

        def observed(*args: Any) -> Any:
            if self._current:  # empty while backward recomputes: that is not a block's own call
                self.calls[self._current] += 1
            return compiled(*args)

        return observed

    def track(self, name: str, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The outermost layer around a block's forward: says which block runs."""
        self.blocks[name] = kind

        def tracked(*args: Any) -> Any:
            before, self._current = self._current, name
            try:
                return forward(*args)
            finally:
                self._current = before

        return tracked

    def eager_blocks(self) -> list[str]:
        """Blocks that ran, since `calls` was last cleared, without any compiled code."""
        return [name for name in self.blocks if not self.calls[name]]


@dataclass(frozen=True)
class Health:
    """What Dynamo did, beside what the plan expects. `faults` is empty when they agree.

    Of a model that is compiled as a whole, blocks cannot be told apart: `compiled` and `blocks` are None.
    """

    compiled: int | None
    blocks: int | None
    graphs: int
    breaks: int
    recompiles: int
    faults: tuple[str, ...]

    def sentence(self) -> str:
        what = f"{self.graphs} graphs" if self.blocks is None else f"{self.compiled}/{self.blocks} blocks compiled"
        return f"{what}, {self.breaks} breaks, {self.recompiles} recompiles"


def check_compile(watch: CompileWatch, plan: Plan, evaluated: bool) -> Health:
    """Compare what happened up to now with `plan.expect`. `watch.calls` must hold the calls of exactly one training step."""
    breaks = private.graph_breaks()
    expected_breaks = sum(kind["breaks"] for kind in plan.expect["train"].values())
    eager = watch.eager_blocks()
    faults = [f"{len(eager)} blocks ran eager: {', '.join(eager[:4])}"] if eager and plan.wraps and watch.blocks else []
    recompiles = 0
    for mode in ("train", "eval") if evaluated else ("train",):
        for kind, expected in plan.expect[mode].items():
            made = Counter(g.ops > 0 for g in watch.graphs if g.mode == mode and watch.blocks.get(g.block) == kind)
            if made[False]:
                faults.append(f"{made[False]} empty graphs in {kind} blocks ({mode}): that code runs eager")
            recompiles += max(0, made[True] - expected["graphs"])
            if made[True] > expected["graphs"]:
                causes = "".join(f"; {reason}" for reason in private.recompile_reasons()[:2])
                faults.append(f"{made[True]} graphs instead of {expected['graphs']} for {kind} blocks ({mode}){causes}")
    if len(breaks) > expected_breaks:
        faults += [f"graph break: {reason}" for reason in breaks[:4]]
    compiled, blocks = (None, None) if plan.strategy == "whole" else (len(watch.blocks) - len(eager), len(watch.blocks))
    return Health(compiled, blocks, len(watch.graphs), len(breaks), recompiles, tuple(faults))


@dataclass(frozen=True)
class Audit:
    """Gradients after one backward, over all ranks: how many there are, and the names of those that teach nothing."""

    alive: int
    total: int
    faults: tuple[str, ...]

    def sentence(self) -> str:
        return f"{self.alive}/{self.total} gradients alive"


def audit_gradients(model: nn.Module, names: Sequence[str]) -> Audit:
    """Look for gradients that are missing, not finite or exactly zero. Collective; waits for the device once.

    `names` are all parameters of the whole model: this rank may have one stage of it.
    """
    mine = dict(model.named_parameters())
    device = next(iter(mine.values())).device
    nothing = torch.zeros(3, dtype=torch.int32, device=device)
    states = torch.stack([_state(mine[name]) if name in mine else nothing for name in names])  # (parameters, 3)
    dist.all_reduce(states, op=dist.ReduceOp.MAX)
    faults = []
    for name, (alive, missing, broken) in zip(names, states.tolist(), strict=True):
        if missing:
            faults.append(f"{name} has no gradient: it does not reach the loss")
        elif broken:
            faults.append(f"the gradient of {name} is NaN or infinite")
        elif not alive:
            faults.append(f"the gradient of {name} is exactly zero: it learns nothing")
    return Audit(len(names) - len(faults), len(names), tuple(faults))


def _state(parameter: nn.Parameter) -> torch.Tensor:
    """(something is not zero, there is none, something is not finite) of this rank's part of a gradient."""
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    if parameter.grad is None:
        return torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    none = torch.zeros((), dtype=torch.int32, device=device)
    return torch.stack([gradient.any().int(), none, (~gradient.isfinite()).any().int()])


def compare_with_eager(model: nn.Module, names: Sequence[str], backward: Callable[[], object]) -> dict[str, float]:
    """Relative difference (L2) of each parameter's gradient, compiled against eager, over all ranks. Collective.

    `names` are all parameters of the whole model. `backward` runs the same forward and backward each time it is called;
    gradients are left cleared. Equal losses prove nothing here, nor do equal norms: the difference is taken element by
    element.
    """
    gradients = []
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            backward()
        gradients.append({name: _local(parameter.grad) for name, parameter in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    compiled, eager = gradients
    nothing = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    sums = torch.stack([_squares(compiled[n], eager[n]) if n in eager else nothing for n in names])  # (parameters, 2)
    dist.all_reduce(sums)
    return {name: (off / max(whole, 1e-300)) ** 0.5 for name, (off, whole) in zip(names, sums.tolist(), strict=True)}


def _local(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _squares(compiled: torch.Tensor | None, eager: torch.Tensor | None) -> torch.Tensor:
    """(squared difference, squared eager), a missing gradient counting as zero."""
    some = compiled if eager is None else eager
    if some is None:
        raise AssertionError("no gradient, compiled or eager: the audit of the first step says so")
    a, b = (torch.zeros_like(some) if g is None else g for g in (compiled, eager))
    return torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
