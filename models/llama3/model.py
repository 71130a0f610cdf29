"""Llama 3, a decoder for one device. It knows its own dimensions, nothing of meshes, the environment or checkpoints.

Read from the bottom: Llama3 embeds tokens, passes them through equal blocks, and multiplies with the vocabulary. In the
shapes B is sequences, T positions, H heads, D features of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_cli.models.common import rope
from titan_cli.models.common.attention import SDPA, Flex, document_mask
from titan_cli.models.common.init import draw
from titan_cli.models.common.rmsnorm import RMSNorm
from titan_cli.models.llama3.config import Llama3Config

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Attention(nn.Module):
    """Causal self-attention with rotary positions, in which n_heads queries share n_kv_heads keys and values.

    `kernel` has no weights: a module, so that it can be found and what it does with keys and values be changed from outside.
    """

    def __init__(self, config: Llama3Config, attention: Literal["sdpa", "flex"]) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, heads, bias=False)
        self.wk = nn.Linear(config.dim, kv, bias=False)
        self.wv = nn.Linear(config.dim, kv, bias=False)
        self.wo = nn.Linear(heads, config.dim, bias=False)
        self.kernel = Flex() if attention == "flex" else SDPA()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None = None) -> Tensor:
        # The number of heads comes from the tensors: under tensor parallelism wq, wk and wv give only this rank's heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.kernel(rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v, mask)  # (B, H, T, D)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, T, dim)


class FeedForward(nn.Module):
    """SwiGLU (2002.05202): w1 gates what w3 proposes, w2 brings it back to dim."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream (B, T, dim).

    It does not know which layer it is, changes no state and gets rotary tables and mask as arguments, so one compiled graph
    serves every block.
    """

    kind = "dense"

    def __init__(self, config: Llama3Config, attention: Literal["sdpa", "flex"]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, attention)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class TiedHead(nn.Module):
    """The head of a model with tied embeddings: it borrows the embedding's weight.

    A module without parameters, so that `output` is a module in every Llama3 and hooks find it there.
    """

    def forward(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.linear(h, weight)


class Llama3(nn.Module):
    """Tokens (B, T) to logits (B, T, vocab_size), for positions below `seq_len`.

    With attention "flex" documents that are packed into one sequence do not see each other; with "sdpa" they do.
    Built, the parameters hold whatever torch's layers start with (on the meta device nothing): call `init_weights`.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: Llama3Config, seq_len: int, attention: Literal["sdpa", "flex"] = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.attention = attention
        # A stage of a pipeline keeps what it owns: of these three, None instead of a module, and fewer layers.
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        # A dict: its keys are the layers' names, and they stay when a stage deletes the layers of others.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config, attention) for i in range(config.n_layers)})
        self.norm: nn.Module | None = RMSNorm(config.dim, config.norm_eps)
        self.output: nn.Module | None = (
            TiedHead() if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        )
        # Not persistent: they follow from the config, and a checkpoint must not fix the sequence length.
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(seq_len, config.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_buffers()

    def forward(
        self, x: Tensor, starts: Tensor | None = None, positions: Tensor | None = None, length: int | None = None
    ) -> Tensor:
        """x: tokens (B, T), or what the stage before gave, (B, T, dim). Returns logits, or what the next stage takes.

        starts (B, T), for "flex": where the document of each token begins. `length`: of the whole sequence, if that is not T;
        positions (T,): of these tokens in it, unless they are all of it. The keys of the whole sequence are attended to.
        """
        length = length or x.shape[1]
        assert length <= self.seq_len, f"{length} positions, but the rotary tables end at seq_len {self.seq_len}"
        rows = slice(length) if positions is None else positions
        cos, sin = self.rope_cos[rows], self.rope_sin[rows]  # (T, D/2)
        mask = None
        if self.attention == "flex":
            assert starts is not None, "FlexAttention masks by document, and must be told where each begins"
            mask = document_mask(starts, positions, length)
        h = x if self.tok_embeddings is None else self.tok_embeddings(x)  # (B, T, dim)
        for block in self.layers.values():
            h = block(h, cos, sin, mask)
        if self.norm is None or self.output is None:
            return h
        h = self.norm(h)
        if not self.config.tie_embeddings:
            return self.output(h)
        assert self.tok_embeddings is not None, "a tied head lies on the embedding's stage (the rule tied-pipeline)"
        return self.output(h, self.tok_embeddings.weight)

    def init_weights(self, seed: int) -> None:
        """Fills every parameter and buffer of a model that is whole on one device. Same seed, same weights."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(draw(seed, name, parameter.shape, self.init_std(name)))
        self.init_buffers()

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None: they are all 1."""
        match name.split(".")[-2]:
            case "attention_norm" | "ffn_norm" | "norm":
                return None
            case "wo" | "w2":
                # 2 x n_layers of these outputs add up in the residual stream; together they should weigh as one (GPT-2).
                return 0.02 / math.sqrt(2 * self.config.n_layers)
            case "output":
                # The norm before it gives features of size 1, so logits have variance 1: the first loss is ln(vocab) + 1/2.
                return self.config.dim**-0.5
            case _:
                # The embedding too. With std 1 the blocks start too weak against it: `debug` is at held-out loss 3.2 after
                # 200 steps instead of 2.9. And as a tied head it would start at loss 120.
                return 0.02

    def init_buffers(self) -> None:
        """Recomputes the rotary tables, in place, on whatever device they are (after `to_empty` they hold garbage).

        Always float32 values from the CPU, also for a float64 model: every device and dtype then turns by the same angles.
        """
        freqs = rope.frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        cos, sin = rope.tables(self.seq_len, freqs)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)


MODEL = Llama3
