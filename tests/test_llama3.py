"""Llama 3's model: its names and sizes, its numbers against transformers, its start, and that its blocks share a graph."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_cli.models.common import rope
from titan_cli.models.common.attention import SDPA
from titan_cli.models.common.init import ROWS, draw, generator
from titan_cli.models.common.rmsnorm import RMSNorm
from titan_cli.models.llama3.config import FLAVORS, Llama3Config, RopeScaling
from titan_cli.models.llama3.model import Attention, Llama3

TINY = Llama3Config(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=128, rope_theta=10_000.0)
# Short enough that 48 positions see all three bands: pairs kept, interpolated and stretched.
SCALED = replace(TINY, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32))
SEQ_LEN = 48


def tiny(config: Llama3Config = TINY, dtype: torch.dtype = torch.float32, seed: int = 0) -> Llama3:
    model = Llama3(config, SEQ_LEN).to(dtype)
    model.init_weights(seed)
    return model


def tokens(vocab_size: int = TINY.vocab_size, T: int = SEQ_LEN) -> Tensor:
    return torch.randint(vocab_size, (2, T), generator=torch.Generator().manual_seed(1))


# Names, shapes and counts


@pytest.mark.parametrize("flavor", FLAVORS)
def test_parameters_are_those_the_config_promises(flavor: str) -> None:
    with torch.device("meta"):
        model = Llama3(FLAVORS[flavor], seq_len=16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(shapes.items()) == list(FLAVORS[flavor].shapes().items())
    assert list(model.state_dict()) == list(shapes)


@pytest.mark.parametrize(
    ("flavor", "count"),
    [("1b", 1_235_814_400), ("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)],
)
def test_parameter_counts_are_the_published_ones(flavor: str, count: int) -> None:
    assert FLAVORS[flavor].parameter_count() == count


def test_flops_of_8b_by_hand() -> None:
    # 8,030,261,248 parameters, less 128,256 x 4,096 of the embedding: 7,504,924,672, x 6.
    # Attention at 8,192 positions: 6 x 32 layers x 32 heads x (128 + 128) x 8,192 = 12,884,901,888.
    assert FLAVORS["8b"].flops_per_token(8192) == 45_029_548_032 + 12_884_901_888


@pytest.mark.parametrize("tie", [False, True])
def test_flops_are_those_that_torch_counts(tie: bool) -> None:
    config = replace(TINY, tie_embeddings=tie)
    model, ids = tiny(config), tokens()
    # The math kernel: the fused ones recompute the scores in the backward pass, which is work but not the model's.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    # The formula counts every parameter, torch only matmuls: the norms' weights are the difference.
    norms = sum(math.prod(shape) for shape in config.shapes().values() if len(shape) == 1)
    assert counter.get_total_flops() == ids.numel() * (config.flops_per_token(SEQ_LEN) - 6 * norms)


# Numbers


def as_transformers(config: Llama3Config, model: Llama3) -> nn.Module:
    """The same model and weights in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = config.rope_scaling
    rope_parameters: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope_parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    reference: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=SEQ_LEN,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope_parameters,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    reference = reference.to(next(model.parameters()).dtype)
    theirs = {
        "tok_embeddings": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith(("wq.weight", "wk.weight")):
            # Rows of a head from neighbouring pairs (0, 1), (2, 3), ... to first all firsts, then all seconds.
            value = value.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        state[".".join(theirs.get(part, part) for part in name.split("."))] = value
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return reference


def at_unit_scale(model: Llama3) -> Llama3:
    """Weights that make every part of the model matter: the weights of a fresh model hardly move the residual stream."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2 if p.ndim == 1 else p.shape[-1] ** -0.5, generator=generator)
    return model


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [TINY, SCALED], ids=["plain", "scaled"])
def test_logits_equal_transformers(config: Llama3Config, tie: bool) -> None:
    config = replace(config, tie_embeddings=tie)
    model, ids = at_unit_scale(tiny(config)), tokens()
    with torch.no_grad():
        ours, theirs = model(ids), as_transformers(config, model)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [TINY, SCALED], ids=["plain", "scaled"])
def test_float64_logits_equal_transformers(config: Llama3Config, tie: bool) -> None:
    config = replace(config, tie_embeddings=tie)
    model, ids = at_unit_scale(tiny(config, torch.float64)), tokens()
    reference = as_transformers(config, model)
    # Their norm rounds to float32 whatever the model's dtype; torch's own does not, and has the same parameter.
    for name, module in list(reference.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = nn.RMSNorm(config.dim, eps=config.norm_eps, dtype=torch.float64)
            exact.load_state_dict(module.state_dict())
            reference.set_submodule(name, exact)
    with torch.no_grad():
        ours, theirs = model(ids), reference(ids).logits
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_scaled_frequencies_keep_the_fast_and_stretch_the_slow() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    plain, scaled = rope.frequencies(128, 500_000.0), rope.frequencies(128, 500_000.0, scaling)
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    torch.testing.assert_close(scaled[fast], plain[fast], rtol=0, atol=0)
    torch.testing.assert_close(scaled[slow], plain[slow] / 8, rtol=0, atol=0)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_attention_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope.tables(32, rope.frequencies(16, 10_000.0).double())
    turned_q, turned_k = (rope.rotate(x.expand(1, 1, 32, 16), cos, sin)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T  # (T, T)
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_keeps_the_dtype_and_computes_in_float32_or_wider(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = RMSNorm(64, eps=1e-5)(x)
    exact = F.rms_norm(x.double(), (64,), eps=1e-5)
    torch.testing.assert_close(got, exact.to(dtype))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attend_equals_softmax_by_hand(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 8, 16, dtype=torch.float64, generator=generator) for h in (4, kv_heads, kv_heads))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    scores = (q @ wide_k.mT / 4).masked_fill(future, -math.inf)  # 4 = sqrt(16)
    by_hand = scores.softmax(-1) @ wide_v
    out = SDPA()(q, k, v, None)
    torch.testing.assert_close(out, by_hand)
    # Squared, so that the gradient of the softmax is not zero by symmetry.
    got = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(by_hand.square().sum(), inputs))


def test_the_heads_of_two_halves_add_up_to_the_whole() -> None:
    # What tensor parallelism does: rows of wq, wk and wv and columns of wo make an attention with fewer heads.
    generator = torch.Generator().manual_seed(0)
    whole = Attention(TINY, "sdpa").double()
    x = torch.randn(2, SEQ_LEN, TINY.dim, dtype=torch.float64, generator=generator)
    cos, sin = rope.tables(SEQ_LEN, rope.frequencies(TINY.head_dim, TINY.rope_theta))
    parts = []
    for half in range(2):
        part = Attention(TINY, "sdpa").double()
        for name, weight in whole.named_parameters():
            cut = weight.detach().chunk(2, dim=1 if name == "wo.weight" else 0)[half]
            part.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(cut)
        parts.append(part(x, cos, sin))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, cos, sin))


def test_a_shorter_sequence_gives_the_first_logits() -> None:
    model, ids = at_unit_scale(tiny(dtype=torch.float64)), tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :17]), model(ids)[:, :17], rtol=1e-12, atol=1e-12)


def test_more_positions_than_the_tables_have_are_refused() -> None:
    with pytest.raises(AssertionError, match="49 positions, but the rotary tables end at seq_len 48"):
        tiny()(tokens(T=49))


# The start


def test_weights_follow_from_the_seed() -> None:
    first, again, other = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    for (name, p), q, r in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p, r) or p.ndim == 1, name


def test_a_parameter_starts_alike_in_every_model_that_has_it() -> None:
    # A stage of a pipeline has fewer layers, a float64 model rounds differently, a model on meta was built elsewhere.
    whole = dict(tiny().named_parameters())
    with torch.device("meta"):
        staged = Llama3(TINY, SEQ_LEN)
    del staged.layers["0"]
    staged = staged.double().to_empty(device="cpu")
    staged.init_weights(seed=0)
    for name, p in staged.named_parameters():
        assert torch.equal(p, whole[name].double()), name


def test_the_seed_of_a_name_is_fixed() -> None:
    # Golden: the hash and torch's CPU generator are the same on every platform, or a resumed run starts anew elsewhere.
    assert generator(0, "norm.weight", 0).initial_seed() == 3_277_593_117


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 300), slice(ROWS, 2 * ROWS), slice(599, 600), slice(600, 600)])
def test_some_rows_are_drawn_as_they_are_in_the_whole(rows: slice) -> None:
    shape = torch.Size((600, 3))
    assert torch.equal(draw(1, "w", shape, 0.02, rows), draw(1, "w", shape, 0.02)[rows])


@pytest.mark.parametrize("tie", [False, True])
def test_the_first_loss_is_that_of_a_guess(tie: bool) -> None:
    config = replace(FLAVORS["debug"], tie_embeddings=tie)
    model = Llama3(config, seq_len=128)
    model.init_weights(seed=0)
    ids = tokens(config.vocab_size, 129)
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert math.log(config.vocab_size) < loss < math.log(config.vocab_size) + 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_after_to_empty_are_those_of_a_model_built_in_place(dtype: torch.dtype) -> None:
    built = Llama3(SCALED, SEQ_LEN)
    with torch.device("meta"):
        model = Llama3(SCALED, SEQ_LEN)
    model = model.to(dtype).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(math.nan)
    model.init_buffers()
    assert [name for name, _ in model.named_buffers()] == ["rope_cos", "rope_sin"]
    for got, expected in zip(model.buffers(), built.buffers(), strict=True):
        assert torch.equal(got, expected.to(dtype))


# Compiled


# Dynamo looks at the .grad of the block's input and mutes torch's warning by not showing it, too late for an error filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_graph_serves_all_blocks_and_names_stay() -> None:
    model, ids = tiny(), tokens()
    names = list(model.state_dict())
    model(ids).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    first = model.layers["0"]
    first(model.tok_embeddings(ids), model.rope_cos, model.rope_sin)
    # From here on every new graph is an error, so the other blocks run the first one's.
    with torch.compiler.set_stance("fail_on_recompile"):
        model(ids).sum().backward()
    assert list(model.state_dict()) == names
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)
