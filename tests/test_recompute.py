"""Activation checkpointing computes what it would without, keeps less, and computes again what was asked for and no more."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from tests.cells import corpus, whole
from tests.ranks import run_ranks
from tests.test_health import events
from tests.test_health import train as train_run
from titan_cli.config.layers import load
from titan_cli.config.options import options
from titan_cli.errors import ExitCode, TitanError
from titan_cli.plan.candidates import Wrapping
from titan_cli.plan.explain import selected
from titan_cli.plan.facts import is_checkpointed
from titan_cli.plan.planner import expectation
from titan_cli.plan.target import build as build_target
from titan_cli.worker import private
from titan_cli.worker.recompute import checkpoint_blocks, costly, make_policy

LAYERS = 3
MODES = {
    "none": [],
    "op": ["activation_checkpoint.mode=selective"],
    "2": ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_option=2"],
    "full": ["activation_checkpoint.mode=full"],
}
AGAIN = {"none": 0, "op": 0, "2": 1, "full": LAYERS}  # blocks that run again whole
EAGER = ["compile.strategy=off", "training.dtype=float64"]
COMPILED = ["compile.backend=aot_eager", "training.dtype=float32"]
TP = ["parallelism.tp=2"]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
MM = "aten.mm.default"
REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER = (
    f"_c10d_functional.{name}.default" for name in ("reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor")
)
# Of a block's seven matmuls the last, w2, is never needed again: nothing in backward reads what it gives.
MATMULS, KEPT_MATMULS = 6, 3


class Storages:
    """Remembers storages without holding them."""

    def __init__(self) -> None:
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.seen[id(storage)] = weakref.ref(storage)
        return tensor

    def alive(self) -> int:
        """Bytes of those that autograd or anything else still holds. FSDP empties those of gathered weights itself."""
        return sum(storage.nbytes() for seen in self.seen.values() if (storage := seen()) is not None)


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name, and remembers what they make."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo refuses to run what it compiled while a mode is on

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.made = Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen[str(func)] += 1
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if type(tensor) is torch.Tensor:
                self.made.add(tensor)
        return result


@dataclass(frozen=True)
class Step:
    """One micro-batch's loss and whole gradients; operators run in its backward; bytes that its forward left for backward."""

    loss: float
    gradients: dict[str, Any]
    backward: Counter[str]
    kept: int


def steps(cells: Sequence[tuple[list[str], dict[str, Any]]], data: Path) -> list[Step]:
    """One for each (overrides, changes to the plan). Collective."""
    return [step(overrides, changes, data) for overrides, changes in cells]


def step(overrides: list[str], changes: dict[str, Any], data: Path) -> Step:
    from titan_cli.runs.folder import RunFolder
    from titan_cli.worker import train

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fixed = [f"model.n_layers={LAYERS}", "training.seq_len=32", "launch.gpu=cpu", f"data.path={data}"]
    target = build_target(None, None, [*fixed, *overrides])
    plan = replace(target.plan, **changes)
    trainer = train.build(target.config, plan, target.world, torch.device("cpu"), RunFolder(data / "no-run"))
    batch = trainer.local(trainer.data.micro_batches(1)[0])

    def forward() -> Any:
        return trainer.loss_sum(trainer.model(batch.inputs, **batch.where()), batch.labels) / batch.labels.numel()

    operators = Operators()
    if plan.wraps:
        forward().backward()  # compiles
        trainer.optimizer.zero_grad()
        packed = Storages()
        with torch.autograd.graph.saved_tensors_hooks(packed.add, lambda tensor: tensor):
            loss = forward()
        kept = packed.alive()
    else:  # not by hooks, which do not see what selective checkpointing keeps
        with operators:
            loss = forward()
        kept = operators.made.alive()
        operators.seen.clear()
    with operators:
        loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in trainer.model.named_parameters()}
    return Step(float(loss.detach()), gradients, operators.seen, kept)


def check(result: Step, reference: Step, within: float, where: str) -> None:
    assert result.loss == pytest.approx(reference.loss, rel=within), where
    assert result.gradients.keys() == reference.gradients.keys(), where
    for name, expected in reference.gradients.items():
        off = (result.gradients[name] - expected).norm() / expected.norm()
        assert off < within, f"{where}: gradient of {name} is off by {off:.2g}"


def more(result: Step, reference: Step, operator: str) -> int:
    return result.backward[operator] - reference.backward[operator]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def eager(data: Path) -> dict[str, Step]:
    (results,) = run_ranks(1, steps, [([*EAGER, *mode], {}) for mode in MODES.values()], data)
    return dict(zip(MODES, results, strict=True))


