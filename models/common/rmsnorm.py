"""RMSNorm. Knows only its own weight: the same class works on a plain tensor and on a cut of the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divides the features by their root mean square and scales each by a weight (1910.07467). (..., dim) -> (..., dim).

    An own class, although torch has nn.RMSNorm: before torch 2.14 Dynamo skips the modules that torch itself ships, so
    `nn.RMSNorm(...).compile()` compiles nothing and does not say so.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # bfloat16 has 8 bits of mantissa: a mean of thousands of squares needs float32. float64 stays float64.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)
