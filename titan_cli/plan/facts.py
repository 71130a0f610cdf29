"""What the planner knows of a run: everything that decides how to compile, and nothing else. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Facts:
    """One model under one layout on one torch. Degrees are numbers of ranks."""

    family: str
    blocks: tuple[tuple[str, int], ...]  # kind of block -> how many, e.g. (("dense", 32),)
    attention: str
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    ac_mode: str
    dtype: str
    loss: bool
    backend: str
    torch: Version
    device: Literal["cuda", "cpu"]
    capability: tuple[int, int] | None
    cxx_compiler: bool


def parse_version(text: str) -> Version:
    """(2, 13, 0) from "2.13.0+cpu" or "2.14.1.dev2026". Raises ValueError if it does not begin with a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not match:
        raise ValueError(f"{text!r} is not a torch version (expected something like 2.13.0)")
    major, minor, patch = match.groups(default="0")
    return int(major), int(minor), int(patch)
