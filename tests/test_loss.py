"""The loss of logits that are cut by vocabulary: on every rank what one rank computes of whole ones, and never a whole row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from titan_cli.worker.loss import IGNORED, cross_entropy_sum, make_loss

B, T, V = 2, 5, 24


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Whole logits (B, T, V) and labels (B, T), by what is special about them."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=random, dtype=torch.float64)
    labels = torch.randint(V, (B, T), generator=random)
    some = labels.clone()
    some[0, 1:3] = IGNORED
    large = logits.float() * 1e4
    large[0, 0] = torch.linspace(1e38, -1e38, V)
    masked = logits.float()
    masked[..., 3:9] = -torch.inf
    return {
        "float64": (logits, labels),
        "float32": (logits.float(), labels),
        "bfloat16": (logits.bfloat16(), labels),
        "ignored": (logits, some),
        "all ignored": (logits, torch.full_like(labels, IGNORED)),
        "large": (large, large.argmax(-1)),
        "masked": (masked, torch.where((labels >= 3) & (labels < 9), 0, labels)),
    }


def cut_losses(backend: str | None) -> dict[str, dict[str, Any]]:
    """Of every case the loss, the gradient of this rank's columns, and the loss without a graph for backward."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    loss_sum = make_loss(SimpleNamespace(loss_parallel=True), mesh)
    if backend:
        loss_sum = torch.compile(loss_sum, backend=backend, fullgraph=True)
    results = {}
    for name, (whole, labels) in cases().items():
        logits = whole.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
        loss = loss_sum(logits, labels)
        (3 * loss).backward()  # a gradient that is not 1
        with torch.no_grad():
            evaluated = loss_sum(logits, labels)
        results[name] = {"loss": loss.detach(), "gradient": logits.grad, "evaluated": evaluated}
    return results


def check(world: int, ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert len(ranks) == world
    for name, (whole, labels) in cases().items():
        logits = whole.clone().requires_grad_()
        expected = cross_entropy_sum(logits, labels)
        (3 * expected).backward()
        tolerance = {"rtol": 1e-12, "atol": 1e-14} if whole.dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
        for rank in ranks:
            torch.testing.assert_close(rank[name]["loss"], expected.detach(), msg=lambda m, n=name: f"{n}: {m}", **tolerance)
            assert torch.equal(rank[name]["evaluated"], rank[name]["loss"]), name
        gradient = torch.cat([rank[name]["gradient"] for rank in ranks], dim=-1)
        if whole.dtype == torch.bfloat16:
            tolerance = {"rtol": 0.008, "atol": 1e-6}  # the last of 8 bits
        torch.testing.assert_close(gradient, logits.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize("world", [2, 4])
def test_a_cut_loss_and_its_gradient_are_those_of_whole_logits(world: int) -> None:
    check(world, run_ranks(world, cut_losses, None))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_to_one_graph_that_computes_the_same(backend: str) -> None:
    check(2, run_ranks(2, cut_losses, backend))


def test_the_loss_of_whole_logits_is_torchs() -> None:
    logits, labels = cases()["ignored"]
    assert make_loss(SimpleNamespace(loss_parallel=False), None) is cross_entropy_sum  # type: ignore[arg-type]
    torch.testing.assert_close(
        cross_entropy_sum(logits, labels), F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="sum")
    )
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32


class Largest(TorchDispatchMode):
    """The most elements and the most columns of any tensor that an operator makes, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.columns = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                self.columns = max(self.columns, tensor.shape[-1] if tensor.ndim else 1)
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.collectives.append(func.name().partition("::")[2])
        return made


def seen() -> list[tuple[int, int, list[str]]]:
    """(elements, columns, collectives) of forward and of backward."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole, labels = cases()["bfloat16"]
    logits = whole.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
    loss_sum = make_loss(SimpleNamespace(loss_parallel=True), mesh)
    found = []
    with Largest() as largest:
        loss = loss_sum(logits, labels)
    found.append((largest.elements, largest.columns, largest.collectives))
    with Largest() as largest:
        loss.backward()
    return [*found, (largest.elements, largest.columns, largest.collectives)]


def kept_for_backward(backend: str | None) -> dict[torch.dtype, int]:
    """The most elements of one tensor, by type, that forward keeps."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole, labels = cases()["bfloat16"]
    logits = whole.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
    loss_sum = make_loss(SimpleNamespace(loss_parallel=True), mesh)
    if backend:
        loss_sum = torch.compile(loss_sum, backend=backend, fullgraph=True)
    kept: dict[torch.dtype, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.dtype] = max(kept.get(tensor.dtype, 0), tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(logits, labels)
    return kept


def measured() -> tuple[list[tuple[int, int, list[str]]], list[dict[torch.dtype, int]]]:
    return seen(), [kept_for_backward(None), kept_for_backward("aot_eager")]


def test_no_rank_holds_a_whole_row_and_only_the_logits_are_kept() -> None:
    part = B * T * V // 4
    for (forward, backward), all_kept in run_ranks(4, measured):
        assert forward == (part, V // 4, ["all_reduce", "all_reduce"])
        assert backward == (part, V // 4, [])
        for kept in all_kept:
            assert (kept[torch.bfloat16], kept[torch.float32]) == (part, B * T)
