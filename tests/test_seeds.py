"""The dense discussions that titan grew from, end to end on gloo ranks: what upstream reported, and what titan's plan does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.cells import Trained, corpus, train_cell, train_cells
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


def flex_cell(overrides: list[str], data: Path) -> tuple[Trained, int, list[str]]:
    """What was trained, how often FlexAttention was compiled, and what torch warned of it."""
    from torch._dynamo.utils import get_compilation_metrics

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = train_cell(overrides, data, 3)
    frames: list[Any] = [m for m in get_compilation_metrics() if m.co_name == "flex_attention" and m.graph_op_count]
    return trained, len(frames), [str(w.message) for w in caught if "without torch.compile" in str(w.message)]


@pytest.mark.parametrize("strategy", ["off", "norm", "block"])
def test_flex_is_compiled_under_checkpointing_by_operator(strategy: str, tmp_path: Path) -> None:
    """pytorch/torchtitan#1631: with the model's compile off it ran as eager operators, which write out all scores."""
    data = corpus(tmp_path, [1, 1, 2] * 40)  # several documents in a sequence
    flex = ["model.attention=flex", "training.dtype=float64", *COMPILED]
    by_operator = [*flex, "activation_checkpoint.mode=selective", f"compile.strategy={strategy}"]
    trained, compiled, warned = run_ranks(1, flex_cell, by_operator, data)[0]
    assert not warned
    assert bool(compiled) == (strategy != "block"), "in a compiled block it is a part of the block's graph"
    assert not trained.faults
    reference = run_ranks(1, flex_cell, [*flex, *EAGER], data)[0][0]
    check(trained, reference, 1e-9, 1e-9, strategy)
    one_text = run_ranks(1, train_cell, ["training.dtype=float64", *EAGER], data, 1)[0]
    assert one_text.losses[0] != pytest.approx(trained.losses[0], rel=1e-6), "documents are kept apart"
