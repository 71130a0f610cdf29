"""Ranks, degrees and batch: which rule gives each number, and what is said when a sum does not come out."""

import itertools
from dataclasses import fields

import pytest

from titan_cli.config.derive import Resolved, layout, model_config, not_trained_yet, resolve
from titan_cli.config.families import FLAVORS
from titan_cli.config.layers import load
from titan_cli.config.schema import Config, Model
from titan_cli.errors import TitanError
from titan_cli.models.deepseek_v3.config import DeepSeekV3Config

DEEPSEEK = "model.family=deepseek_v3"


def config(*overrides: str) -> Config:
    return load(overrides=overrides).config


def resolved(*overrides: str, visible_gpus: int = 0) -> Resolved:
    return resolve(config(*overrides), visible_gpus)


def problems(*overrides: str, visible_gpus: int = 0) -> str:
    with pytest.raises(TitanError) as caught:
        resolved(*overrides, visible_gpus=visible_gpus)
    assert caught.value.code == 2
    assert caught.value.hint
    return caught.value.message


def test_one_process_without_a_gpu() -> None:
    r = resolved()
    assert (r.nodes, r.ranks_per_node, r.world_size, r.dp_shard, r.dp, r.global_batch_size) == (1, 1, 1, 1, 1, 1)
    assert r.gradient_accumulation_steps == 1
    assert list(map(str, r.stages)) == ["embedding, layers.0 .. 1, head"]
    assert set(r.rules) == {"ranks_per_node", "dp_shard", "global_batch_size", "gradient_accumulation_steps"}


def test_auto_takes_all_visible_gpus() -> None:
    r = resolved("parallelism.tp=2", "training.local_batch_size=3", visible_gpus=8)
    assert (r.ranks_per_node, r.world_size, r.tp, r.dp_shard, r.dp, r.global_batch_size) == (8, 8, 2, 4, 4, 12)
    assert r.rules["ranks_per_node"] == "8 = the visible GPUs (launch.gpus_per_node = auto)"
    assert r.rules["dp_shard"] == "4 = 1 x 8 ranks = 8 / (dp_replicate 1 x cp 1 x tp 2 x pp 1)"
    assert r.rules["global_batch_size"] == "12 = local_batch_size 3 x data-parallel ranks 4"


def test_auto_on_cpu_is_the_product_of_the_fixed_degrees() -> None:
    for gpu, visible in [("cpu", 8), ("auto", 0), ("H100-80", 0)]:
        r = resolved(f"launch.gpu={gpu}", "parallelism.tp=2", "parallelism.dp_shard=3", visible_gpus=visible)
        assert (r.ranks_per_node, r.world_size) == (6, 6)
    assert resolved("launch.gpu=cpu", "parallelism.tp=2", visible_gpus=8).world_size == 2  # dp_shard = -1 counts 1


def test_auto_on_cpu_shares_the_product_among_the_nodes() -> None:
    r = resolved("launch.nodes=2", "parallelism.tp=2", "parallelism.dp_shard=2")
    assert (r.nodes, r.ranks_per_node, r.world_size) == (2, 2, 4)


def test_a_number_of_ranks_is_taken_as_it_is() -> None:
    r = resolved("launch.gpus_per_node=4", "launch.nodes=2", "parallelism.dp_replicate=2", visible_gpus=1)
    assert (r.world_size, r.dp_replicate, r.dp_shard, r.dp) == (8, 2, 4, 8)
    assert "ranks_per_node" not in r.rules


def test_only_derived_values_have_a_rule() -> None:
    r = resolved("launch.gpus_per_node=2", "parallelism.dp_shard=2", "training.global_batch_size=8")
    assert set(r.rules) == {"gradient_accumulation_steps"}
    assert r.gradient_accumulation_steps == 4
    assert r.rules["gradient_accumulation_steps"] == "4 = global_batch_size 8 / (local_batch_size 1 x data-parallel ranks 2)"


def test_a_pipeline_says_how_its_stages_came_out_and_how_long_a_rank_waits() -> None:
    r = resolved("model.flavor=8b", "training.seq_len=8192", "parallelism.pp=2", "training.global_batch_size=4")
    assert list(map(str, r.stages)) == ["embedding, layers.0 .. 16", "layers.17 .. 31, head"]
    assert r.rules["stages"] == "17, 15 blocks: balanced by FLOPs at seq_len 8192, the costliest 1.00 x the mean"
    assert r.rules["pipeline_bubble"] == "20 % = (pp 2 - 1) / (4 micro-batches + pp 2 - 1)"
    told = resolved("parallelism.pp=2", "parallelism.pp_layers=[2, 0]", "training.global_batch_size=4")
    assert [stage.last - stage.first for stage in told.stages] == [2, 0]
    assert "stages" not in told.rules


def test_micro_batches_that_would_do_without_a_pipeline_are_fine_with_gpipe() -> None:
    assert resolved("parallelism.pp=2", "parallelism.pp_schedule=GPipe").rules["pipeline_bubble"].startswith("50 %: 1 micro")


