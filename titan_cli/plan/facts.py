"""What the planner knows of a run: everything that decides how to compile, and nothing else. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from titan_cli.config.stages import SPLIT_BACKWARD

Version = tuple[int, int, int]

# The versions that the rules were measured on. A newer torch gets the newest one's plan and is told so.
OLDEST: Version = (2, 11, 0)
NEWEST: Version = (2, 14, 1)


@dataclass(frozen=True)
class Facts:
    """One model under one layout on one torch. Degrees are numbers of ranks."""

    family: str
    blocks: tuple[tuple[str, int], ...]  # kind of block -> how many, e.g. (("dense", 3), ("moe", 58))
    attention: Literal["sdpa", "flex"]
    tied: bool
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    pp_schedule: str
    sequence_parallel: bool
    loss_parallel: bool
    async_tp: bool
    reshard: bool  # FSDP frees gathered parameters after forward
    ac_mode: Literal["none", "full", "selective"]
    ac_option: str  # "op": by operator; "2", "3", ...: every N-th block whole
    float8: bool
    dtype: str
    loss: bool
    backend: str
    torch: Version
    device: Literal["cuda", "cpu"]
    capability: tuple[int, int] | None  # compute capability of the GPU
    cxx_compiler: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of blocks there are."""
        return tuple(kind for kind, count in self.blocks if count)

    @property
    def experts(self) -> Literal["none", "mesh", "nested"]:
        """How experts are sharded: in one FSDP unit with their block, on a mesh of their own, or in a unit inside the block.

        torch 2.12 lets one fully_shard place each parameter on its own mesh (ShardPlacementResult); 2.11 cannot.
        """
        if "moe" not in self.kinds or self.ep * self.tp == 1:
            return "none"
        return "mesh" if self.torch >= (2, 12, 0) else "nested"

    @property
    def ac_by_op(self) -> bool:
        """Checkpointing decides operator by operator what to keep (selective, option "op")."""
        return self.ac_mode == "selective" and self.ac_option == "op"

    def ac_forms(self, kind: str) -> int:
        """Checkpointed and not: in how many of the two forms blocks of a kind come. Kinds follow each other in the model."""
        first = 0
        for name, count in self.blocks:
            if name == kind:
                return len({is_checkpointed(number, self.ac_mode, self.ac_option) for number in range(first, first + count)})
            first += count
        return 0

    @property
    def split_backward(self) -> bool:
        return self.pp > 1 and self.pp_schedule in SPLIT_BACKWARD

    @property
    def torch_text(self) -> str:
        return ".".join(map(str, self.torch))


def is_checkpointed(number: int, mode: str, option: str) -> bool:
    """Whether a block is checkpointed, by its number in the whole model, so that a pipeline's stages agree with it."""
    if mode != "selective" or option == "op":
        return mode != "none"
    return (number + 1) % int(option) == 0


def parse_version(text: str) -> Version:
    """(2, 13, 0) from "2.13.0+cpu" or "2.14.1.dev2026". Raises ValueError if it does not begin with a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not match:
        raise ValueError(f"{text!r} is not a torch version (expected something like 2.13.0)")
    major, minor, patch = match.groups(default="0")
    return int(major), int(minor), int(patch)