@pytest.fixture(scope="module")
def eager_tp(data: Path) -> dict[str, Step]:
    """Of rank 0, also with whole activations."""
    whole_sequence = [*EAGER, *TP, "parallelism.sequence_parallel=false"]
    cells: dict[str, tuple[list[str], dict[str, Any]]] = {name: ([*EAGER, *TP, *mode], {}) for name, mode in MODES.items()}
    cells["whole sequence, none"] = (whole_sequence, {})
    cells["whole sequence, op"] = ([*whole_sequence, *MODES["op"]], {})
    cells["whole sequence, full"] = ([*whole_sequence, *MODES["full"]], {})
    return dict(zip(cells, run_ranks(2, steps, list(cells.values()), data)[0], strict=True))


def test_every_mode_computes_the_same(eager: dict[str, Step], eager_tp: dict[str, Step]) -> None:
    for name, result in eager.items():
        check(result, eager["none"], 1e-12, name)
    for name, result in eager_tp.items():
        check(result, eager["none"], 1e-9, f"tp, {name}")
        alike = "whole sequence, none" if "sequence" in name else "none"
        check(result, eager_tp[alike], 1e-12, f"tp, {name}")


@pytest.mark.parametrize("mode", MODES)
def test_backward_computes_again_what_was_asked_for_and_no_more(mode: str, eager: dict[str, Step]) -> None:
    again = MATMULS * AGAIN[mode] + (KEPT_MATMULS * LAYERS if mode == "op" else 0)
    assert eager["none"].backward[MM] > 0
    assert more(eager[mode], eager["none"], MM) == again
    assert eager[mode].backward[ATTENTION] == AGAIN[mode]


@pytest.mark.parametrize("mode", MODES)
def test_kept_collectives_are_not_issued_again(mode: str, eager_tp: dict[str, Step]) -> None:
    result, none = eager_tp[mode], eager_tp["none"]
    # A block has two reduce-scatters; like w2, whose partial sums it adds, the second is never needed again.
    assert more(result, none, REDUCE_SCATTER) == AGAIN[mode]
    assert more(result, none, ALL_GATHER) == 2 * (LAYERS if mode == "op" else AGAIN[mode]), "gathered again, not kept"
    assert result.backward[ATTENTION] == AGAIN[mode]


def test_without_sequence_parallel_kept_all_reduces_are_not_issued_again(eager_tp: dict[str, Step]) -> None:
    op, full, none = (eager_tp[f"whole sequence, {mode}"] for mode in ("op", "full", "none"))
    assert more(op, none, ALL_REDUCE) == 0
    assert more(full, none, ALL_REDUCE) == LAYERS


def test_each_mode_keeps_less_than_none_and_op_keeps_what_it_says(eager: dict[str, Step]) -> None:
    kept = {mode: step.kept for mode, step in eager.items()}
    assert kept["none"] > kept["op"] > kept["full"]
    assert kept["none"] > kept["2"] > kept["full"]
    assert (kept["none"] - kept["2"]) * LAYERS == kept["none"] - kept["full"], "one of three blocks keeps only its input"
    dim, kv, ffn, heads = 128, 64, 384, 4
    matmuls = dim + kv + ffn + dim  # wq, wv, w1, w2 of wq, wk, wv, wo, w1, w3, w2
    attention = dim + heads  # with the logarithm of the softmax's denominators
    assert kept["op"] - kept["full"] == LAYERS * 32 * (matmuls + attention) * 8


@pytest.fixture(scope="module")
def compiled(data: Path) -> dict[tuple[str, str], Step]:
    cells = {(mode, ac): ([*COMPILED, *MODES[mode]], {"ac": ac}) for mode in MODES for ac in ("inside", "outside")}
    del cells["none", "outside"]  # the same
    (results,) = run_ranks(1, steps, list(cells.values()), data)
    return dict(zip(cells, results, strict=True))


def test_compiled_modes_compute_what_eager_does_and_keep_less(
    eager: dict[str, Step], compiled: dict[tuple[str, str], Step]
) -> None:
    for (mode, ac), result in compiled.items():
        check(result, eager["none"], 1e-5, f"{mode}, {ac}")
    kept = {cell: result.kept for cell, result in compiled.items()}
    none = kept["none", "inside"]
    assert none > kept["op", "inside"] > kept["full", "inside"]
    assert none > kept["2", "inside"] > kept["full", "inside"]
    assert none > kept["2", "outside"] > kept["full", "outside"]


