"""The attention kernels. They know heads and positions, no weights.

In the shapes B is sequences, T positions, H heads, D features of a head. Keys and values may have fewer heads, H_kv, each
shared by H / H_kv of the queries'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# FlexAttention skips, masks or passes tiles of BLOCK queries x BLOCK keys. Its kernels' own tiles have to divide it.
BLOCK = 128


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether keys have fewer heads than queries. Said to a kernel only then: fewer of them take groups than equal heads."""
    return q.shape[1] != k.shape[1]


class SDPA(nn.Module):
    """Causal attention by torch's best kernel for the device. It does not know of documents: each sees those before it.

    (B, H, Tq, D), (B, H_kv, Tk, D) twice, None -> (B, H, Tq, D). The queries are those of the last Tq of Tk positions;
    `last` computes the case Tq < Tk.
    """

    last: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.last = masked_last

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        if q.shape[2] < k.shape[2]:
            return self.last(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped(q, k))


def masked_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA's case Tq < Tk on any device. Holds a mask of Tq x Tk.

    is_causal would put the queries at the first positions. torch.nn.attention.bias.causal_lower_right would do, but cannot be
    made inside a compiled block, and made outside it allocates 2 x Tq x Tk float32 that it never uses.
    """
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped(q, k))


class Flex(nn.Module):
    """FlexAttention: attention where a mask allows it. On its own it is slow; it has to be compiled, with its block or alone.

    (B, H, Tq, D), (B, H_kv, Tk, D) twice, a mask for Tq queries and Tk keys -> (B, H, Tq, D). `flex` is what is called:
    torch's flex_attention or the compiled one.
    """

    flex: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.flex = flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return self.flex(q, k, v, block_mask=mask, enable_gqa=is_grouped(q, k))


def document_mask(starts: Tensor, positions: Tensor | None = None, length: int | None = None) -> BlockMask:
    """Causal attention within packed documents: a query at position p sees the keys k with start <= k <= p.

    starts (B, Tq), integers: where the document of each query begins. positions (Tq,): those of the queries, by default
    0 .. Tq - 1. length: the number of keys, by default Tq.

    Never holds Tq x Tk numbers. What a tile can contain follows from the smallest and largest numbers in it: tiles without
    any pair are left out, tiles without a forbidden pair are marked as full, and the rest is masked pair by pair. Where a tile
    of queries is made of two distant parts of the sequence, more than needed are masked, never fewer.
    """
    queries = starts.shape[1]
    length = queries if length is None else length
    positions = torch.arange(queries, device=starts.device) if positions is None else positions
    starts, positions = starts.int(), positions.int()
    first_key = torch.arange(0, length, BLOCK, device=starts.device)  # (key tiles,)
    last_key = first_key + BLOCK - 1  # may lie beyond the end: then no query comes after it, and the tile is not full
    first_start, last_start = tile_limits(starts)  # (B, query tiles, 1)
    first_query, last_query = tile_limits(positions)  # (query tiles, 1)
    some = (first_key <= last_query) & (last_key >= first_start)  # (B, query tiles, key tiles)
    full = (last_key <= first_query) & (first_key >= last_start)
    if queries % BLOCK:
        full[:, -1] = False  # nor is one that ends with the queries, as in torch's own masks

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= positions[q]) & (k >= starts[b, q])

    tiles = (*listed(some & ~full), *listed(full))
    return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(queries, length))


def tile_limits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest number in each tile of the last dimension, (..., T) -> (..., tiles, 1)."""
    beyond = -numbers.shape[-1] % BLOCK
    tiles = torch.cat((numbers, numbers[..., -1:].expand(*numbers.shape[:-1], beyond)), dim=-1).unflatten(-1, (-1, BLOCK))
    return tiles.amin(-1, keepdim=True), tiles.amax(-1, keepdim=True)


def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Which tiles of (B, query tiles, key tiles) are set, as FlexAttention reads them, with a dimension for heads:
    how many for each tile of queries, (B, 1, query tiles), and the numbers of the key tiles, those first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None].contiguous(), order.int()[:, None].contiguous()
