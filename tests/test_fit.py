"""Whether the states fit: the fullest rank of a pipeline, what stays gathered there, and the refusal before a start."""

from __future__ import annotations

from math import prod

import pytest

from titan_cli import hardware
from titan_cli.launch import checks
from titan_cli.models.llama3.config import FLAVORS
from titan_cli.models.llama3.tp_plan import CUT_DIM, TP_PLAN
from titan_cli.plan import explain
from titan_cli.plan.fit import local_shape
from titan_cli.plan.target import Target, build

GIB = 2**30


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ())


def target(*overrides: str, preset: str = "llama3-8b-1d") -> Target:
    return build(preset, None, list(overrides), "2.13.0")


def size(first: int, last: int, *ends: str) -> int:
    """Parameters of 8B's blocks first to last (exclusive) and of these modules."""
    parts = (*(f"layers.{i}." for i in range(first, last)), *ends)
    return sum(prod(shape) for name, shape in FLAVORS["8b"].shapes().items() if name.startswith(parts))


def test_without_a_pipeline_every_rank_has_its_share() -> None:
    states = target().states
    whole = size(0, 32, "tok_embeddings", "norm", "output")
    assert (states.parameters, states.gathered) == (whole * 4 // 8, 0)
    assert states.total == whole * 16 // 8
    assert states.sentence().endswith("= 14.96 GiB on each device")


def test_the_fullest_rank_of_a_pipeline_counts_and_is_named() -> None:
    states = target("parallelism.pp=2", "parallelism.dp_shard=4").states
    stage = size(0, 17, "tok_embeddings")
    assert stage > size(17, 32, "norm", "output")
    # Gradients are whole until the last micro-batch, and so are the parameters that forward gathered, in bfloat16.
    assert (states.parameters, states.gathered, states.gradients, states.optimizer) == (stage, 2 * stage, 4 * stage, 2 * stage)
    assert states.sentence().endswith(" GiB on each device of pp rank 0, the fullest (embedding, layers.0 .. 16)")


def test_all_stages_of_a_rank_count() -> None:
    interleaved = ["parallelism.pp=2", "parallelism.dp_shard=4", "parallelism.pp_schedule=Interleaved1F1B"]
    states = target(*interleaved, "parallelism.pp_layers=[1, 2, 3, 26]").states
    assert states.parameters == size(1, 3) + size(6, 32, "norm", "output")
    assert "(layers.1 .. 2; layers.6 .. 31, head)" in states.sentence()


def test_context_parallel_ranks_share_a_stage() -> None:
    states = target("parallelism.pp=2", "parallelism.cp=4", "parallelism.dp_shard=1").states
    assert states.parameters == size(0, 17, "tok_embeddings")


def test_what_stays_gathered_follows_the_option() -> None:
    whole = size(0, 32, "tok_embeddings", "norm", "output")
    assert target("parallelism.reshard_after_forward=never").states.gathered == 2 * whole
    assert target("parallelism.reshard_after_forward=always").states.gathered == 0


def test_a_pipeline_that_does_not_fit_is_refused_by_its_fullest_rank() -> None:
    wide = target("parallelism.tp=1", "parallelism.pp=2", "parallelism.dp_shard=128", preset="llama3-70b-2d")
    (problem,) = checks.memory(wide)  # 35G parameters a rank: however many ranks share them, gathered they are 70 GB
    assert "will not fit: parameters" in problem.what
    assert "of pp rank" in problem.what
    assert "parallelism.pp" in problem.fix
    assert checks.memory(target("parallelism.pp=2", "parallelism.dp_shard=4")) == []


def test_an_explanation_lists_the_ranks_of_a_pipeline() -> None:
    lines = [line.text for line in explain.explain(target("parallelism.pp=2", "parallelism.dp_shard=4"))]
    at = lines.index("stages")
    assert lines[at + 1 : at + 3] == ["  pp rank 0  embedding, layers.0 .. 16", "  pp rank 1  layers.17 .. 31, head"]
    assert "  bubble  6 % = (pp 2 - 1) / (16 micro-batches + pp 2 - 1)" in lines[at:]
    assert "stages" not in [line.text for line in explain.explain(target())]


def test_the_bias_of_a_rowwise_layer_is_whole_on_every_tensor_parallel_rank() -> None:
    world = target("parallelism.tp=2", "parallelism.dp_shard=4").world
    shapes = {"weight": (64, 128), "bias": (64,)}
    cut = {n: local_shape(f"layers.0.attention.wo.{n}", shape, world, TP_PLAN, CUT_DIM) for n, shape in shapes.items()}
    assert cut == {"weight": (16, 64), "bias": (16,)}
