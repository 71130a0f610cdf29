"""DeepSeek-V3 without torch: its published counts, the names and cuts of its parameters, and what it refuses."""

from dataclasses import replace
from math import gcd, prod

import pytest

from titan_cli.config.derive import Resolved, resolve
from titan_cli.config.layers import load
from titan_cli.models.deepseek_v3.config import FLAVORS, DeepSeekV3Config
from titan_cli.models.deepseek_v3.tp_plan import CUT_DIM, TP_PLAN
from titan_cli.models.llama3.config import FLAVORS as LLAMA3
from titan_cli.plan import fit
from titan_cli.plan.names import lookup, matches

DEBUG, V2_LITE, V3 = FLAVORS["debug"], FLAVORS["16b"], FLAVORS["671b"]


def world(*overrides: str) -> Resolved:
    return resolve(load(overrides=["model.family=deepseek_v3", "launch.gpu=cpu", *overrides]).config, visible_gpus=0)


def local(config: DeepSeekV3Config, name: str, *overrides: str) -> tuple[int, ...]:
    return fit.local_shape(name, config.shapes()[name], world(*overrides), TP_PLAN, CUT_DIM)


# Counts


def test_parameter_counts_are_the_published_ones() -> None:
    assert V2_LITE.parameter_count() == 15_706_484_224
    # The published checkpoint also counts what balances the 256 experts of 58 blocks; here it is a buffer.
    assert V3.parameter_count() + 58 * 256 == 671_026_419_200


def test_active_counts_are_the_published_ones() -> None:
    assert V2_LITE.active_parameter_count() == 2_451_435_008  # "2.4B"
    assert V3.active_parameter_count() == 36_625_603_584  # "37B", 36.6B to a place more


def test_a_tied_matrix_is_counted_once_and_is_active() -> None:
    tied = replace(V2_LITE, tie_embeddings=True)
    assert tied.parameter_count() == V2_LITE.parameter_count() - 102_400 * 2048
    assert tied.active_parameter_count() == V2_LITE.active_parameter_count()


def test_flops_of_16b_by_hand() -> None:
    # 2,451,435,008 active parameters x 6, and attention at 4,096 positions:
    # 6 x 27 layers x 16 heads x (128 + 64 + 128) x 4,096 = 3,397,386,240.
    assert V2_LITE.flops_per_token(4096) == 14_708_610_048 + 3_397_386_240


def test_flops_grow_with_the_experts_a_token_sees_not_with_those_there_are() -> None:
    one_more = replace(V2_LITE, top_k=7).flops_per_token(1) - V2_LITE.flops_per_token(1)
    assert one_more == 6 * 26 * 3 * 2048 * 1408
    doubled = replace(V2_LITE, n_experts=128).flops_per_token(1) - V2_LITE.flops_per_token(1)
    assert doubled == 6 * 26 * 64 * 2048  # rows of the routers


def test_kinds_of_blocks() -> None:
    assert DEBUG.block_kinds() == (("dense", 1), ("moe", 2))
    assert V3.block_kinds() == (("dense", 3), ("moe", 58))
    assert LLAMA3["8b"].block_kinds() == (("dense", 32),)


# Names and shapes


def test_names_and_shapes_of_a_dense_block_without_a_query_latent() -> None:
    shapes = {k.removeprefix("layers.0."): v for k, v in V2_LITE.shapes().items() if k.startswith("layers.0.")}
    assert list(shapes.items()) == [
        ("attention_norm.weight", (2048,)),
        ("attention.wq.weight", (16 * 192, 2048)),
        ("attention.wkv_a.weight", (512 + 64, 2048)),
        ("attention.kv_norm.weight", (512,)),
        ("attention.wkv_b.weight", (16 * 256, 512)),
        ("attention.wo.weight", (2048, 16 * 128)),
        ("ffn_norm.weight", (2048,)),
        ("feed_forward.w1.weight", (10944, 2048)),
        ("feed_forward.w2.weight", (2048, 10944)),
        ("feed_forward.w3.weight", (10944, 2048)),
    ]


def test_names_and_shapes_of_a_block_of_experts_with_a_query_latent() -> None:
    shapes = {k.removeprefix("layers.60."): v for k, v in V3.shapes().items() if k.startswith("layers.60.")}
    assert list(shapes.items()) == [
        ("attention_norm.weight", (7168,)),
        ("attention.wq_a.weight", (1536, 7168)),
        ("attention.q_norm.weight", (1536,)),
        ("attention.wq_b.weight", (128 * 192, 1536)),
        ("attention.wkv_a.weight", (512 + 64, 7168)),
        ("attention.kv_norm.weight", (512,)),
        ("attention.wkv_b.weight", (128 * 256, 512)),
        ("attention.wo.weight", (7168, 128 * 128)),
        ("ffn_norm.weight", (7168,)),
        ("moe.router.gate.weight", (256, 7168)),
        ("moe.experts.w1", (256, 2048, 7168)),
        ("moe.experts.w2", (256, 7168, 2048)),
        ("moe.experts.w3", (256, 2048, 7168)),
        ("moe.shared_experts.w1.weight", (2048, 7168)),
        ("moe.shared_experts.w2.weight", (7168, 2048)),
        ("moe.shared_experts.w3.weight", (2048, 7168)),
    ]