def test_degrees_always_multiply_to_the_world() -> None:
    for nodes, gpus, replicate, shard, tp in itertools.product((1, 2), (1, 2, 4), (1, 2), (-1, 1, 2, 4), (1, 2)):
        overrides = [
            f"launch.nodes={nodes}", f"launch.gpus_per_node={gpus}", f"parallelism.dp_replicate={replicate}",
            f"parallelism.dp_shard={shard}", f"parallelism.tp={tp}",
        ]  # fmt: skip
        fits = nodes * gpus % (replicate * tp) == 0 if shard == -1 else nodes * gpus == replicate * shard * tp
        if fits:
            r = resolved(*overrides)
            assert r.world_size == nodes * gpus == r.dp_replicate * r.dp_shard * r.tp
        else:
            assert f"{nodes} x {gpus} ranks = {nodes * gpus}" in problems(*overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["launch.gpus_per_node=8", "parallelism.dp_shard=2", "parallelism.tp=2"],
            "tp 2 x pp 1 = 4, but 1 x 8 ranks = 8\n    Set parallelism.dp_shard=4, or launch.gpus_per_node=4.",
        ),
        (
            ["launch.gpus_per_node=3", "parallelism.dp_shard=2", "parallelism.tp=2"],
            "    Set degrees that multiply to 3, or launch.gpus_per_node=4.",
        ),
        (
            ["launch.gpus_per_node=3", "parallelism.tp=2"],
            "1 x 3 ranks = 3 is not a multiple of 2\n    Choose degrees whose product divides 3, or launch.gpus_per_node=2.",
        ),
        (
            ["launch.gpus_per_node=4", "parallelism.ep=3"],
            "parallelism.ep = 3 does not divide dp_shard x cp x tp = 4\n    ep can be 1, 2, 4.",
        ),
        (
            ["training.global_batch_size=10", "training.local_batch_size=4"],
            "global_batch_size = 10 is not a multiple of local_batch_size 4 x data-parallel ranks 1 = 4\n    Nearest: 8 or 12.",
        ),
        (["training.global_batch_size=2", "training.local_batch_size=4"], "    Nearest: 4."),
        (
            ["parallelism.tp=3"],
            "tp = 3 does not divide n_heads 4, n_kv_heads 2, vocab_size 4096, training.seq_len 2048\n    tp can be 1, 2",
        ),
        (["parallelism.tp=2", "training.seq_len=63"], "parallelism.tp = 2 does not divide training.seq_len 63"),
        (["model.flavor=debag"], "unknown flavor debag of llama3\n    Did you mean debug? There are debug, 1b, 8b, 70b, 405b."),
        (["model.n_heads=3"], "dim 128 must be n_heads 3"),
        (["model.n_kv_heads=3"], "n_heads 4 must be a multiple of n_kv_heads 3"),
        (
            ["model.v_head_dim=3", "model.top_k=1"],
            "model.v_head_dim, model.top_k: llama3 has no such dimension\n    It has dim, n_layers, vocab_size,",
        ),
        ([DEEPSEEK, "model.n_kv_heads=2"], "model.n_kv_heads: deepseek_v3 has no such dimension\n    It has dim, n_layers,"),
        ([DEEPSEEK, "model.flavor=16"], "unknown flavor 16 of deepseek_v3\n    Did you mean 16b? There are debug, 16b, 671b."),
        ([DEEPSEEK, "model.top_k=9"], "top_k 9 is more than the 4 experts"),
        (
            [DEEPSEEK, "parallelism.tp=8"],
            "tp = 8 does not divide n_heads 4\n    tp can be 1, 2, 4 with these sizes.",
        ),
        (
            [DEEPSEEK, "parallelism.tp=3"],
            "tp = 3 does not divide n_heads 4, vocab_size 4096, training.seq_len 2048\n",
        ),
        (
            [DEEPSEEK, "model.flavor=16b", "parallelism.tp=3"],
            "n_heads 16, n_shared_experts x moe_ffn_dim 2816, vocab_size 102400,",
        ),
        (
            [DEEPSEEK, "parallelism.dp_shard=6", "parallelism.ep=6"],
            "parallelism.ep = 6 does not divide n_experts 8\n    ep can be 1, 2, 4, 8.",
        ),
        (["parallelism.dp_shard=2", "parallelism.ep=2"], "parallelism.ep = 2, but llama3 has no experts\n    ep can be 1."),
        (
            ["parallelism.cp=3", "training.seq_len=64"],
            "cp = 3: training.seq_len 64 does not divide into 2 x 3 chunks, two for each rank\n    cp can be 1, 2, 4, 8, 16,",
        ),
        (
            ["parallelism.cp=2", "training.seq_len=63"],
            "into 2 x 2 chunks, two for each rank\n    cp can be 1 with this length.",
        ),
        (
            ["model.flavor=8b", "parallelism.cp=4", "parallelism.tp=4", "training.seq_len=24"],  # 8 chunks of 3 tokens
            "parallelism.tp = 4 does not divide training.seq_len / cp 4 = 6\n    tp can be 1, 2 with these sizes.",
        ),
        (["parallelism.pp=3"], "parallelism.pp = 3 with 1F1B makes 3 stages, and the model has 2 blocks\n    pp can be 1 to 2"),
        (["parallelism.pp=2", "parallelism.pp_layers=[1]"], "pp_layers has 1 stages, and pp 2 with 1F1B has 2\n"),
        (["parallelism.pp_layers=[1]"], "pp_layers adds up to 1 blocks, and the model has 2\n"),
        (
            ["parallelism.pp=2", "parallelism.dp_shard=3", "training.local_batch_size=2"],
            "needs micro-batches, at least 2, one for each stage; a step has 1\n    Nearest: training.global_batch_size = 12.",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_numbers_and_a_fix(overrides: list[str], said: str) -> None:
    assert said in problems(*overrides)


def test_all_that_does_not_fit_is_told_together() -> None:
    message = problems("launch.gpus_per_node=4", "parallelism.dp_shard=3", "parallelism.tp=5")
    assert "= 15, but 1 x 4 ranks = 4" in message
    assert "tp = 5 does not divide" in message
    message = problems("parallelism.pp=2", "parallelism.cp=3", "parallelism.pp_layers=[3]", "training.seq_len=64")
    assert "two for each rank" in message
    assert "pp_layers has 1 stages" in message
    assert "pp_layers adds up to 3 blocks" in message
    message = problems("training.global_batch_size=3", "training.local_batch_size=2", "model.flavor=9b")
    assert "Nearest: 2 or 4" in message
    assert "unknown flavor" in message


def test_more_warmup_than_steps_is_fine() -> None:
    assert resolved("training.steps=5", "lr_schedule.warmup_steps=50").world_size == 1


def test_resolving_does_not_touch_the_config() -> None:
    c = config("parallelism.tp=2")
    before = c.model_dump()
    resolve(c, visible_gpus=8)
    assert c.model_dump() == before


def test_the_model_takes_only_the_dimensions_that_are_set() -> None:
    assert model_config(config("model.flavor=8b")).dim == 4096
    m = model_config(config("model.flavor=8b", "model.n_layers=2", "model.tie_embeddings=true", "model.norm_eps=1e-6"))
    assert (m.n_layers, m.tie_embeddings, m.norm_eps, m.dim, m.vocab_size) == (2, True, 1e-6, 4096, 128_256)


def test_the_model_of_the_other_family() -> None:
    m = model_config(
        config(DEEPSEEK, "model.flavor=671b", "model.n_layers=4", "model.q_lora_rank=0", "model.score_func=softmax")
    )
    assert isinstance(m, DeepSeekV3Config)
    assert (m.q_lora_rank, m.score_func, m.dim, m.route_scale) == (0, "softmax", 7168, 2.5)


@pytest.mark.parametrize("family", FLAVORS)
def test_every_dimension_of_a_model_can_be_set(family: str) -> None:
    dimensions = {field.name for flavor in FLAVORS[family].values() for field in fields(flavor)}
    assert dimensions - set(Model.model_fields) <= {"rope_scaling"}  # a table of its own, which the flavor decides


def test_a_sequence_that_is_not_cut_need_not_divide() -> None:
    assert resolved("parallelism.tp=2", "training.seq_len=63", "parallelism.sequence_parallel=false").tp == 2


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        (DEEPSEEK, "model.family=llama3"),
        ("float8.enable=true", "float8.enable=false"),
        ("parallelism.ep=2", "parallelism.ep=1"),
    ],
)
def test_what_cannot_be_trained_yet(override: str, instead: str) -> None:
    (sentence,) = not_trained_yet(config(override))
    assert "can be planned, not trained yet" in sentence
    assert sentence.endswith(f"{instead} can")


