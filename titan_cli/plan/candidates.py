"""The complete wrappings a plan can choose from, written out, best first. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["whole", "block", "submodule", "norm", "off"]


@dataclass(frozen=True)
class Wrapping:
    """What torch.compile wraps, and where activation checkpointing lies.

    Checkpointing always goes around whole blocks; `inside` puts it within the compiled region, `outside` around it. The
    strategies that compile less than a block have only `outside`, the one that compiles more only `inside`.
    """

    strategy: Strategy
    ac: Literal["inside", "outside"]

    def __str__(self) -> str:
        return f"{self.strategy}, AC {self.ac}"


CANDIDATES = (
    # One graph serves all equal blocks, the compiler sees checkpointing and fuses across everything in a block.
    Wrapping("block", "inside"),
    # The same graphs; recomputation runs them again instead of being planned by the partitioner.
    Wrapping("block", "outside"),
    # Each module of a block on its own: the residual stream between them stays eager.
    Wrapping("submodule", "outside"),
    # Only the norms, which gain most from fusion.
    Wrapping("norm", "outside"),
    Wrapping("off", "outside"),
)

# Never better than `block` for equal blocks (the compile time grows with depth), so only for those who ask.
ON_REQUEST = (Wrapping("whole", "inside"),)

# What is compiled, by strategy and kind of block: module patterns, in which * is one part of a name. Experts are left out
# of the weave: with expert parallelism they are an FSDP unit of their own, whose hooks would break the graph.
WRAPS: dict[Strategy, dict[str, tuple[str, ...]]] = {
    "whole": {"dense": ("",), "moe": ("",)},
    "block": {"dense": ("layers.*",), "moe": ("layers.*",)},
    "submodule": {
        "dense": ("layers.*.attention_norm", "layers.*.attention", "layers.*.ffn_norm", "layers.*.feed_forward"),
        "moe": (
            "layers.*.attention_norm",
            "layers.*.attention",
            "layers.*.ffn_norm",
            "layers.*.moe.router",
            "layers.*.moe.shared_experts",
        ),
    },
    "norm": {
        "dense": ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"),
        "moe": ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"),
    },
    "off": {"dense": (), "moe": ()},
}
