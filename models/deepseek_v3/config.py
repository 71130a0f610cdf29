"""DeepSeek-V3's dimensions, and what follows from them by arithmetic. Knows no torch: the front plans with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from titan_cli.models.common.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(Decoder):
    """A DeepSeek-V3 decoder (2412.19437): latent attention (MLA) in every block, experts (MoE) in all but the first blocks.

    Sizes are numbers of features unless they say otherwise. DeepSeek-V2 (2405.04434) differs only in how it routes.
    V3's module that predicts a second token (MTP) is not part of the model.
    """

    n_dense_layers: int  # the first blocks have one feed-forward instead of experts
    n_heads: int
    q_lora_rank: int  # width of the latent that queries are made from; 0: none, they are made from the residual stream
    kv_lora_rank: int  # width of the latent that keys and values are made from
    qk_nope_head_dim: int  # features of a head's query and key that know no position
    qk_rope_head_dim: int  # rotated features; their key is one for all heads
    v_head_dim: int
    ffn_dim: int  # hidden width of the dense blocks
    moe_ffn_dim: int  # hidden width of one expert
    n_experts: int  # routed experts of a block
    n_shared_experts: int  # see every token; computed as one feed-forward of n_shared_experts x moe_ffn_dim
    top_k: int  # routed experts that see a token
    n_expert_groups: int = 1  # the router first chooses n_limited_groups of these, then top_k experts in them
    n_limited_groups: int = 1
    score_func: str = "sigmoid"  # sigmoid or softmax, of the router's logits
    route_scale: float = 1.0  # factor of the chosen experts' weights
    norm_topk: bool = True  # the chosen experts' weights add up to 1 (before the factor)
    vocab_size: int = 129_280
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    # YaRN (2309.00071), for sequences longer than original_seq_len only; up to there the frequencies are the plain ones.
    rope_factor: float = 40.0  # slow frequencies are divided by it
    original_seq_len: int = 4096  # positions
    beta_fast: float = 32.0  # features that turn more often than this within original_seq_len positions keep their frequency
    beta_slow: float = 1.0  # those that turn less often than this get the whole factor
    mscale: float = 1.0  # the softmax's scale grows by (0.1 x mscale x ln(rope_factor) + 1) squared

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even: rotations turn pairs")
        if self.n_dense_layers > self.n_layers:
            raise ValueError(f"n_dense_layers {self.n_dense_layers} must not exceed n_layers {self.n_layers}")
        if self.n_experts % self.n_expert_groups:
            raise ValueError(f"n_experts {self.n_experts} must be a multiple of n_expert_groups {self.n_expert_groups}")
        if self.n_limited_groups > self.n_expert_groups:
            raise ValueError(f"n_limited_groups {self.n_limited_groups} must not exceed n_expert_groups {self.n_expert_groups}")
        within = self.n_experts // self.n_expert_groups * self.n_limited_groups
        if self.top_k > within:
            raise ValueError(
                f"top_k {self.top_k} is more than the {within} experts of n_limited_groups {self.n_limited_groups}"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_ffn_dim(self) -> int:
        """Hidden width of all shared experts together."""
        return self.n_shared_experts * self.moe_ffn_dim

    def block_kinds(self) -> tuple[tuple[str, int], ...]:
        return ("dense", self.n_dense_layers), ("moe", self.n_layers - self.n_dense_layers)

    def tp_sizes(self) -> dict[str, int]:
        """What tensor parallelism cuts, so the degree must divide each. The latents are too narrow to be worth it."""
        return {
            "n_heads": self.n_heads,
            "ffn_dim": self.ffn_dim,
            "n_shared_experts x moe_ffn_dim": self.shared_ffn_dim,
            "vocab_size": self.vocab_size,
        }

    def block_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The parameters of a block of this kind: names within it and shapes, in the model's own order.

        Experts are stacked: (n_experts, out, in). The bias that balances them is a buffer, because no gradient moves it.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "attention_norm.weight": (self.dim,),
            **{f"attention.{name}.weight": shape for name, shape in self._attention().items()},
            "ffn_norm.weight": (self.dim,),
        }
        if kind == "dense":
            return shapes | self._feed_forward("feed_forward.", self.ffn_dim)
        shapes["moe.router.gate.weight"] = (self.n_experts, self.dim)
        shapes["moe.experts.w1"] = (self.n_experts, self.moe_ffn_dim, self.dim)
        shapes["moe.experts.w2"] = (self.n_experts, self.dim, self.moe_ffn_dim)
        shapes["moe.experts.w3"] = (self.n_experts, self.moe_ffn_dim, self.dim)
        return shapes | self._feed_forward("moe.shared_experts.", self.shared_ffn_dim)

    def _attention(self) -> dict[str, tuple[int, ...]]:
        queries = self.n_heads * self.qk_head_dim
        latent = {
            "wq_a": (self.q_lora_rank, self.dim),
            "q_norm": (self.q_lora_rank,),
            "wq_b": (queries, self.q_lora_rank),
        }
        return {
            **(latent if self.q_lora_rank else {"wq": (queries, self.dim)}),
            "wkv_a": (self.kv_lora_rank + self.qk_rope_head_dim, self.dim),
            "kv_norm": (self.kv_lora_rank,),
            "wkv_b": (self.n_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "wo": (self.dim, self.n_heads * self.v_head_dim),
        }

    def _feed_forward(self, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}w1.weight": (hidden, self.dim),
            f"{prefix}w2.weight": (self.dim, hidden),
            f"{prefix}w3.weight": (hidden, self.dim),
        }

    def active_parameter_count(self) -> int:
        """Parameters that one token is multiplied with: top_k of the routed experts, and not the embedding, a table.

        The published numbers count the same way: 37B for V3, 2.4B for V2-Lite. A tied matrix counts, as the head.
        """
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return self._active(self.shapes()) - embedding

    def _active(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Parameters of `shapes` without the experts that a token does not see."""
        experts = sum(prod(shape) for name, shape in shapes.items() if "moe.experts." in name)
        return sum(map(prod, shapes.values())) - experts // self.n_experts * (self.n_experts - self.top_k)

    def block_flops_per_token(self, kind: str, seq_len: int) -> int:
        """One block's part of `flops_per_token`: 6 x its active parameters, plus attention's score and value matmuls."""
        attention = self.n_heads * (self.qk_head_dim + self.v_head_dim) * seq_len
        return 6 * self._active(self.block_shapes(kind)) + 6 * attention


