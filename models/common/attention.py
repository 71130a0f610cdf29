"""The attention kernels. They know heads and positions, no weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, (B, H, T, D) -> (B, H, T, D); k and v may have fewer heads, each shared by H / H_kv of q's."""
    # Only when needed: fewer of torch's kernels take enable_gqa than take equal heads.
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
