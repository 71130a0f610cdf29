"""The presets for hundreds of GPUs, on the first and the last rank of a world in which this process is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fake_world import Built, Seen, alone, full, look, reduced
from titan_cli.config.stages import Stage
from titan_cli.models.llama3.tp_plan import CUT_DIM, TP_PLAN
from titan_cli.plan import fit


@pytest.fixture(scope="module", params=["llama3-70b-2d", "llama3-70b-3d", "llama3-405b-4d"])
def preset(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def seen(preset: str) -> list[Seen]:
    """Rank 0, which has the first stage, and the last rank, which has the last one (each has another stage too)."""
    return [alone(look, preset, rank) for rank in (0, full(preset).world.world_size - 1)]


def test_the_reduced_plan_is_the_full_one_but_for_the_device(preset: str) -> None:
    gpu, cpu = full(preset).plan, reduced(preset).plan
    assert (gpu.device, gpu.backend) == ("cuda", "inductor")
    assert replace(cpu, device="cuda", backend="inductor", capability=gpu.capability) == gpu


def test_the_first_and_the_last_stage_are_seen(preset: str, seen: list[Seen]) -> None:
    stages = full(preset).world.stages
    first, last = (sorted(rank.built) for rank in seen)
    assert (first[0], last[-1]) == (0, len(stages) - 1)
    assert len(first) == len(last) == len(stages) // full(preset).world.pp


def test_at_full_size_each_parameter_is_cut_as_the_fit_says(preset: str, seen: list[Seen]) -> None:
    """The fit speaks of rank 0; at these sizes everything divides, so it holds for the last rank too."""
    target = full(preset)
    for index, stage, built in each_stage(preset, seen):
        expected = {
            name: (shape, fit.local_shape(name, shape, target.world, TP_PLAN, CUT_DIM))
            for name, shape in target.model.shapes().items()
            if stage.holds(name)
        }
        assert built.parameters == expected, f"stage {index}"
        assert built.dtypes == {"torch.float32"}


def test_at_full_size_each_block_is_wrapped_and_each_cut_hooked(preset: str, seen: list[Seen]) -> None:
    target = full(preset)
    for index, stage, built in each_stage(preset, seen):
        blocks = [f"layers.{number}" for number in range(stage.first, stage.last)]
        assert built.blocks == blocks, f"stage {index}"
        units = {"", *blocks, *(["tok_embeddings"] * stage.embedding), *(["norm", "output"] * stage.head)}
        assert built.units == units, f"stage {index}"
        assert built.hooked == units | cut_modules(stage), f"stage {index}"
        assert built.waiting == ({"tok_embeddings"} if stage.embedding and target.plan.cures else set())
        kernels = {f"{block}.attention.kernel" for block in blocks} if target.world.cp > 1 else set()
        assert built.replaced == {*blocks, *kernels}, f"stage {index}"


def test_reduced_every_gradient_is_there_and_alive(preset: str, seen: list[Seen]) -> None:
    target = reduced(preset)
    for rank in seen:
        stages = [target.world.stages[index] for index in rank.built]
        assert rank.trained.parameters == {n for n in target.model.shapes() if any(stage.holds(n) for stage in stages)}
        assert rank.trained.without_gradient == set()
        assert rank.trained.dead == ()


def test_reduced_every_block_is_compiled_once(preset: str, seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.trained.faults == ()
        assert rank.trained.compiled == 2 * len(rank.built)
        assert rank.trained.recompiled == []


def each_stage(preset: str, seen: list[Seen]) -> list[tuple[int, Stage, Built]]:
    stages = full(preset).world.stages
    return [(index, stages[index], built) for rank in seen for index, built in rank.built.items()]


def cut_modules(stage: Stage) -> set[str]:
    """The modules of the stage that TP_PLAN names."""
    blocks = [str(number) for number in range(stage.first, stage.last)]
    names = {pattern.replace("*", block) for pattern in TP_PLAN if "*" in pattern for block in blocks}
    return names | {name for name in TP_PLAN if "*" not in name and stage.holds(name)}
