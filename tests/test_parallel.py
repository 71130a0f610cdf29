"""Two layouts for 20 steps, also in float32, train as one rank does. (tests/test_pairs.py has every layout, for 2 steps.)"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cells import Trained, corpus, train_cell, train_cells
from tests.ranks import run_ranks
from titan_cli.plan.facts import parse_version

EAGER = ["compile.strategy=off"]
COMPILED = ["compile.backend=aot_eager"]
FULL_AC = ["activation_checkpoint.mode=full"]
LAYOUTS = {
    "fsdp": (2, ["parallelism.dp_shard=2"]),
    "2d": (4, ["parallelism.dp_shard=2", "parallelism.tp=2"]),
}
VARIANTS = {
    "float64 eager": ["training.dtype=float64", *EAGER],
    "float32 eager": ["training.dtype=float32", *EAGER],
    "float32 eager, full AC": ["training.dtype=float32", *EAGER, *FULL_AC],
    "float32 compiled": ["training.dtype=float32", *COMPILED],
    "float32 compiled, full AC": ["training.dtype=float32", *COMPILED, *FULL_AC],
}
STEPS = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(data: Path) -> dict[str, Trained]:
    """float64 and float32 in eager on one rank: what the others are held to."""
    dtypes = ("float64", "float32")
    (results,) = run_ranks(1, train_cells, [[f"training.dtype={d}", *EAGER] for d in dtypes], data, [STEPS, STEPS])
    return dict(zip(dtypes, results, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(layout: str, data: Path, one_rank: dict[str, Trained]) -> None:
    world, degrees = LAYOUTS[layout]
    steps = [3 if "full AC" in variant else STEPS for variant in VARIANTS]
    results = run_ranks(world, train_cells, [[*degrees, *variant] for variant in VARIANTS.values()], data, steps)
    # The first rank is the fullest: the fit is exact.
    assert all(result.parameter_bytes == result.planned_bytes for result in results[0])
    for rank, trained in enumerate(results):
        for variant, result in zip(VARIANTS, trained, strict=True):
            dtype = variant.split()[0]
            losses, gradients = (1e-9, 1e-9) if dtype == "float64" else (1e-4, 1e-5)
            check(result, one_rank[dtype], losses, gradients, f"{layout}, {variant}, rank {rank}")


def check(result: Trained, reference: Trained, losses: float, gradients: float, where: str) -> None:
    assert result.keys == reference.keys, where
    assert result.losses == pytest.approx(reference.losses[: len(result.losses)], rel=losses), where
    assert result.norms[0] == pytest.approx(reference.norms[0], rel=gradients), where
    for name, expected in reference.gradients.items():
        off = (result.gradients[name] - expected).norm() / expected.norm()
        assert off < gradients, f"{where}: gradient of {name} is off by {off:.2g}"


@pytest.mark.skipif(parse_version(version("torch")) < (2, 12, 0), reason="torch 2.11 keeps the gradient")
def test_without_its_cure_the_embedding_learns_nothing_and_the_loss_does_not_show_it(
    data: Path, one_rank: dict[str, Trained]
) -> None:
    overrides = ["parallelism.tp=2", "training.dtype=float32", *COMPILED]
    broken = run_ranks(2, train_cell, overrides, data, 1, False)[0]
    assert broken.losses[0] == pytest.approx(one_rank["float32"].losses[0], rel=1e-6)
    assert broken.gradients["tok_embeddings.weight"].abs().max() == 0
    assert one_rank["float32"].gradients["tok_embeddings.weight"].abs().max() > 0
