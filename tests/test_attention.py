"""Both attention kernels against plain softmax, and document masks against torch's: values, gradients, sizes, graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_cli.models.common.attention import BLOCK, SDPA, Flex, document_mask
from titan_cli.plan.explain import cell_facts
from titan_cli.plan.planner import make_plan
from titan_cli.worker import private
from titan_cli.worker.flex import apply_flex

EAGER_FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(queries: int, keys: int, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the output, for a batch of two."""
    torch.manual_seed(0)
    shapes = ((HEADS, queries), (kv_heads, keys), (kv_heads, keys), (HEADS, queries))
    return [torch.randn(2, heads, length, DIM, dtype=torch.float64).to(dtype) for heads, length in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention as it is defined. visible: (B or 1, Tq, Tk)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1) @ v


def with_gradients(attention: Callable[..., Tensor], given: list[Tensor], mask: object) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = (x.detach().clone().requires_grad_() for x in given[:3])
    out = attention(q, k, v, mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def assert_same(found: list[Tensor], expected: list[Tensor], within: float) -> None:
    for name, a, b in zip(("output", "q", "k", "v"), found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= within * b.double().norm(), name


# SDPA


SQUARE_AND_LAST = [(6, 6), (3, 7), (1, 5)]
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor imports what uses it
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_sdpa_is_causal_attention_of_the_last_positions(dtype: torch.dtype, backend: str) -> None:
    for queries, keys in SQUARE_AND_LAST:
        for kv_heads in (KV_HEADS, HEADS):
            torch._dynamo.reset()
            eager, given = SDPA(), tensors(queries, keys, kv_heads, dtype)
            compiled = torch.compile(eager, backend=backend, fullgraph=True, dynamic=False)
            visible = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
            expected = with_gradients(plain, [x.double() for x in given], visible[None])
            for kernel in (eager, compiled):
                assert_same(with_gradients(kernel, given, None), expected, WITHIN[dtype])


def test_the_workers_kernel_for_the_last_positions_takes_what_flash_does_not() -> None:
    given, ours, torchs = tensors(3, 7), SDPA(), SDPA()
    ours.last = private.attend_last
    assert_same(with_gradients(ours, given, None), with_gradients(torchs, given, None), within=0.0)


# Document masks


def packed(*sequences: tuple[int, ...]) -> Tensor:
    """Where each token's document starts, (B, T), from the documents' lengths."""
    return torch.stack(
        [torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)]) for lengths in sequences]
    )


PACKED = {
    "one document": packed((300,), (300,)),
    "on the borders of tiles": packed((128, 256), (384,)),
    "beside them": packed((127, 130, 127), (129, 127, 128)),
    "shorter than tiles": packed((5, 1, 60, 234), (299, 1)),
    "of one tile": packed((40, 50), (90,)),
    "one by one": packed((1,) * 200, (200,)),
}


def visible_pairs(starts: Tensor, positions: Tensor, length: int) -> Tensor:
    """What a document mask means, (B, Tq, Tk)."""
    keys = torch.arange(length)
    return (keys <= positions[:, None]) & (keys >= starts[..., None])


def as_torch_makes_it(starts: Tensor, positions: Tensor, length: int) -> BlockMask:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= positions[q]) & (k >= starts[b, q])

    return create_block_mask(visible, *starts.shape[:1], 1, starts.shape[1], length, device="cpu", BLOCK_SIZE=BLOCK)


def tiles(counts: Tensor | None, numbers: Tensor | None) -> list[list[set[int]]]:
    """The listed tiles of each row, for each sequence."""
    assert counts is not None
    assert numbers is not None
    return [
        [set(row[:n].tolist()) for n, row in zip(ns.tolist(), rows, strict=True)]
        for ns, rows in zip(counts[:, 0], numbers[:, 0], strict=True)
    ]


