"""The planner: which wrapping, which cures, and what a plan's JSON holds."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from titan_cli.errors import ExitCode
from titan_cli.plan import rules
from titan_cli.plan.cells import CELLS
from titan_cli.plan.explain import cell_facts, known_rule, on_cell
from titan_cli.plan.facts import Facts, parse_version
from titan_cli.plan.names import lookup, matches
from titan_cli.plan.planner import Plan, Refused, judge, make_plan, named
from titan_cli.plan.rules import rule_id

ONE_GPU = Facts(
    family="llama3", blocks=(("dense", 32),), attention="sdpa", tied=False, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1,
    ep=1, pp_schedule="1F1B", sequence_parallel=True, loss_parallel=False, async_tp=False, reshard=True,
    ac_mode="none", ac_option="op",
    float8=False, dtype="bfloat16", loss=True, backend="auto", torch=(2, 13, 0), device="cuda", capability=(9, 0),
    cxx_compiler=True,
)  # fmt: skip
WAIT = {"rule": "tp-embedding-wait", "what": "wait on tok_embeddings output"}


def test_one_gpu_compiles_each_block_and_needs_nothing_else() -> None:
    plan = make_plan(ONE_GPU)
    assert (plan.strategy, plan.backend, plan.loss) == ("block", "inductor", True)
    assert plan.wraps == ({"target": "layers.*", "kind": "dense", "fullgraph": True},)
    assert not plan.cures
    assert not plan.rejected
    assert plan.sentence() == "each block compiled (inductor)"


@pytest.mark.parametrize(("torch", "cured"), [((2, 11, 0), False), ((2, 12, 1), True), ((2, 13, 0), True), ((2, 14, 1), True)])
def test_tensor_parallel_waits_for_the_embedding_where_torch_loses_its_gradient(
    torch: tuple[int, int, int], cured: bool
) -> None:
    plan = make_plan(replace(ONE_GPU, tp=2, torch=torch))
    assert plan.cures == ((WAIT,) if cured else ())


@pytest.mark.parametrize(("torch", "ac"), [((2, 11, 0), "inside"), ((2, 13, 0), "outside"), ((2, 14, 1), "inside")])
def test_full_checkpointing_under_tensor_parallel_moves_outside_on_2_13(torch: tuple[int, int, int], ac: str) -> None:
    plan = make_plan(replace(ONE_GPU, tp=2, ac_mode="full", torch=torch))
    assert (plan.strategy, plan.ac) == ("block", ac)
    assert [r["rule"] for r in plan.rejected] == (["tp-ac-inside"] if ac == "outside" else [])


def test_eager_needs_no_cure() -> None:
    plan = make_plan(replace(ONE_GPU, tp=2), strategy="off")
    assert (plan.wraps, plan.cures, plan.loss) == ((), (), False)
    assert plan.sentence() == "eager"


def test_a_cpu_without_a_compiler_gets_aot_eager_and_is_told_so() -> None:
    plan = make_plan(replace(ONE_GPU, device="cpu", capability=None, cxx_compiler=False))
    assert plan.backend == "aot_eager"
    assert "cpu-without-compiler" in [f["rule"] for f in plan.findings]
    assert make_plan(replace(ONE_GPU, device="cpu", cxx_compiler=False, backend="inductor")).backend == "inductor", (
        "set by the user"
    )


def test_a_strategy_that_a_rule_forbids_is_refused_with_the_next_safe_one() -> None:
    with pytest.raises(Refused) as refused:
        make_plan(ONE_GPU, strategy="whole")
    assert refused.value.code == ExitCode.REFUSED
    assert refused.value.to_json() == {
        "schema": 1,
        "refused": {
            "exit": 3,
            "rule": "whole-fsdp",
            "because": refused.value.because,
            "nearest": "compile.strategy=block",
        },
    }
    forced = make_plan(ONE_GPU, strategy="whole", force=True)
    assert forced.strategy == "whole"
    assert "whole-fsdp forbids it" in forced.notes[0]


def test_a_layout_for_which_nothing_is_safe_is_refused_with_what_to_change() -> None:
    with pytest.raises(Refused) as refused:
        make_plan(replace(ONE_GPU, tied=True, pp=2))
    assert (refused.value.rule, refused.value.nearest) == ("tied-pipeline", "model.tie_embeddings=false")


def test_a_newer_torch_gets_the_newest_plan_and_is_told_so() -> None:
    plan = make_plan(replace(ONE_GPU, tp=2, torch=(2, 15, 0)))
    assert plan.cures == (WAIT,)
    assert "not checked on this version: run titan verify" in plan.notes[0]
    assert not make_plan(replace(ONE_GPU, torch=(2, 14, 9))).notes


@pytest.mark.parametrize("name", CELLS)
def test_a_rule_speaks_on_its_cell_and_without_it_the_plan_is_another(name: str) -> None:
    """Deleting a rule makes its cell fail: nobody else says there what it says."""
    facts, finding = cell_facts(name), on_cell(name)
    strategy = next((o.partition("=")[2] for o in CELLS[name].overrides if o.startswith("compile.strategy=")), "auto")

    def outcome(without: str) -> object:
        try:
            return make_plan(facts, strategy, without=without).to_json()
        except Refused as refused:
            return refused.to_json()

    if finding.verdict == "forbid" and name.startswith("whole-"):  # several forbid it; each is named
        assert name in {rule for w in named(strategy) for rule, _ in judge(facts, w)}
    else:
        assert outcome(without="") != outcome(without=name)
    assert len((known_rule(name).__doc__ or "").split()) > 12
    assert finding.sources


def test_every_rule_has_a_cell() -> None:
    assert [rule_id(rule) for rule in rules.RULES] == list(CELLS)


def random_facts(chance: random.Random) -> Facts:
    """Any layout that the options can express, sensible or not."""
    moe = chance.random() < 0.4
    return Facts(
        family="deepseek_v3" if moe else "llama3",
        blocks=(("dense", chance.randint(0, 3)), ("moe", chance.randint(1, 60)))
        if moe
        else (("dense", chance.randint(1, 80)),),
        attention=chance.choice(("sdpa", "sdpa", "flex")),
        tied=chance.random() < 0.2,
        dp_replicate=chance.choice((1, 1, 2)),
        dp_shard=chance.choice((1, 2, 8, 64)),
        cp=chance.choice((1, 1, 2)),
        tp=chance.choice((1, 2, 8)),
        pp=chance.choice((1, 1, 2, 4)),
        ep=chance.choice((1, 8)) if moe else 1,
        pp_schedule=chance.choice(("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")),
        sequence_parallel=chance.random() < 0.8,
        loss_parallel=chance.random() < 0.3,
        async_tp=chance.random() < 0.2,
        reshard=chance.random() < 0.5,
        ac_mode=chance.choice(("none", "full", "selective")),
        ac_option=chance.choice(("op", "2")),
        float8=chance.random() < 0.2,
        dtype=chance.choice(("bfloat16", "float32", "float64")),
        loss=chance.random() < 0.8,
        backend=chance.choice(("auto", "inductor", "aot_eager")),
        torch=chance.choice(((2, 11, 0), (2, 12, 1), (2, 13, 0), (2, 14, 1), (2, 15, 0))),
        device=(device := chance.choice(("cuda", "cpu"))),
        capability=chance.choice(((8, 0), (8, 9), (9, 0), (10, 0))) if device == "cuda" else None,
        cxx_compiler=chance.random() < 0.8,
    )


def test_any_layout_gets_a_plan_or_a_refusal_and_no_two_rules_disagree() -> None:
    chance, plans, refusals = random.Random(0), 0, 0
    for _ in range(3000):
        facts = random_facts(chance)
        strategy = chance.choice(("auto", "auto", "whole", "block", "submodule", "norm", "off"))
        for wrapping in named(strategy):
            settings: dict[str, object] = {}
            for rule, finding in judge(facts, wrapping):
                for key, value in finding.settings.items():
                    assert settings.setdefault(key, value) == value, f"{rule} sets {key} to {value}, another to {settings[key]}"
        try:
            plan = make_plan(facts, strategy, force=chance.random() < 0.2)
        except Refused as refused:
            refusals += bool(refused.because)
            continue
        plans += 1
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert all(key.startswith(("torch.", "flex.", "ac.", "tp.")) for key in plan.settings), plan.settings
        assert bool(plan.wraps) == (plan.strategy != "off")
        assert not any(f["verdict"] == "forbid" for f in plan.findings) or plan.notes
    assert plans > 1000
    assert refusals > 500


def test_a_plan_survives_json() -> None:
    plan = make_plan(replace(ONE_GPU, tp=2, ac_mode="full"))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_order_of_the_rules_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    for _ in range(200):
        facts, outcomes = random_facts(chance), []
        for _ in range(3):
            monkeypatch.setattr("titan_cli.plan.planner.RULES", chance.sample(rules.RULES, len(rules.RULES)))
            try:
                plan = make_plan(facts)
            except Refused:
                outcomes.append(None)
                continue
            unordered = {name: sorted(getattr(plan, name), key=str) for name in ("findings", "rejected", "cures")}
            outcomes.append({**plan.to_json(), **unordered})
        assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize(("text", "version"), [("2.13.0+cpu", (2, 13, 0)), ("2.14.1", (2, 14, 1)), ("2.15", (2, 15, 0))])
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


def test_a_version_that_is_none_says_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"2\.13\.0"):
        parse_version("main")


def test_a_star_is_one_part_of_a_name() -> None:
    assert matches("layers.3.attention", "layers.*.attention")
    assert not matches("layers.3.attention.wq", "layers.*.attention")
    assert not matches("layers.3.x.attention", "layers.*.attention")
    assert lookup("layers.3.norm", {"norm": "a", "layers.*.norm": "b"}) == "b"
    assert lookup("other", {"norm": "a"}) is None