# Published dimensions. 671b is DeepSeek-V3's main model, 16b is DeepSeek-V2-Lite, which has V3's blocks and V2's router.
FLAVORS = {
    # Small, with every part that 671b has: a query latent, groups of experts, both kinds of blocks. ep can be 1 to 8, tp 4.
    "debug": DeepSeekV3Config(
        dim=128, n_layers=3, n_dense_layers=1, n_heads=4,
        q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        ffn_dim=384, moe_ffn_dim=96, n_experts=8, n_shared_experts=1, top_k=2, n_expert_groups=4, n_limited_groups=2,
        route_scale=2.5, vocab_size=4096,
    ),
    "16b": DeepSeekV3Config(
        dim=2048, n_layers=27, n_dense_layers=1, n_heads=16,
        q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ffn_dim=10944, moe_ffn_dim=1408, n_experts=64, n_shared_experts=2, top_k=6,
        score_func="softmax", norm_topk=False, vocab_size=102_400, mscale=0.707,
    ),
    "671b": DeepSeekV3Config(
        dim=7168, n_layers=61, n_dense_layers=3, n_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ffn_dim=18432, moe_ffn_dim=2048, n_experts=256, n_shared_experts=1, top_k=8, n_expert_groups=8, n_limited_groups=4,
        route_scale=2.5,
    ),
}  # fmt: skip
