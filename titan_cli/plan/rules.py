"""What can go wrong when a wrapping meets a layout. A rule is one pure function and its docstring is its page.

A rule looks at the facts and at one candidate wrapping and says nothing (None) or one thing: that the wrapping is
forbidden, that a setting must be set, or that a cure must be applied. The order of the rules does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from titan_cli.plan.facts import Facts


@dataclass(frozen=True)
class Wrapping:
    """What torch.compile wraps, and whether activation checkpointing lies inside or outside the compiled region."""

    strategy: Literal["block", "off"]
    ac: Literal["inside", "outside"]


@dataclass(frozen=True)
class Finding:
    """One rule's result for one wrapping."""

    rule: str
    verdict: Literal["forbid", "set", "cure", "info"]
    because: str
    evidence: Literal["cell", "reported"]
    sources: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    cure: str | None = None


def tp_embedding_wait(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Under tensor parallel, wait for the embedding's collective before the first compiled block.

    The eager embedding ends in an asynchronous reduce-scatter and hands the block a tensor that is still in flight
    (AsyncCollectiveTensor). From torch 2.13 on, backward through a compiled block loses the gradient of such an input:
    with any fully_shard the embedding's gradient is exactly zero while the loss equals eager to every digit; without it
    backward raises "'Tensor' object has no attribute '_local_tensor'". torch 2.11 is right; 2.12 was not run and gets
    the cure, which costs nothing: the block's first kernel would wait anyway.

    The cure is a forward hook on the embedding that calls wait_tensor. It renames nothing. Not a cure: fully_shard
    (turns the crash into the silent zero), AsyncCollectiveTensor.wait() (the gradient becomes None).
    """
    if facts.tp == 1 or wrapping.strategy == "off" or facts.torch < (2, 12, 0):
        return None
    return Finding(
        "tp-embedding-wait",
        "cure",
        f"tp = {facts.tp}: the embedding's output is still in flight when a compiled block reads it, and on torch "
        f"{_text(facts)} the embedding's gradient would be exactly zero, without a sign of it in the loss",
        "cell",
        ("pytorch/pytorch#191113",),
        cure="wait on tok_embeddings output",
    )


def tp_ac_inside(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """On torch 2.13, full activation checkpointing under tensor parallel must lie outside the compiled block.

    compile(AC(block)) of a dense SDPA block whose weights are DTensors raises in backward on 2.13.0: "expected all
    tensors_saved_with_vc_check to be Tensors ... DeviceMesh". 2.11.0 and 2.14.1 are right; 2.12 was not run and is
    treated as 2.13. AC(compile(block)) gives gradients equal to eager on all of them, and memory really drops.
    """
    applies = facts.tp > 1 and facts.ac_mode == "full" and facts.attention == "sdpa"
    if not applies or wrapping != Wrapping("block", "inside") or not (2, 12, 0) <= facts.torch < (2, 14, 0):
        return None
    return Finding(
        "tp-ac-inside",
        "forbid",
        f"tp = {facts.tp} with full activation checkpointing inside the compiled block: backward raises "
        f"'tensors_saved_with_vc_check ... DeviceMesh' on torch {_text(facts)}",
        "cell",
        ("measured on 2.11.0, 2.13.0 and 2.14.1",),
    )


def cpu_without_compiler(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """On a CPU without a C++ compiler, use the backend aot_eager.

    Inductor's CPU backend writes C++ and needs g++ or clang++. aot_eager traces and differentiates the same graphs and
    runs them with torch's own kernels: everything but the speed is the same.
    """
    if wrapping.strategy == "off" or facts.device != "cpu" or facts.cxx_compiler or facts.backend != "auto":
        return None
    return Finding(
        "cpu-without-compiler",
        "set",
        "no C++ compiler (g++ or clang++) on this machine, which inductor needs on the CPU: compiled with aot_eager",
        "reported",
        ("torch._inductor.exc.InvalidCxxCompiler",),
        settings={"backend": "aot_eager"},
    )


def _text(facts: Facts) -> str:
    return ".".join(map(str, facts.torch))


Rule = Callable[[Facts, Wrapping], Finding | None]

RULES: tuple[Rule, ...] = (tp_embedding_wait, tp_ac_inside, cpu_without_compiler)
