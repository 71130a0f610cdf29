"""Tensor parallel with activations cut or whole between the blocks, logits cut or whole: always what one rank computes."""

from __future__ import annotations

import itertools
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cells import Trained, corpus, train_cell, train_cells
from tests.ranks import run_ranks
from tests.test_parallel import check
from titan_cli.plan.facts import parse_version

EAGER = ["training.dtype=float64", "compile.strategy=off"]
COMPILED = ["training.dtype=float64", "compile.backend=aot_eager"]
TIED = "model.tie_embeddings=true"
TP = "parallelism.tp=2"
LAYOUTS = {"tp": (2, [TP]), "2d": (4, [TP, "parallelism.dp_shard=2"])}


def cut(sequence: bool, loss: bool) -> list[str]:
    return [f"parallelism.sequence_parallel={sequence}".lower(), f"parallelism.loss_parallel={loss}".lower()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(data: Path) -> dict[bool, Trained]:
    """Of an untied and a tied model."""
    (results,) = run_ranks(1, train_cells, [EAGER, [*EAGER, TIED]], data, [3, 3])
    return dict(zip((False, True), results, strict=True))


@pytest.mark.parametrize("layout", ["2d", pytest.param("tp", marks=pytest.mark.slow)])
def test_every_cut_trains_as_one_rank_does(layout: str, data: Path, one_rank: dict[bool, Trained]) -> None:
    world, degrees = LAYOUTS[layout]
    kinds = list(itertools.product((False, True), repeat=3))
    cells = [[*degrees, *EAGER, *cut(sequence, loss), *([TIED] if tied else [])] for sequence, loss, tied in kinds]
    for trained in run_ranks(world, train_cells, cells, data, [3] * len(cells)):
        for (sequence, loss, tied), result in zip(kinds, trained, strict=True):
            check(result, one_rank[tied], 1e-9, 1e-9, f"{layout}, sequence {sequence}, loss {loss}, tied {tied}")


@pytest.mark.parametrize(
    ("sequence", "loss", "tied"),
    [
        (False, True, False),
        pytest.param(False, False, False, marks=pytest.mark.slow),
        pytest.param(True, True, False, marks=pytest.mark.slow),
        pytest.param(True, True, True, marks=pytest.mark.slow),
    ],
)
def test_compiled_computes_the_same(sequence: bool, loss: bool, tied: bool, data: Path, one_rank: dict[bool, Trained]) -> None:
    overrides = [TP, *COMPILED, *cut(sequence, loss), *([TIED] if tied else [])]
    for result in run_ranks(2, train_cell, overrides, data, 3):
        check(result, one_rank[tied], 1e-9, 1e-9, f"compiled, sequence {sequence}, loss {loss}, tied {tied}")


@pytest.mark.slow
@pytest.mark.skipif(parse_version(version("torch")) < (2, 12, 0), reason="torch 2.11 keeps the gradient")
def test_an_all_reduced_embedding_needs_the_cure_too(data: Path, one_rank: dict[bool, Trained]) -> None:
    broken = run_ranks(2, train_cell, [TP, *COMPILED, *cut(False, False)], data, 1, False)[0]
    assert broken.losses[0] == pytest.approx(one_rank[False].losses[0], rel=1e-9)
    assert broken.gradients["tok_embeddings.weight"].abs().max() == 0
    assert one_rank[False].gradients["tok_embeddings.weight"].abs().max() > 0


def stage(sequence: bool, symmetric: bool = False) -> tuple[Any, Any]:
    """The middle stage of a pipeline, two blocks and nothing else, cut over all ranks; and their mesh."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from titan_cli.models.llama3.config import FLAVORS
    from titan_cli.models.llama3.model import Llama3
    from titan_cli.models.llama3.tp_plan import TP_PLAN
    from titan_cli.worker.tensor_parallel import apply_tensor_parallel

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Llama3(FLAVORS["debug"], seq_len=8)
    model.tok_embeddings = model.norm = model.output = None
    settings = {"tp.symmetric_memory": True} if symmetric else {}
    plan = SimpleNamespace(sequence_parallel=sequence, loss_parallel=False, settings=settings)
    apply_tensor_parallel(model, mesh, TP_PLAN, plan)  # type: ignore[arg-type]
    return model, mesh


def traffic(sequence: bool) -> list[dict[str, int]]:
    """Collectives by name, of forward and of backward, of two blocks."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    model, mesh = stage(sequence)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    h = torch.ones(1, 8 // mesh.size() if sequence else 8, model.config.dim, requires_grad=True)
    counted = []
    with CommDebugMode() as forward:
        out = model(h) if not sequence else model(h, positions=torch.arange(8), length=8)
    assert type(out) is not DTensor
    assert out.shape == h.shape
    with CommDebugMode() as backward:
        out.sum().backward()
    for mode in (forward, backward):
        counted.append({str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items() if n})
    return counted


def test_a_stage_without_ends_is_cut_and_reduces_twice_a_block_in_each_direction() -> None:
    assert run_ranks(2, traffic, False) == [[{"all_reduce": 4}] * 2] * 2
    assert run_ranks(2, traffic, True) == [[{"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}] * 2] * 2


def symmetric_groups() -> tuple[bool, bool]:
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    _, plain = stage(sequence=True)
    before = is_symm_mem_enabled_for_group(plain.get_group().group_name)
    _, registered = stage(sequence=True, symmetric=True)
    return before, is_symm_mem_enabled_for_group(registered.get_group().group_name)


def test_the_group_is_registered_for_symmetric_memory_where_the_plan_says() -> None:
    assert run_ranks(2, symmetric_groups) == [(False, True)] * 2


def with_and_without_rows() -> list[float]:
    """Relative difference of output and gradients between the layout of async tensor parallel and the usual one."""
    import torch
    from torch import Tensor

    def computed(symmetric: bool, batch: int) -> list[Tensor]:
        torch.manual_seed(0)
        model, _ = stage(sequence=True, symmetric=symmetric)
        h = torch.randn(batch, 4, model.config.dim, requires_grad=True)
        out = model(h, positions=torch.arange(8), length=8)
        out.square().sum().backward()
        return [out, h.grad, *(parameter.grad.full_tensor() for parameter in model.parameters())]

    return [
        float((rows - usual).norm() / usual.norm())
        for batch in (1, 2)
        for rows, usual in zip(computed(True, batch), computed(False, batch), strict=True)
    ]


def test_the_layout_of_async_tensor_parallel_computes_the_same() -> None:
    for differences in run_ranks(2, with_and_without_rows):
        assert max(differences) < 1e-6


def code_of_one_block() -> list[str]:
    import torch
    import torch.distributed as dist

    from benchmarks import async_tp
    from titan_cli.plan.target import build
    from titan_cli.worker import private

    dist.destroy_process_group()
    private.fake_world(0, async_tp.TP)
    small = ["training.seq_len=64", "model.dim=64", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=128"]
    overrides = [*async_tp.LAYOUT, *small, "activation_checkpoint.mode=selective"]
    return async_tp.code_of_block(build("llama3-8b-2d", None, overrides), torch.device("cpu"))


@pytest.mark.slow
def test_inductor_fuses_every_collective_of_forward_and_the_gathers_of_backward() -> None:
    from benchmarks.async_tp import FUSED, PLAIN

    ((forward, backward),) = run_ranks(1, code_of_one_block)
    assert [[code.count(name) for name in (*FUSED, *PLAIN)] for code in (forward, backward)] == [[2, 2, 0, 0], [4, 0, 0, 2]]
    assert "extern_kernels.mm(" not in forward  # none is computed a second time, to be kept
