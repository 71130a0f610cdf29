"""The planner: which wrapping, which cures, and what a plan's JSON holds."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from titan_cli.errors import ExitCode, TitanError
from titan_cli.plan import rules
from titan_cli.plan.facts import Facts, parse_version
from titan_cli.plan.names import lookup, matches
from titan_cli.plan.planner import CANDIDATES, Plan, make_plan

ONE_GPU = Facts(
    family="llama3", blocks=(("dense", 32),), attention="sdpa", dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1,
    ac_mode="none", dtype="bfloat16", loss=True, backend="auto", torch=(2, 13, 0), device="cuda", capability=(9, 0),
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
    plan = make_plan(replace(ONE_GPU, device="cpu", cxx_compiler=False))
    assert plan.backend == "aot_eager"
    assert [f["rule"] for f in plan.findings] == ["cpu-without-compiler"]
    assert make_plan(replace(ONE_GPU, device="cpu", cxx_compiler=False, backend="inductor")).backend == "inductor", (
        "set by the user"
    )


def test_a_strategy_that_is_not_there_yet_is_refused() -> None:
    with pytest.raises(TitanError, match="whole") as refused:
        make_plan(ONE_GPU, strategy="whole")
    assert refused.value.code == ExitCode.REFUSED


def test_a_plan_survives_json() -> None:
    plan = make_plan(replace(ONE_GPU, tp=2, ac_mode="full"))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_order_of_the_rules_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(ONE_GPU, tp=2, ac_mode="full", device="cpu", cxx_compiler=False)
    plans = []
    for order in itertools.permutations(rules.RULES):
        monkeypatch.setattr("titan_cli.plan.planner.RULES", order)
        plan = make_plan(facts)
        plans.append(replace(plan, findings=tuple(sorted(plan.findings, key=lambda f: f["rule"]))))
    assert all(plan == plans[0] for plan in plans)


def test_every_rule_can_speak_and_has_a_page() -> None:
    loud = replace(ONE_GPU, tp=2, ac_mode="full", device="cpu", cxx_compiler=False)
    for rule in rules.RULES:
        found = [f for wrapping in CANDIDATES if (f := rule(loud, wrapping))]
        assert found, rule.__name__
        assert found[0].rule == rule.__name__.replace("_", "-")
        assert len((rule.__doc__ or "").split()) > 30, rule.__name__


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