@pytest.mark.parametrize(
    "override",
    [
        "parallelism.tp=2",
        "parallelism.sequence_parallel=false",
        "parallelism.loss_parallel=true",
        "parallelism.async_tp=true",
        "parallelism.cp=2",
        "parallelism.pp=2",
        "model.attention=flex",
        "activation_checkpoint.mode=full",
        "activation_checkpoint.mode=selective",
    ],
)
def test_what_can_be_trained_is_not_refused(override: str) -> None:
    assert not_trained_yet(config(override)) == []


def test_all_that_cannot_be_trained_is_told_together() -> None:
    assert len(not_trained_yet(config(DEEPSEEK, "parallelism.ep=2"))) == 2


@pytest.mark.parametrize(
    ("overrides", "phrase"),
    [
        ([], "dp_shard all visible GPUs"),
        (["launch.gpu=cpu"], "1 rank"),
        (["launch.gpus_per_node=8", "parallelism.tp=2"], "dp_shard 4 x tp 2"),
        (["launch.nodes=2", "launch.gpus_per_node=4", "parallelism.dp_replicate=2"], "dp_replicate 2 x dp_shard 4"),
        ([DEEPSEEK, "launch.gpus_per_node=8", "parallelism.tp=2", "parallelism.ep=8"], "dp_shard 4 x tp 2, ep 8"),
    ],
)
def test_layout_in_one_phrase(overrides: list[str], phrase: str) -> None:
    assert layout(config(*overrides)) == phrase
