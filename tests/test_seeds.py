"""The dense discussions that titan grew from, end to end on gloo ranks: what upstream reported, and what titan's plan does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import corpus, train_cell, train_cells
from tests.ranks import RankFailed, run_ranks
from tests.test_parallel import COMPILED, EAGER, check

TWO_D = ["parallelism.dp_shard=2", "parallelism.tp=2", "training.dtype=float32"]
WHOLE = ["compile.strategy=whole", "compile.force=true", *COMPILED]


def test_whole_model_2d_fails_at_the_embedding_as_reported(tmp_path: Path) -> None:
    """pytorch/torchtitan#534: the mask of the embedding that tensor parallel cuts."""
    with pytest.raises(RankFailed, match=r"(?i)mask_?partial|mask_?buffer"):
        run_ranks(4, train_cell, [*TWO_D, *WHOLE], corpus(tmp_path), 1)


@pytest.mark.slow
def test_what_titan_compiles_in_2d_has_every_gradient_of_eager(tmp_path: Path) -> None:
    """Blocks, submodules and only norms: with the embedding waited for, nothing is lost, and nothing is renamed."""
    data = corpus(tmp_path)
    strategies = ("block", "submodule", "norm")
    cells = [[*TWO_D, *COMPILED, f"compile.strategy={strategy}"] for strategy in strategies]
    eager, *compiled = run_ranks(4, train_cells, [[*TWO_D, *EAGER], *cells], data, [3] * 4)[0]
    assert not any("_orig_mod" in key for key in eager.keys)
    for strategy, result in zip(strategies, compiled, strict=True):
        check(result, eager, 1e-5, 1e-5, strategy)
