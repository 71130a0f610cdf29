"""Llama 3's dimensions, and what follows from them by arithmetic. Knows no torch: the front plans with it."""

from __future__ import annotations

from dataclasses import dataclass

from titan_cli.models.common.decoder import Decoder


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than the model was first trained on.

    Wavelengths above `original_max_seq_len / low_freq_factor` positions are stretched by `factor`, those below
    `original_max_seq_len / high_freq_factor` are kept, those between are interpolated (Llama 3 report, 2407.21783).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class Llama3Config(Decoder):
    """A Llama 3 decoder. Sizes are numbers of features unless they say otherwise."""

    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"dim {self.dim} must be n_heads {self.n_heads} x an even head dimension")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def tp_sizes(self) -> dict[str, int]:
        """What tensor parallelism cuts: the degree must divide each."""
        return {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "ffn_dim": self.ffn_dim,
            "vocab_size": self.vocab_size,
        }

    def block_shapes(self, kind: str = "dense") -> dict[str, tuple[int, ...]]:
        """The parameters of one block: names within it and shapes, in the model's own order. There is one kind."""
        heads, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attention_norm.weight": (self.dim,),
            "attention.wq.weight": (heads, self.dim),
            "attention.wk.weight": (kv, self.dim),
            "attention.wv.weight": (kv, self.dim),
            "attention.wo.weight": (self.dim, heads),
            "ffn_norm.weight": (self.dim,),
            "feed_forward.w1.weight": (self.ffn_dim, self.dim),
            "feed_forward.w2.weight": (self.dim, self.ffn_dim),
            "feed_forward.w3.weight": (self.ffn_dim, self.dim),
        }


# Published dimensions. 8b and 70b are Llama 3 (2024-04), 405b is Llama 3.1, 1b is Llama 3.2 (tied).
FLAVORS = {
    # 4,096 tokens is the size of the shipped encoding `titan`; everything divides by tp = 2.
    "debug": Llama3Config(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=384, vocab_size=4096),
    "1b": Llama3Config(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "8b": Llama3Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336),
    "70b": Llama3Config(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    "405b": Llama3Config(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248, rope_scaling=RopeScaling(factor=8.0)
    ),
}  # fmt: skip