def test_shared_experts_are_one_wide_feed_forward() -> None:
    assert V2_LITE.shapes()["layers.1.moe.shared_experts.w1.weight"] == (2 * 1408, 2048)


def test_the_ends_of_the_model() -> None:
    names = list(DEBUG.shapes())
    assert (names[0], names[-2:]) == ("tok_embeddings.weight", ["norm.weight", "output.weight"])
    assert "output.weight" not in replace(DEBUG, tie_embeddings=True).shapes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 must be even"),
        ({"n_dense_layers": 4}, "n_dense_layers 4 must not exceed n_layers 3"),
        ({"n_expert_groups": 3}, "n_experts 8 must be a multiple of n_expert_groups 3"),
        ({"n_limited_groups": 5}, "n_limited_groups 5 must not exceed n_expert_groups 4"),
        ({"top_k": 5}, "top_k 5 is more than the 4 experts of n_limited_groups 2"),
    ],
)
def test_sizes_that_do_not_fit(change: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(DEBUG, **change)  # type: ignore[arg-type]


# Cuts


def test_every_parameter_has_a_style_and_every_style_a_dimension() -> None:
    holders = {name.rpartition(".")[0] for config in FLAVORS.values() for name in config.shapes()}
    assert [name for name in holders if lookup(name, TP_PLAN) is None] == []
    assert set(TP_PLAN.values()) <= set(CUT_DIM)


def test_no_line_of_the_plan_is_dead() -> None:
    parts = [name.split(".") for config in FLAVORS.values() for name in config.shapes()]
    modules = {".".join(p[:depth]) for p in parts for depth in range(1, len(p))}
    assert [pattern for pattern in TP_PLAN if not any(matches(name, pattern) for name in modules)] == []


@pytest.mark.parametrize("config", FLAVORS.values(), ids=FLAVORS)
def test_a_degree_that_divides_the_tp_sizes_divides_all_that_tp_cuts(config: DeepSeekV3Config) -> None:
    degree = gcd(*config.tp_sizes().values())
    styles = {name: lookup(name.rpartition(".")[0], TP_PLAN) for name in config.shapes()}
    cut = {name: CUT_DIM[style] for name, style in styles.items() if style and style != "experts"}
    assert degree > 1
    assert [name for name, dim in cut.items() if dim is not None and config.shapes()[name][dim] % degree] == []


def test_heads_are_cut_by_tp_latents_are_not() -> None:
    tp = "parallelism.tp=2"
    assert local(DEBUG, "layers.0.attention.wq_b.weight", tp) == (4 * 48 // 2, 64)
    assert local(DEBUG, "layers.0.attention.wq_a.weight", tp) == (64, 128)
    assert local(DEBUG, "layers.0.attention.wkv_a.weight", tp) == (48, 128)
    assert local(DEBUG, "layers.0.attention.wo.weight", tp) == (128, 4 * 32 // 2)


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ([], (8, 96, 128)),
        (["parallelism.dp_shard=4"], (2, 96, 128)),
        (["parallelism.dp_shard=4", "parallelism.ep=2"], (2, 96, 128)),
        (["parallelism.dp_shard=4", "parallelism.ep=4"], (2, 96, 128)),
        (["parallelism.dp_shard=2", "parallelism.tp=2", "parallelism.ep=4"], (2, 96, 128)),
        (["parallelism.dp_shard=2", "parallelism.tp=2"], (2, 96, 128)),
        (["parallelism.dp_shard=2", "parallelism.cp=2", "parallelism.ep=2"], (2, 96, 128)),
        (["parallelism.dp_replicate=2", "parallelism.dp_shard=4", "parallelism.ep=4"], (2, 96, 128)),
        (["parallelism.dp_shard=16", "parallelism.ep=8"], (1, 48, 128)),  # two ranks hold the same expert: half its rows each
        (["parallelism.dp_shard=16"], (8, 6, 128)),
    ],
)
def test_experts_are_cut_among_ep_and_then_among_all_other_ranks(overrides: list[str], shape: tuple[int, ...]) -> None:
    assert local(DEBUG, "layers.1.moe.experts.w1", *overrides) == shape


def test_context_parallel_ranks_share_what_is_not_an_expert_too() -> None:
    assert local(DEBUG, "norm.weight", "parallelism.dp_shard=2", "parallelism.cp=2") == (128 // 4,)


def test_states_of_16b_on_eight_gpus() -> None:
    config = load("dsv3-16b-ep").config
    states = fit.states(V2_LITE.shapes(), resolve(config, visible_gpus=0), TP_PLAN, CUT_DIM, "bfloat16")
    assert all(shape[0] % 8 == 0 for shape in V2_LITE.shapes().values())
    assert states.total == 16 * sum(map(prod, V2_LITE.shapes().values())) // 8
    assert states.sentence().endswith("= 29.26 GiB on each device")
