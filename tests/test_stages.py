"""Stages of a pipeline: balanced as well as any cut can be, placed as torch places them, and refused where torch refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from titan_cli.config import stages
from titan_cli.config.families import FLAVORS
from titan_cli.config.stages import STAGES_PER_RANK, Stage, split

LLAMA, DEEPSEEK = FLAVORS["llama3"], FLAVORS["deepseek_v3"]


def blocks(found: Sequence[Stage]) -> list[int]:
    return [stage.last - stage.first for stage in found]


# Balance


def largest(costs: Sequence[int], groups: Sequence[int]) -> int:
    before = [0, *accumulate(costs)]
    return max(before[last] - before[first] for first, last in pairwise([0, *accumulate(groups)]))


def every_cut(blocks: int, groups: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, blocks), groups - 1):
        yield [last - first for first, last in pairwise([0, *cuts, blocks])]


def test_no_cut_has_a_cheaper_largest_group_or_an_equal_one_with_a_smaller_largest_size() -> None:
    chance = random.Random(0)
    for _ in range(500):
        n = chance.randint(1, 9)
        flops, sizes = ([chance.randint(1, 12) for _ in range(n)] for _ in range(2))
        groups = chance.randint(1, n)
        found = stages.balance(flops, sizes, groups)
        assert len(found) == groups
        assert sum(found) == n
        assert min(found) >= 1
        best = min((largest(flops, cut), largest(sizes, cut)) for cut in every_cut(n, groups))
        assert (largest(flops, found), largest(sizes, found)) == best, (flops, sizes, groups)


def test_early_groups_get_less_of_what_does_not_divide() -> None:
    assert stages.balance([1] * 10, [1] * 10, 4) == [2, 2, 3, 3]


def test_llama_3_405b_is_cut_as_its_report_says() -> None:
    """2407.21783, 3.3.2: one block less in the first stage, which embeds, and in the last, which has the head."""
    assert blocks(split(LLAMA["405b"], 8192, 16, "1F1B")) == [7, *[8] * 14, 7]
    assert stages.in_words(split(LLAMA["405b"], 131_072, 16, "Interleaved1F1B")) == "3, 30 x 4, 3"


def test_the_head_of_8b_counts_as_two_blocks_and_less_in_long_sequences() -> None:
    # At 8,192 tokens a block costs 6 x 218M + 6 x 32 x 256 x 8,192 = 1.7 GFLOPs and the head 6 x 525M = 3.2.
    assert blocks(split(LLAMA["8b"], 8192, 2, "1F1B")) == [17, 15]
    assert blocks(split(LLAMA["8b"], 131_072, 2, "1F1B")) == [16, 16]


@pytest.mark.parametrize("model", [LLAMA["8b"], LLAMA["1b"], DEEPSEEK["671b"]], ids=["8b", "1b", "671b"])
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_stages_have_every_part_of_the_model_once_and_all_of_its_flops(model: Any, schedule: str) -> None:
    found = split(model, 4096, 4, schedule)
    assert len(found) == 4 * STAGES_PER_RANK[schedule]
    assert all(sum(stage.holds(name) for stage in found) == 1 for name in model.shapes())
    assert found[0].holds("tok_embeddings.weight")
    assert found[-1].holds("norm.weight")
    assert found[-1].holds("output")
    assert sum(stages.flops_per_token(model, 4096, found)) == model.flops_per_token(4096)


def test_without_a_pipeline_one_stage_has_everything() -> None:
    for schedule in STAGES_PER_RANK:
        assert split(LLAMA["debug"], 64, 1, schedule) == (Stage(0, 0, 2, embedding=True, head=True),)


def test_a_stage_in_words() -> None:
    assert [str(stage) for stage in split(LLAMA["debug"], 64, 1, "1F1B", [2])] == ["embedding, layers.0 .. 1, head"]
    assert [str(stage) for stage in split(LLAMA["debug"], 64, 3, "GPipe", [0, 1, 1])] == [
        "embedding",
        "layers.0",
        "layers.1, head",
    ]


# Placement


def test_stages_lie_round_and_round_or_there_and_back() -> None:
    model = LLAMA["8b"]
    assert [s.rank for s in split(model, 64, 4, "1F1B")] == [0, 1, 2, 3]
    assert [s.rank for s in split(model, 64, 4, "Interleaved1F1B")] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [s.rank for s in split(model, 64, 2, "InterleavedZeroBubble", [6, 6, 6, 6, 4, 4])] == [0, 1, 0, 1, 0, 1]
    assert [s.rank for s in split(model, 64, 4, "ZBVZeroBubble")] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [s.rank for s in split(model, 64, 2, "DualPipeV")] == [0, 1, 1, 0]


# What is asked for, and cannot be


def test_the_ends_may_be_without_a_block() -> None:
    assert blocks(split(LLAMA["debug"], 64, 4, "1F1B", [0, 1, 1, 0])) == [0, 1, 1, 0]
    assert blocks(split(LLAMA["8b"], 64, 2, "Interleaved1F1B", [0, 8, 8, 8, 8, 0])) == [0, 8, 8, 8, 8, 0]


@pytest.mark.parametrize(
    ("pp", "schedule", "layers", "said"),
    [
        (2, "1F1B", [1, 1, 0], "pp_layers has 3 stages, and pp 2 with 1F1B has 2\n    Give 2 numbers, or leave"),
        (2, "ZBVZeroBubble", [1, 1], "pp_layers has 2 stages, and pp 2 with ZBVZeroBubble has 4\n"),
        (2, "Interleaved1F1B", [1, 1, 0], "pp_layers has 3 stages, and pp 2 with Interleaved1F1B has a multiple of 2\n"),
        (2, "Interleaved1F1B", [], "pp_layers has 0 stages, and pp 2 with Interleaved1F1B has a multiple of 2\n"),
        (1, "Interleaved1F1B", [1, 1], "pp_layers has 2 stages, and pp 1 with Interleaved1F1B has 1\n"),
        (2, "1F1B", [1, 2], "pp_layers adds up to 3 blocks, and the model has 2\n    Change a number by 1, or leave"),
        (4, "GPipe", [1, 0, 0, 1], "pp_layers gives stage 1, 2 (of 0 to 3) no block\n    Only the first stage"),
        (4, "1F1B", None, "pp = 4 with 1F1B makes 4 stages, and the model has 2 blocks\n    pp can be 1 to 2 with 1F1B."),
        (
            2,
            "DualPipeV",
            None,
            "pp = 2 with DualPipeV makes 4 stages, and the model has 2 blocks\n    pp can be 1 with DualPipeV, or",
        ),
        (2, "DualPipeV", None, "pp_schedule=GPipe or 1F1B."),
    ],
)
def test_stages_that_cannot_be_are_told_with_a_fix(pp: int, schedule: str, layers: list[int] | None, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        split(LLAMA["debug"], 64, pp, schedule, layers)
    assert f"parallelism.{said}" in str(caught.value)


def test_all_that_is_wrong_with_the_layers_is_told_together() -> None:
    with pytest.raises(ValueError) as caught:
        split(LLAMA["debug"], 64, 2, "GPipe", [2, 0, 3])
    assert str(caught.value).count("parallelism.pp_layers ") == 3 + 2  # two of the cures name it as well


# Micro-batches


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_a_number_of_micro_batches_is_refused_where_torch_refuses_it(schedule: str) -> None:
    for pp in (2, 3, 4):
        n = pp * STAGES_PER_RANK[schedule]
        for micro_batches in range(1, 4 * pp):
            if not stages.takes(schedule, pp, n, micro_batches):
                with pytest.raises(ValueError, match="microbatches"):
                    torchs(schedule, pp, micro_batches)
            elif n > pp:  # torch places several stages of a rank itself
                placed = torchs(schedule, pp, micro_batches).stage_index_to_group_rank
                assert placed == {i: stages.owner(i, pp, schedule) for i in range(n)}
            else:
                torchs(schedule, pp, micro_batches)


def torchs(schedule: str, pp: int, micro_batches: int) -> Any:
    """torch's schedule on the first of pp ranks, of stages that are only asked what a schedule asks before it runs."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind, n = get_schedule_class(schedule), pp * STAGES_PER_RANK[schedule]
    asked: dict[str, Any] = {"num_stages": n, "group_size": pp, "group_rank": 0, "has_backward": True, "submod": None}
    mine = [SimpleNamespace(stage_index=i, is_last=i == n - 1, **asked) for i in range(n) if stages.owner(i, pp, schedule) == 0]
    make: Any = kind
    return make(mine[0] if issubclass(kind, PipelineScheduleSingle) else mine, n_microbatches=micro_batches)


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "said"),
    [
        ("1F1B", 4, 2, "at least 4, one for each stage; a step has 2\n    Nearest: training.global_batch_size = 12."),
        ("DualPipeV", 2, 3, "at least 4, one for each stage; a step has 3\n    Nearest: training.global_batch_size = 12."),
        ("Interleaved1F1B", 4, 9, "divides into 2 equal rounds (of at least pp 4); a step has 9\n    Nearest: training.global"),
        ("Interleaved1F1B", 4, 9, "global_batch_size = 24 or 30."),
    ],
)
def test_micro_batches_that_cannot_be_are_told_with_the_nearest(schedule: str, pp: int, micro_batches: int, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        stages.check_micro_batches(schedule, pp, pp * STAGES_PER_RANK[schedule], micro_batches, sequences=3)
    assert said in str(caught.value)


TIMES = {"FORWARD": 1.0, "FULL_BACKWARD": 2.0}


def waiting(order: dict[int, list[Any]], pp: int, n: int) -> float:
    """The idle share of a pipeline whose ranks do their actions in this order, each as soon as what it needs is there.

    Sending takes no time.
    """
    queues = {
        rank: [a for a in actions if a is not None and a.computation_type.name in TIMES] for rank, actions in order.items()
    }
    done: dict[tuple[str, int, int], float] = {}
    clock = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        began = len(done)
        for rank, queue in queues.items():
            while queue:
                kind, i, micro_batch = queue[0].computation_type.name, queue[0].stage_index, queue[0].microbatch_index
                before = i - 1 if kind == "FORWARD" else i + 1
                needs = [(kind, before, micro_batch)] if 0 <= before < n else []
                needs += [("FORWARD", i, micro_batch)] if kind == "FULL_BACKWARD" else []
                if any(need not in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + TIMES[kind]
                done[kind, i, micro_batch] = clock[rank]
                queue.pop(0)
        assert len(done) > began, "the order never ends"
    return 1 - sum(TIMES[kind] for kind, _, _ in done) / (pp * max(clock.values()))


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_the_bubble_is_that_of_torchs_order_of_micro_batches(schedule: str) -> None:
    for pp in (2, 4):
        n = pp * STAGES_PER_RANK[schedule]
        for micro_batches in (1, pp - 1, pp, 3 * pp):
            made = torchs(schedule, pp, micro_batches)
            order = made._get_pipeline_order() if n == pp else made.pipeline_order
            said = stages.bubble(schedule, pp, n, micro_batches)
            assert said.startswith(f"{waiting(order, pp, n):.0%}".replace("%", " %")), (pp, micro_batches, said)


def test_the_bubble_in_words() -> None:
    assert stages.bubble("1F1B", 4, 4, 8) == "27 % = (pp 4 - 1) / (8 micro-batches + pp 4 - 1)"
    assert stages.bubble("Interleaved1F1B", 4, 8, 8) == "16 % = (pp 4 - 1) / (2 stages a rank x 8 micro-batches + pp 4 - 1)"
    assert "1 micro-batches for 4 ranks; a larger training.global_batch_size" in stages.bubble("GPipe", 4, 4, 1)
    assert stages.bubble("ZBVZeroBubble", 4, 8, 8) == ""
