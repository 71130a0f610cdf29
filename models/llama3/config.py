"""Llama 3's dimensions, and what follows from them by arithmetic. Knows no torch: the front plans with it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


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


@dataclass(frozen=True)
class Llama3Config:
    """A Llama 3 decoder. Sizes are numbers of features unless they say otherwise."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(f"dim {self.dim} must be n_heads {self.n_heads} x an even head dimension")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def block_kinds(self) -> tuple[tuple[str, int], ...]:
        """Kinds of blocks and how many there are."""
        return (("dense", self.n_layers),)

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in the model's own order (held equal to the meta model by a test)."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for i in range(self.n_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self.block_shapes().items()}
        shapes["norm.weight"] = (self.dim,)
        if not self.tie_embeddings:
            shapes["output.weight"] = (self.vocab_size, self.dim)
        return shapes

    def parameter_count(self) -> int:
        """All parameters; a tied head is counted once."""
        return sum(map(prod, self.shapes().values()))

    def block_flops_per_token(self, kind: str, seq_len: int) -> int:
        """One block's part of `flops_per_token`: 6 x its parameters, plus attention's score and value matmuls."""
        return 6 * sum(map(prod, self.block_shapes(kind).values())) + 6 * self.n_heads * 2 * self.head_dim * seq_len

    def head_flops_per_token(self) -> int:
        """The final norm's and the head's part of `flops_per_token`. A tied head still multiplies, so it counts."""
        return 6 * (self.vocab_size * self.dim + self.dim)

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs for one token: 6 x parameters without the embedding, plus attention's score and value matmuls.

        6 = 2 FLOPs a multiply-add x (1 forward + 2 backward). Attention: 6 x layers x heads x (qk + v head dims) x seq,
        with no discount for the causal mask (PaLM, 2204.02311, appendix B). The embedding is a table: looking up is free.
        """
        blocks = sum(count * self.block_flops_per_token(kind, seq_len) for kind, count in self.block_kinds())
        return blocks + self.head_flops_per_token()


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
