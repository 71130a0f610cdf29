"""Rotary position embedding (2104.09864): each pair of a head's features turns by an angle that grows with the position.

The pairs are neighbours, (0, 1), (2, 3), ..., as in Meta's checkpoints with the names that we use (`layers.0.attention.wq`).
Hugging Face pairs feature i with i + head_dim/2 and stores the rows of wq and wk in that other order: same model, permuted.
Cosines and sines are two real tables, because inductor generates no code for complex numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titan_cli.models.llama3.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position of every pair, (head_dim/2), float32 on the CPU; fastest first."""
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return freqs
    # How often a pair turns within the original context decides: 0 = too slow to be known there, stretch; 1 = keep.
    turns = scaling.original_max_seq_len * freqs / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return freqs * keep + freqs / scaling.factor * (1.0 - keep)


def tables(seq_len: int, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each (seq_len, head_dim/2).

    float32 throughout, as in the code that the published weights were trained with. That code's rounding is part of the
    model: at position 100,000 a float32 frequency is up to 0.006 radians away from the exact angle.
    """
    angles = torch.outer(torch.arange(seq_len, dtype=freqs.dtype, device=freqs.device), freqs)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the feature pairs of x (B, H, T, D) by the tables' angles (T, D/2); same shape and dtype as x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, D/2) each
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)  # (B, H, T, D/2, 2)
    return turned.flatten(-2).to(x.dtype)