@pytest.mark.parametrize("mode", MODES)
def test_compiled_backward_computes_again_what_was_asked_for(mode: str, compiled: dict[tuple[str, str], Step]) -> None:
    none = compiled["none", "inside"]
    again = MATMULS * AGAIN[mode] + (KEPT_MATMULS * LAYERS if mode == "op" else 0)
    inside = compiled[mode, "inside"]
    assert more(inside, none, MM) == again
    # Up to torch 2.13 the compiler takes the CPU's attention for random, and restores the generator's state around it.
    assert inside.backward[ATTENTION] + inside.backward["run_with_rng_state"] == AGAIN[mode]
    if mode in ("2", "full"):  # compiled code runs to its end, w2 too
        assert more(compiled[mode, "outside"], none, MM) == (MATMULS + 1) * AGAIN[mode]
        assert compiled[mode, "outside"].backward[ATTENTION] == AGAIN[mode]


@pytest.mark.slow
def test_compiled_under_tensor_parallel_as_the_plan_wraps_it(data: Path, eager: dict[str, Step]) -> None:
    """Checkpointing lies where this torch's rules put it; by operator it is always inside."""
    cells = [([*COMPILED, *TP, *mode], {}) for mode in MODES.values()]
    results = dict(zip(MODES, run_ranks(2, steps, cells, data)[0], strict=True))
    for mode, result in results.items():
        check(result, eager["none"], 1e-5, mode)
    op, none = results["op"], results["none"]
    assert none.backward[REDUCE_SCATTER] > 0
    assert more(op, none, REDUCE_SCATTER) == 0
    assert more(op, none, ALL_GATHER) == 2 * LAYERS
    # wo too is not needed again, as what it and its reduce-scatter give is kept.
    assert more(op, none, MM) == (KEPT_MATMULS - 1) * LAYERS


def flex_steps() -> list[tuple[Any, ...]]:
    """(mode, compiled, gradients, operators in backward) of a small model that masks by document."""
    from titan_cli.models.llama3.config import FLAVORS
    from titan_cli.models.llama3.model import Llama3

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4096, (2, 130), generator=generator)
    starts = torch.where(torch.arange(130) < 70, 0, 70).expand(2, -1)
    found: list[tuple[Any, ...]] = []
    with private.allow_flex_on_cpu():
        for compiled in (False, True):
            for mode, ac_mode, option in (("none", "none", ""), ("op", "selective", "op"), ("full", "full", "")):
                torch._dynamo.reset()
                model = Llama3(replace(FLAVORS["debug"], n_layers=2), 130, "flex")
                model.init_weights(seed=0)
                blocks = [(f"layers.{number}", block) for number, block in model.layers.items()]
                checkpoint_blocks(blocks, SimpleNamespace(ac_mode=ac_mode, ac_option=option, settings={}))  # type: ignore[arg-type]
                for _, block in blocks if compiled else ():
                    block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
                loss, operators = model(tokens, starts).logsumexp(-1).mean(), Operators()
                with operators:
                    loss.backward()
                found.append((mode, compiled, [parameter.grad for parameter in model.parameters()], operators.seen))
    return found


@pytest.mark.slow
def test_a_block_mask_passes_through_and_flex_attention_is_kept() -> None:
    ((reference, *others),) = run_ranks(1, flex_steps)
    for mode, compiled, gradients, backward in others:
        for gradient, expected in zip(gradients, reference[2], strict=True):
            assert (gradient - expected).norm() < 1e-5 * expected.norm(), (mode, compiled)
        assert backward["flex_attention_backward"] == 2
        assert backward["flex_attention"] == (2 if mode == "full" else 0), (mode, compiled)