def every_list(mask: BlockMask) -> list[list[list[set[int]]]]:
    """Partial and full tiles, by row and by column."""
    return [
        tiles(mask.kv_num_blocks, mask.kv_indices),
        tiles(mask.full_kv_num_blocks, mask.full_kv_indices),
        tiles(mask.q_num_blocks, mask.q_indices),
        tiles(mask.full_q_num_blocks, mask.full_q_indices),
    ]


@pytest.mark.parametrize("name", PACKED)
def test_a_document_mask_has_the_tiles_that_torch_finds_pair_by_pair(name: str) -> None:
    starts = PACKED[name]
    length = starts.shape[1]
    mask, torchs = document_mask(starts), as_torch_makes_it(starts, torch.arange(length), length)
    assert every_list(mask) == every_list(torchs)
    assert (mask.shape, mask.BLOCK_SIZE) == (torchs.shape, torchs.BLOCK_SIZE)


def chunks(length: int, cp: int, rank: int) -> Tensor:
    """Positions of a rank's two chunks, one from the front of the sequence and its mirror image."""
    parts = torch.arange(length).chunk(2 * cp)
    return torch.cat((parts[rank], parts[2 * cp - 1 - rank]))


@pytest.mark.parametrize("length", [512, 600])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_mask_of_two_chunks_allows_exactly_their_pairs(length: int, rank: int) -> None:
    """512: tiles end with chunks, and are torch's. 600: one tile is made of both chunks, and more of it is masked."""
    positions = chunks(length, 2, rank)
    starts = packed((100, 250, length - 350), (length,))[:, positions]
    mask, torchs = document_mask(starts, positions, length), as_torch_makes_it(starts, positions, length)
    if length == 512:
        assert every_list(mask) == every_list(torchs)
    b, q, k = torch.meshgrid(*(torch.arange(n) for n in (2, len(positions), length)), indexing="ij")
    partial, full = (
        torch.tensor([[[j in row for j in range(-(-length // BLOCK))] for row in rows] for rows in which])[
            b, q // BLOCK, k // BLOCK
        ]
        for which in every_list(mask)[:2]
    )
    assert not (partial & full).any()
    allowed = full | (partial & mask.mask_mod(b, torch.zeros(()), q, k))
    assert allowed.equal(visible_pairs(starts, positions, length))


def test_a_long_mask_is_made_of_tiles_never_of_pairs() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))])
            return out

    length = 32768
    starts = (torch.arange(length) // 5000 * 5000)[None]
    with Watch():
        mask = document_mask(starts)
    per_side = length // BLOCK
    assert mask.kv_indices.shape == (1, 1, per_side, per_side)
    assert largest <= per_side * (per_side + 1)


# FlexAttention


def test_flex_on_a_cpu_is_refused_but_where_it_is_allowed() -> None:
    q, k, v, _ = (x.requires_grad_() for x in tensors(8, 8))
    flex, mask = torch.compile(Flex(), backend="aot_eager"), document_mask(packed((8,), (8,)))
    with private.allow_flex_on_cpu():
        flex(q, k, v, mask).sum().backward()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        flex(q, k, v, mask)


@EAGER_FLEX
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
@pytest.mark.parametrize("name", ["beside them", "of one tile"])
def test_flex_is_attention_within_documents(name: str, kv_heads: int) -> None:
    starts = PACKED[name]
    length = starts.shape[1]
    given, visible = tensors(length, length, kv_heads), visible_pairs(starts, torch.arange(length), length)
    with private.allow_flex_on_cpu():
        found = with_gradients(Flex(), given, document_mask(starts))
    assert_same(found, with_gradients(plain, given, visible), 1e-12)


@EAGER_FLEX
def test_the_queries_of_two_chunks_attend_as_in_the_whole_sequence() -> None:
    length, cp = 300, 3
    starts = packed((70, 200, 30), (300,))
    given = tensors(length, length)
    whole = with_gradients(plain, given, visible_pairs(starts, torch.arange(length), length))
    out, *gradients = (torch.zeros_like(x) for x in whole)
    with private.allow_flex_on_cpu():
        for rank in range(cp):
            at = chunks(length, cp, rank)
            mine = [given[0][:, :, at], given[1], given[2], given[3][:, :, at]]
            out[:, :, at], gradients[0][:, :, at], dk, dv = with_gradients(
                Flex(), mine, document_mask(starts[:, at], at, length)
            )
            gradients[1] += dk
            gradients[2] += dv
    assert_same([out, *gradients], whole, 1e-12)


class Block(nn.Module):
    """What is compiled as a whole around a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Flex()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return self.kernel(q.tanh(), k, v, mask).sin()


def plain_block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return plain(q.tanh(), k, v, visible).sin()


def test_one_graph_serves_every_mask_and_reads_the_one_it_is_given() -> None:
    """The documents are other ones in each micro-batch; a graph that held those of the first would be silently wrong."""
    counter = CompileCounterWithBackend("aot_eager")
    block = torch.compile(Block().forward, backend=counter, fullgraph=True)
    given = tensors(200, 200)
    with private.allow_flex_on_cpu():
        for border in (1, 64, 127, 128, 199):
            starts = packed((border, 200 - border), (200 - border, border))
            expected = with_gradients(plain_block, given, visible_pairs(starts, torch.arange(200), 200))
            assert_same(with_gradients(block, given, document_mask(starts)), expected, 1e-12)
    assert counter.frame_count == 1


# FlexAttention compiled alone


ALONE = make_plan(cell_facts("flex-by-op"), strategy="off")
ran: list[str] = []  # what happened, in order: a graph was made, compiled code was called


@torch._dynamo.register_backend(name="counting")
def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    ran.append("made")
    compiled = private.backend("aot_eager")(module, inputs)

    def called(*args: Any) -> Any:
        ran.append("called")
        return compiled(*args)

    return called


def test_a_plan_that_compiles_blocks_leaves_flex_as_it_is() -> None:
    model = nn.ModuleList((Block(), Block()))
    apply_flex(model, make_plan(cell_facts("flex-by-op"), strategy="block"))
    assert {block.kernel.flex for block in model} == {flex_attention}


def test_flex_alone_is_one_compiled_object_for_all_blocks() -> None:
    model = nn.ModuleList((Block(), Block()))
    apply_flex(model, ALONE)
    kernels = {block.kernel.flex for block in model}
    assert len(kernels) == 1
    assert flex_attention not in kernels


@pytest.mark.parametrize(("backend", "options"), [("inductor", {"wrap_inductor_compiled_regions": True}), ("aot_eager", None)])
def test_only_inductor_is_asked_to_make_flex_one_operator(
    backend: str, options: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **words: told.append(words) or function)
    apply_flex(Block(), replace(ALONE, backend=backend))
    assert [words["options"] for words in told] == [options]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_flex_alone_is_compiled_under_operator_level_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/torchtitan#1631: there it ran eager, with a warning, which torch gives once and these tests take as an error."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_WARNINGS_SHOWN", set())
    model = nn.ModuleList((Block(), Block()))
    apply_flex(model, replace(ALONE, backend="counting"))
    starts, given = packed((50, 150), (200,)), tensors(200, 200)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def two_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        for block in model:
            q = checkpoint(block, q, k, v, mask, use_reentrant=False, context_fn=contexts)
        return q

    def plain_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return plain_block(plain_block(q, k, v, visible), k, v, visible)

    ran.clear()
    with private.allow_flex_on_cpu():
        found = with_gradients(two_blocks, given, document_mask(starts))
    assert ran == ["made", *["called"] * 4]  # each block in forward, and again in backward
    assert_same(found, with_gradients(plain_blocks, given, visible_pairs(starts, torch.arange(200), 200)), 1e-12)
