"""Initial weights that depend on the seed and the parameter's name alone: not on the layout, the device or torch's version."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Rows are drawn in blocks of this many, each from a generator of its own, so that a rank draws its rows and no others.
ROWS = 256


def draw(seed: int, name: str, shape: torch.Size, std: float | None, rows: slice | None = None) -> Tensor:
    """Rows of the parameter `name` as float32 on the CPU, (rows, *shape[1:]): ones if `std` is None, else normal.

    Cut at 3 sigma by clamping: nn.init.trunc_normal_ takes 7 times as long on the CPU, and its algorithm changed between
    torch versions, so that one seed gave other weights.
    """
    rows = rows or slice(0, shape[0])
    if std is None:
        return torch.ones(rows.stop - rows.start, *shape[1:], device="cpu")
    first = rows.start - rows.start % ROWS
    pieces = [
        torch.empty(min(ROWS, shape[0] - row), *shape[1:], device="cpu").normal_(0.0, std, generator=generator(seed, name, row))
        for row in range(first, rows.stop, ROWS)
    ]
    drawn = torch.cat(pieces) if pieces else torch.empty(0, *shape[1:], device="cpu")
    return drawn[rows.start - first : rows.stop - first].clamp_(-3 * std, 3 * std)


def generator(seed: int, name: str, row: int) -> torch.Generator:
    """A CPU generator for the block of rows that begins at `row`.

    Python's hash() of a string differs between processes, hence SHA-256; 4 bytes, as the CPU generator reads no more.
    """
    digest = hashlib.sha256(f"{seed}:{name}:{row}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
