"""The shipped presets: each loads, says its hardware, and the tests' twins are comparable."""

import pytest
import tomli

from titan_cli import hardware
from titan_cli.config import derive, dump, presets
from titan_cli.config.layers import load
from titan_cli.config.schema import Config
from titan_cli.launch import checks
from titan_cli.plan.target import build


@pytest.mark.parametrize("name", presets.names())
def test_preset_loads_and_resolves_without_a_machine(name: str) -> None:
    config = load(name).config
    resolved = derive.resolve(config, visible_gpus=0)
    assert resolved.world_size == resolved.dp * resolved.cp * resolved.tp * resolved.pp


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_can_be_trained_but_those_of_deepseek(name: str) -> None:
    assert bool(derive.not_trained_yet(load(name).config)) == name.startswith("dsv3-")


@pytest.mark.parametrize("name", presets.names())
def test_first_line_says_the_hardware(name: str) -> None:
    hardware = presets.hardware(presets.find(name))
    assert any(word in hardware for word in ("CPU", "GPU", "H100"))
    assert len(hardware) <= 40  # a column of `titan presets ls`


@pytest.mark.parametrize("name", presets.names())
def test_preset_states_only_what_differs(name: str) -> None:
    stated = tomli.loads(presets.find(name).read_text())
    defaults = dump.values(Config())
    same = [f"{s}.{k}" for s, table in stated.items() if s != "extends" for k, v in table.items() if defaults[f"{s}.{k}"] == v]
    # Presets for several GPUs state nodes, GPUs and kind together; 1000 steps are said where their tokens are counted.
    assert set(same) <= {"launch.nodes", "training.steps"}


@pytest.mark.parametrize("name", [n for n in presets.names() if n.startswith("llama3-debug-")])
def test_debug_twins_differ_only_in_parallelism_and_launch(name: str) -> None:
    tests_model, twin = (dump.values(load(n).config) for n in ("llama3-debug", name))
    differing = {key.partition(".")[0] for key in twin if twin[key] != tests_model[key] and key != "model.attention"}
    assert differing <= {"parallelism", "launch"}
    assert (twin["model.attention"] == "flex") == name.endswith("-flex")


def test_the_tests_model_with_experts_has_the_same_recipe() -> None:
    tests_model, experts = (dump.values(load(n).config) for n in ("llama3-debug", "dsv3-debug-ep"))
    differing = {key for key in experts if experts[key] != tests_model[key]}
    assert differing == {"model.family", "parallelism.dp_shard", "parallelism.ep"}


@pytest.mark.parametrize(
    ("name", "world", "accumulation"),
    [
        ("debug", 1, 1),
        ("llama3-debug", 1, 4),
        ("llama3-debug-2d", 4, 2),
        ("llama3-debug-hsdp", 4, 1),
        ("llama3-debug-cp", 2, 4),
        ("llama3-debug-pp", 2, 4),
        ("llama3-debug-3d", 4, 4),
        ("llama3-debug-4d", 8, 4),
        ("llama3-debug-flex", 1, 4),
        ("llama3-1b", 1, 64),
        ("llama3-8b-1d", 8, 8),
        ("llama3-8b-2d", 8, 16),
        ("llama3-8b-flex", 8, 8),
        ("llama3-8b-long", 8, 4),
        ("llama3-70b-2d", 256, 16),
        ("llama3-70b-3d", 256, 64),
        ("llama3-405b-4d", 512, 128),
        ("dsv3-debug-ep", 4, 1),
        ("dsv3-16b-ep", 8, 4),
    ],
)
def test_the_arithmetic_of_the_comments(name: str, world: int, accumulation: int) -> None:
    resolved = derive.resolve(load(name).config, visible_gpus=0)
    assert (resolved.world_size, resolved.gradient_accumulation_steps) == (world, accumulation)


def test_debug_is_a_thousand_tokens_a_step() -> None:
    training = load("debug").config.training
    assert training.seq_len * training.local_batch_size == 1024


def test_half_a_million_tokens_a_step() -> None:
    for name in ("llama3-1b", "llama3-8b-1d", "llama3-8b-2d", "llama3-8b-flex", "llama3-8b-long", "dsv3-16b-ep"):
        training = load(name).config.training
        assert training.seq_len * (training.global_batch_size or 0) == 2**19, name


@pytest.mark.parametrize(("name", "tokens"), [("llama3-70b-2d", 2**22), ("llama3-70b-3d", 2**22), ("llama3-405b-4d", 2**24)])
def test_millions_of_tokens_a_step(name: str, tokens: int) -> None:
    training = load(name).config.training
    assert training.seq_len * (training.global_batch_size or 0) == tokens


def test_interleaved_stages_pay_where_they_are_used() -> None:
    for name, waits, would in (("llama3-70b-3d", "2 %", "4 %"), ("llama3-405b-4d", "6 %", "10 %")):
        bubbles = [
            derive.resolve(load(name, overrides=overrides).config, visible_gpus=0).rules["pipeline_bubble"]
            for overrides in ([], ["parallelism.pp_schedule=1F1B"])
        ]
        assert [bubble.partition(" = ")[0] for bubble in bubbles] == [waits, would], name


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0", "2.14.1"])
@pytest.mark.parametrize("name", presets.names())
def test_a_preset_fits_its_hardware_and_lacks_nothing_but_it(name: str, torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ())
    target = build(name, None, [], torch)
    assert checks.memory(target) == []
    lacking = [problem.what for problem in checks.not_yet(target)]
    assert [what for what in lacking if "one machine only" not in what and not name.startswith("dsv3-")] == []
    assert any("one machine only" in what for what in lacking) == (target.config.launch.nodes > 1)


# GiB of states by the comments' arithmetic: bytes a parameter x parameters / ranks.
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("llama3-8b-long", 8.03e9 * 16 / 8 / 2**30),
        ("llama3-70b-2d", 70.6e9 * 16 / 256 / 2**30),
        ("llama3-70b-3d", 2.25e9 * (12 / 8 + 6) / 2**30),
        ("llama3-405b-4d", 3.19e9 * (12 / 4 + 6) / 2**30),
    ],
)
def test_the_states_of_the_comments(name: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ())
    assert build(name, None, []).states.total / 2**30 == pytest.approx(gib, rel=0.01)


def test_debug_spreads_over_the_gpus_that_are_there() -> None:
    assert derive.resolve(load("debug").config, visible_gpus=8).dp_shard == 8


def test_the_same_layout_without_a_network() -> None:
    config = load("llama3-8b-2d", overrides=["data.source=python-stdlib", "tokenizer.name=titan"]).config
    assert derive.resolve(config, visible_gpus=0).world_size == 8