@pytest.mark.parametrize(
    "mode", ["op", pytest.param("2", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", ["one rank", pytest.param("tp", marks=pytest.mark.slow)])
def test_a_run_is_healthy(mode: str, layout: str, tmp_path: Path) -> None:
    words = [*MODES[mode], *(TP if layout == "tp" else []), "model.n_layers=4", "compile.strict=true"]
    words += [f"data.path={corpus(tmp_path)}", "metrics.eval_every=2", "metrics.eval_sequences=4"]
    world = 2 if layout == "tp" else 1
    assert run_ranks(world, train_run, None, words, tmp_path) == [ExitCode.DONE] * world
    assert events(tmp_path, "compile_health") == ["4/4 blocks compiled, 0 breaks, 0 recompiles"]
    assert events(tmp_path, "alert") == []


@pytest.mark.parametrize(
    ("option", "ac", "layers", "graphs"),
    [
        ("op", "inside", 4, 1),
        ("2", "inside", 4, 2),
        ("4", "inside", 4, 2),
        ("5", "inside", 4, 1),
        ("2", "inside", 1, 1),
        ("2", "outside", 4, 1),
    ],
)
def test_blocks_with_and_without_a_checkpoint_are_two_pieces_of_code(option: str, ac: Any, layers: int, graphs: int) -> None:
    words = ["activation_checkpoint.mode=selective", f"activation_checkpoint.selective_option={option}"]
    facts = build_target(None, None, [*words, f"model.n_layers={layers}", "launch.gpu=cpu"]).facts
    expect = expectation(Wrapping("block", ac), facts, {"dense": 0}, waited=False)
    assert expect["train"] == expect["eval"] == {"dense": {"graphs": graphs, "breaks": 0}}


def test_kinds_of_blocks_are_counted_by_their_own_numbers() -> None:
    facts = replace(build_target(None, None, ["launch.gpu=cpu"]).facts, ac_mode="selective")
    blocks = (("dense", 1), ("moe", 2))  # 0 | 1, 2
    assert [replace(facts, blocks=blocks, ac_option="2").ac_forms(kind) for kind in ("dense", "moe")] == [1, 2]
    assert [replace(facts, blocks=blocks, ac_option="4").ac_forms(kind) for kind in ("dense", "moe")] == [1, 1]


def test_every_nth_block_is_told_by_its_number_in_the_whole_model() -> None:
    blocks = [(f"layers.{number}", SimpleNamespace(forward=len)) for number in (5, 6, 7, 8)]  # a pipeline's stage
    checkpoint_blocks(blocks, SimpleNamespace(ac_mode="selective", ac_option="3", settings={}))  # type: ignore[arg-type]
    assert [name for name, block in blocks if block.forward is not len] == ["layers.5", "layers.8"]
    assert [n for n in range(7) if is_checkpointed(n, "selective", "2")] == [1, 3, 5]
    assert all(is_checkpointed(n, *mode) for n in range(3) for mode in (("full", ""), ("selective", "op")))
    assert not is_checkpointed(0, "none", "")


AT, C10D = torch.ops.aten, torch.ops._c10d_functional


def decide(settings: dict[str, bool], operator: Any, *args: Any, **kwargs: Any) -> bool:
    policy = make_policy(costly(settings))
    return policy(SimpleNamespace(is_recompute=False), operator, *args, **kwargs) == CheckpointPolicy.MUST_SAVE


def test_what_is_kept() -> None:
    kept = [AT.topk.default, torch.ops.higher_order.flex_attention, C10D.all_to_all_single.default, C10D.all_reduce.default]
    kept += [getattr(AT, f"_scaled_dot_product_{kernel}_attention").default for kernel in ("flash", "efficient", "cudnn")]
    assert all(decide({}, operator) for operator in kept)
    again = [AT.abs.default, AT.silu.default, C10D.all_gather_into_tensor.default, C10D.wait_tensor.default]
    assert not any(decide({}, operator) for operator in again)
    on_device, on_host = torch.empty(1, device="meta"), torch.empty(1)
    to_host = {"device": torch.device("cpu")}
    assert decide({}, AT._to_copy.default, on_device, **to_host)
    assert not decide({}, AT._to_copy.default, on_host, dtype=torch.bfloat16, **to_host)
    assert not decide({}, AT._to_copy.default, on_device, dtype=torch.bfloat16)


def test_the_plans_settings_are_honoured() -> None:
    code = private.inductor_compiled_code()
    assert not decide({}, code)
    assert decide({"ac.save_inductor_compiled_code": True}, code)


def test_every_second_matmul_is_computed_again_and_recomputation_counts_for_itself() -> None:
    policy = make_policy(costly({}))
    operators = (AT.mm.default, AT.linear.default, AT.addmm.default, AT.bmm.default, AT.mm.default)
    for is_recompute in (False, True):
        decided = [policy(SimpleNamespace(is_recompute=is_recompute), operator) for operator in operators]
        assert [decision == CheckpointPolicy.MUST_SAVE for decision in decided] == [True, False, True, False, True]


@pytest.mark.parametrize("option", ["1", "0", "02", "-2", "2.0", "all", "", "2 "])
def test_another_option_is_refused_in_words(option: str) -> None:
    with pytest.raises(
        TitanError, match=r'selective_option must be "op" or "2", "3", "4" \.\.\. \(default "op"\), not'
    ) as refused:
        load(overrides=[f"activation_checkpoint.selective_option={option}"])
    assert "every N-th block" in refused.value.message


def test_options_are_shown_in_words() -> None:
    assert options()["activation_checkpoint.selective_option"].type == '"op" or "2", "3", "4" ...'
    for option in ("op", "2", "12"):
        loaded = load(overrides=[f"activation_checkpoint.selective_option={option}"])
        assert loaded.config.activation_checkpoint.selective_option == option
    words = {"": "", "op": " by operator", "2": " every 2nd block", "3": " every 3rd block", "11": " every 11th block"}
    assert {option: selected(option) for option in words} == words
