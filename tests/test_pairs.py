"""Every pair of features trains as one rank does, or is refused; docs/parallelism.md tells which, and is generated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests import pairs
from tests.cells import Trained, corpus, train_cells
from tests.ranks import run_ranks
from tests.test_explain import check_golden
from titan_cli import hardware
from titan_cli.plan.planner import Refused

STEPS = 2
AT_ONCE = 20  # eager cells in one set of ranks: each leaves process groups behind, with threads
TOLERANCE = 1e-9  # relative, in float64

Words = tuple[str, ...]
slow = pytest.mark.slow


@dataclass(frozen=True)
class Held:
    """What one rank computed, without its gradients; those as differences from one rank's, relative, by name."""

    trained: Trained
    off: dict[str, float]


def train_against(cells: Sequence[tuple[Words, Words]], data: Path, references: Path) -> list[Held]:
    """Train cells one after the other, on this rank: their words, and those on one rank, whose results `references` has.

    Gradients are compared here because those of all cells together are large.
    """
    known: dict[Words, Trained] = torch.load(references, weights_only=False)
    held = []
    for words, on_one_rank in cells:
        (trained,) = train_cells([words], data, [STEPS])
        whole = known[on_one_rank].gradients
        off = {name: float((g - whole[name]).norm() / whole[name].norm()) for name, g in trained.gradients.items()}
        held.append(Held(replace(trained, gradients={}), off))
    return held


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 20 to 80 tokens: every sequence has several."""
    return corpus(tmp_path_factory.mktemp("corpus"), [1 + n % 4 for n in range(300)])


@pytest.fixture(scope="module")
def one_rank(data: Path) -> dict[Words, Trained]:
    """What the others are held to: the models and batches of all cells on one rank, in eager, by their words."""
    models = {pairs.combine(cell.split(), pairs.TORCH).on_one_rank for cell in pairs.every_cell()}
    words = sorted(models | {without_mask(model) for model in models})
    (results,) = run_ranks(1, train_cells, words, data, [STEPS] * len(words))
    return dict(zip(words, results, strict=True))


@pytest.fixture(scope="module")
def references(one_rank: dict[Words, Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("references") / "one_rank.pt"
    torch.save(one_rank, path)
    return path


@pytest.fixture(scope="module")
def trained_eager(request: pytest.FixtureRequest, data: Path, references: Path) -> dict[str, list[Held]]:
    """What every rank of the eager cells that were asked for computed. As many ranks serve many cells, in turn."""
    asked = [item for item in request.session.items if "trained_eager" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["cell"] for item in asked]  # type: ignore[attr-defined]
    cells = [pairs.combine(name.split()) for name in names]
    held: dict[str, list[Held]] = {}
    for world in sorted({cell.world_size for cell in cells}):
        alike = [i for i, cell in enumerate(cells) if cell.world_size == world]
        for first in range(0, len(alike), AT_ONCE):
            part = alike[first : first + AT_ONCE]
            ranks = run_ranks(world, train_against, [(cells[i].words, cells[i].on_one_rank) for i in part], data, references)
            held |= {names[i]: list(ranks) for i, *ranks in zip(part, *ranks, strict=True)}
    return held


def without_mask(words: Words) -> Words:
    return tuple(word for word in words if word != "model.attention=flex")


def named(cells: tuple[str, ...], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(cell, id=pairs.id_of(cell), marks=marks) for cell in cells]


@pytest.mark.parametrize("cell", [*named(pairs.EAGER_CELLS), *named(pairs.WIDE_CELLS, slow)])
def test_eager(cell: str, trained_eager: dict[str, list[Held]], one_rank: dict[Words, Trained]) -> None:
    check(trained_eager[cell], one_rank[pairs.combine(cell.split()).on_one_rank])


@pytest.mark.parametrize("cell", [*named(pairs.COMPILED_CELLS), *named(pairs.SLOW_COMPILED_CELLS, slow)])
def test_compiled(cell: str, data: Path, one_rank: dict[Words, Trained], references: Path) -> None:
    try:
        planned = pairs.combine(cell.split())
    except Refused as refused:
        pytest.skip(f"refused on this torch by {refused.rule}")
    ranks = run_ranks(planned.world_size, train_against, [(planned.words, planned.on_one_rank)], data, references)
    check([held for (held,) in ranks], one_rank[planned.on_one_rank])


def check(ranks: list[Held], reference: Trained) -> None:
    """Losses and norms on every rank, the whole gradient of each parameter wherever it is, no fault, and the planned size."""
    for rank, held in enumerate(ranks):
        assert held.trained.faults == (), f"rank {rank}"
        assert held.trained.losses == pytest.approx(reference.losses, rel=TOLERANCE), f"rank {rank}"
        assert held.trained.held_out in (None, pytest.approx(reference.held_out, rel=TOLERANCE)), f"rank {rank}"
        assert held.trained.norms == pytest.approx(reference.norms, rel=TOLERANCE), f"rank {rank}"
        assert not {name: off for name, off in held.off.items() if not off < TOLERANCE}, f"rank {rank}"
    assert set().union(*(held.off for held in ranks)) == set(reference.gradients)
    assert set().union(*(held.trained.keys for held in ranks)) == set(reference.keys)
    assert max(held.trained.parameter_bytes for held in ranks) == ranks[0].trained.planned_bytes


def test_documents_matter(one_rank: dict[Words, Trained]) -> None:
    """With and without their mask the same batches teach differently: what holds flex to one rank holds its mask to it."""
    with_mask = [words for words in one_rank if words != without_mask(words)]
    assert with_mask
    for words in with_mask:
        without, name = one_rank[without_mask(words)].gradients, "layers.0.attention.wq.weight"
        assert (one_rank[words].gradients[name] - without[name]).norm() > 0.1 * without[name].norm()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is the same on every machine: no GPU, and a compiler."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ())
    monkeypatch.setattr(hardware, "has_cxx_compiler", lambda: True)


@pytest.mark.usefixtures("machine")
def test_every_pair_is_trained_or_refused_and_the_page_says_where() -> None:
    functions = {pairs.test_of(cell).partition("[")[0] for cell in pairs.every_cell()}
    assert functions == {test_eager.__name__, test_compiled.__name__}
    check_golden(Path(__file__).parent.parent / "docs" / "parallelism.md", pairs.markdown())


@pytest.mark.usefixtures("machine")
def test_a_pair_that_no_cell_trains_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(cell for cell in pairs.every_cell() if not {"fsdp", "replicate"} <= set(cell.split()))
    monkeypatch.setattr(pairs, "every_cell", lambda: rest)
    pairs.allowed.cache_clear()
    try:
        with pytest.raises(AssertionError, match="fsdp and replicate: neither trained in a cell, nor refused"):
            pairs.outcomes()
    finally:
        pairs.allowed.cache_clear()
