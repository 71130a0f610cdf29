"""What titan asks of a decoder's dimensions, and the arithmetic that all decoders share. Knows no torch: the front uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, kw_only=True)
class Decoder(ABC):
    """A family's dimensions inherit from this, add their own, and say what a block has and what tensor parallelism cuts.

    Parameters lie in `tok_embeddings`, `layers.0`, `layers.1` ..., `norm` and `output`, so that a stage of a pipeline can
    have some of them. Blocks of one kind run the same code and share its compiled graphs; there is one kind, unless a family
    says otherwise.
    """

    dim: int  # width of the residual stream, features
    n_layers: int
    vocab_size: int
    tie_embeddings: bool = False  # the head multiplies with the embedding's matrix and has none of its own

    @abstractmethod
    def block_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The parameters of one block: names within it, and shapes."""

    @abstractmethod
    def tp_sizes(self) -> dict[str, int]:
        """What tensor parallelism cuts, by the names of options: the degree must divide each. Empty: nothing is cut."""

    def block_kinds(self) -> tuple[tuple[str, int], ...]:
        """Kinds of blocks and how many there are, in the model's order."""
        return (("dense", self.n_layers),)

    def norm_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the norm after the last block."""
        return {"weight": (self.dim,)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in the model's own order."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        blocks = [block for kind, count in self.block_kinds() for block in [self.block_shapes(kind)] * count]
        for i, block in enumerate(blocks):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
        shapes |= {f"norm.{name}": shape for name, shape in self.norm_shapes().items()}
        if not self.tie_embeddings:
            shapes["output.weight"] = (self.vocab_size, self.dim)
        return shapes

    def parameter_count(self) -> int:
        """All parameters; a tied head is counted once."""
        return sum(map(prod, self.shapes().values()))

    def block_flops_per_token(self, kind: str, seq_len: int) -> int:
        """One block's part of `flops_per_token`: 6 x its parameters, plus attention's score and value matmuls.

        For attention whose heads are together as wide as the residual stream.
        """
        return 6 * sum(map(prod, self.block_shapes(kind).values())) + 6 * 2 * self.dim * seq_len

    def head_flops_per_token(self) -> int:
        """The final norm's and the head's part of `flops_per_token`. A tied head still multiplies, so it counts."""
        return 6 * (self.vocab_size * self.dim + sum(map(prod, self.norm_shapes().values())))

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs for one token, from which `mfu` follows: 6 x parameters without the embedding, plus attention's.

        6 = 2 FLOPs a multiply-add x (1 forward + 2 backward); no discount for the causal mask (PaLM, 2204.02311, appendix B).
        """
        blocks = sum(count * self.block_flops_per_token(kind, seq_len) for kind, count in self.block_kinds())
        return blocks + self.head_flops_per_token()
