"""Faults that are planted in the model run through the worker's own loop, and each is caught: by name, and as exit 9."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import corpus
from tests.ranks import RankFailed, run_ranks
from titan_cli.errors import ExitCode
from titan_cli.plan.facts import parse_version
from titan_cli.runs import records
from titan_cli.runs.folder import RunFolder

KEEPS_GRADIENT = parse_version(version("torch")) < (2, 12, 0)

FIXED = (
    "training.seq_len=32", "training.global_batch_size=4", "training.dtype=float32", "launch.gpu=cpu", "training.steps=4",
    "compile.backend=aot_eager", "checkpoint.at_end=false", "metrics.log_every=1",
)  # fmt: skip


def per_layer_int() -> None:
    """A block that reads its own number: one graph for each block."""
    from titan_cli.models.llama3.model import Llama3, TransformerBlock

    build, forward = Llama3.__init__, TransformerBlock.forward

    def numbered(self: Any, *args: Any) -> None:
        build(self, *args)
        for number, block in enumerate(self.layers.values()):
            block.number = number

    Llama3.__init__ = numbered  # type: ignore[method-assign]
    TransformerBlock.forward = lambda self, x, *rest: forward(self, x * (1 + 0.01 * self.number), *rest)  # type: ignore[method-assign]


def item_in_forward() -> None:
    """A block that reads a value on the host: the graph would break."""
    from titan_cli.models.llama3.model import TransformerBlock

    forward = TransformerBlock.forward
    TransformerBlock.forward = lambda self, x, *rest: forward(self, x * (1 if x.sum().item() else 2), *rest)  # type: ignore[method-assign]


def unwaited_embedding() -> None:
    """The cure of tp-embedding-wait does nothing."""
    from titan_cli.worker import parallel

    parallel.CURES = {"wait on tok_embeddings output": lambda model: None}  # type: ignore[misc]


def cut_off() -> None:
    """A parameter that does not reach the loss."""
    from titan_cli.models.llama3.model import FeedForward

    FeedForward.forward = lambda self, x: self.w2(self.w1(x))  # type: ignore[method-assign]


def other_shape_at_step_3() -> None:
    """A batch of another shape in the middle of the run."""
    from titan_cli.worker.data import Data

    micro_batches = Data.micro_batches

    def shorter(self: Any, step: int) -> Any:
        return [b.map(lambda t: t[:, :16]) if step == 3 else b for b in micro_batches(self, step)]

    Data.micro_batches = shorter  # type: ignore[method-assign]


def train(plant: Callable[[], None] | None, overrides: list[str], folder: Path) -> int:
    """Train on this rank through the worker; the exit code its loop ends with."""
    import warnings

    import torch
    import torch.distributed as dist

    from titan_cli.errors import TitanError
    from titan_cli.plan.target import build as build_target
    from titan_cli.worker import train as worker
    from titan_cli.worker.report import Reporter
    from titan_cli.worker.stop import StopRequest

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if plant:
        plant()
    target = build_target(None, None, [*FIXED, *overrides])
    run = RunFolder(folder)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    report = Reporter(attempt, dist.get_rank())
    try:
        trainer = worker.build(target.config, target.plan, target.world, torch.device("cpu"), run)
        if target.config.compile.check_gradients:
            trainer.check_gradients(report)
        trainer.warm_up()
        return int(trainer.run_steps(run, report, StopRequest()))
    except TitanError as error:
        return int(error.code)


def events(folder: Path, kind: str, rank: int = 0) -> list[str]:
    return [e["message"] for e in records.read(RunFolder(folder).attempt(1).rank_events(rank)) if e["kind"] == kind]


def test_a_healthy_run_counts_everything(tmp_path: Path) -> None:
    words = [f"data.path={corpus(tmp_path)}", "compile.strict=true", "metrics.eval_every=2", "metrics.eval_sequences=4"]
    assert run_ranks(1, train, None, words, tmp_path) == [ExitCode.DONE]
    assert events(tmp_path, "compile_health") == ["2/2 blocks compiled, 0 breaks, 0 recompiles"]
    assert events(tmp_path, "gradient_audit") == ["21/21 gradients alive"]
    assert events(tmp_path, "alert") == []


@pytest.mark.parametrize(
    ("plant", "overrides", "says"),
    [
        (per_layer_int, [], "2 graphs instead of 1 for dense blocks (train)"),
        pytest.param(cut_off, [], "layers.0.feed_forward.w3.weight has no gradient", marks=pytest.mark.slow),
        pytest.param(other_shape_at_step_3, [], "recompiled layers.0", marks=pytest.mark.slow),
        pytest.param(
            unwaited_embedding,
            ["parallelism.tp=2"],
            "the gradient of tok_embeddings.weight is exactly zero",
            marks=pytest.mark.skipif(KEEPS_GRADIENT, reason="torch 2.11 keeps the gradient"),
        ),
    ],
)
def test_a_planted_fault_is_an_alert_and_stops_a_strict_run(
    plant: Callable[[], None], overrides: list[str], says: str, tmp_path: Path
) -> None:
    world = 2 if overrides else 1
    words = [f"data.path={corpus(tmp_path)}", *overrides]
    assert run_ranks(world, train, plant, words, tmp_path / "lenient") == [ExitCode.DONE] * world
    if plant is per_layer_int:
        assert events(tmp_path / "lenient", "compile_health") == ["2/2 blocks compiled, 0 breaks, 1 recompiles"]
    for rank in range(world):
        assert any(says in message for message in events(tmp_path / "lenient", "alert", rank)), events(
            tmp_path / "lenient", "alert"
        )
    assert (
        run_ranks(world, train, plant, [*words, "compile.strict=true"], tmp_path / "strict")
        == [ExitCode.COMPILE_HEALTH] * world
    )


def test_an_item_in_forward_is_refused_by_the_compiler_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"test_health\.py.*\n?.*item\(\)"):
        run_ranks(1, train, item_in_forward, [f"data.path={corpus(tmp_path)}"], tmp_path)


@pytest.mark.slow
def test_check_gradients_compares_every_parameter(tmp_path: Path) -> None:
    words = [f"data.path={corpus(tmp_path)}", "compile.check_gradients=true", "compile.strict=true"]
    assert run_ranks(1, train, None, words, tmp_path / "whole") == [ExitCode.DONE]
    first, second = events(tmp_path / "whole", "gradient_audit")
    assert first.startswith("21/21 compiled gradients equal eager ones")
    assert second == "21/21 gradients alive"
    if KEEPS_GRADIENT:
        return
    words += ["parallelism.tp=2"]
    assert run_ranks(2, train, unwaited_embedding, words, tmp_path / "wrong") == [ExitCode.COMPILE_HEALTH] * 2
    assert "compiled gradient of tok_embeddings.weight differs from eager by 1.0e+00" in events(tmp_path / "wrong", "alert")[0]


@pytest.mark.slow
def test_check_gradients_looks_at_every_stage_of_a_pipeline(tmp_path: Path) -> None:
    words = [f"data.path={corpus(tmp_path)}", "compile.check_gradients=true", "compile.strict=true"]
    words += ["parallelism.pp=2", "parallelism.cp=2", "parallelism.dp_shard=1"]
    assert run_ranks(4, train, None, words, tmp_path / "whole") == [ExitCode.DONE] * 4
    for rank in range(4):
        first, second = events(tmp_path / "whole", "gradient_audit", rank)
        assert first.startswith("21/21 compiled gradients equal eager ones")
        assert second == "21/21 gradients alive"
        assert events(tmp_path / "whole", "compile_health", rank) == ["2/2 blocks compiled, 0 breaks, 0 recompiles"]


def run_out_of_memory() -> None:
    from titan_cli.models.llama3.model import FeedForward

    def forward(self: object, x: object) -> None:
        raise torch.OutOfMemoryError("planted")

    FeedForward.forward = forward  # type: ignore[assignment]


def test_what_fails_in_a_stage_keeps_its_type_and_its_line(tmp_path: Path) -> None:
    words = [f"data.path={corpus(tmp_path)}", "parallelism.pp=2", "compile.strategy=off"]
    with pytest.raises(RankFailed, match="OutOfMemoryError: planted"):
        run_ranks(2, train, run_out_of_memory, words, tmp_path)


NAMES = {
    "off": ["compile.strategy=off"],
    "block": [],
    "block, full AC": ["activation_checkpoint.mode=full"],
    "submodule": ["compile.strategy=submodule"],
    "submodule, full AC": ["compile.strategy=submodule", "activation_checkpoint.mode=full"],
    "norm": ["compile.strategy=norm"],
    "norm, full AC": ["compile.strategy=norm", "activation_checkpoint.mode=full"],
    "whole": ["compile.strategy=whole", "compile.force=true"],
    "whole, full AC": ["compile.strategy=whole", "compile.force=true", "activation_checkpoint.mode=full"],
}


def state_keys(data: Path) -> dict[str, list[str]]:
    from tests.cells import train_cell

    fixed = ["training.dtype=float32", "compile.backend=aot_eager"]
    return {name: train_cell([*fixed, *words], data, 1).keys for name, words in NAMES.items()}


@pytest.mark.slow
def test_names_are_the_eager_models_under_every_strategy(tmp_path: Path) -> None:
    (keys,) = run_ranks(1, state_keys, corpus(tmp_path))
    assert len(keys["off"]) == 21
    for name, found in keys.items():
        assert found == keys["off"], name
