"""Learning rate, weight decay groups and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titan_cli.config.schema import LrSchedule, Optimizer
from titan_cli.worker.optim import build_optimizer, clip_gradients, learning_rate

COSINE = LrSchedule(name="cosine", warmup_steps=10, min_share=0.1)
WSD = LrSchedule(name="wsd", warmup_steps=10, decay_share=0.2, min_share=0.0)


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        (COSINE, 1, 0.1),  # a tenth of the warm-up
        (COSINE, 10, 1.0),
        (COSINE, 55, 0.55),  # half way: half of what lies above the floor, and the floor
        (COSINE, 100, 0.1),
        (COSINE, 200, 0.1),  # beyond the end it stays
        (WSD, 10, 1.0),
        (WSD, 80, 1.0),
        (WSD, 90, 0.5),
        (WSD, 100, 0.0),
    ],
)
def test_the_rate_at_a_step(schedule: LrSchedule, step: int, share: float) -> None:
    assert learning_rate(step, 100, 2.0, schedule) == pytest.approx(2.0 * share)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_a_run_shorter_than_its_warm_up_only_warms_up(name: str) -> None:
    schedule = LrSchedule.model_validate({"name": name, "warmup_steps": 50})
    rates = [learning_rate(step, 10, 1.0, schedule) for step in range(1, 11)]
    assert rates == pytest.approx([step / 50 for step in range(1, 11)])


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(1, 1000, 1.0, LrSchedule(warmup_steps=0)) == pytest.approx(1.0, rel=1e-4)


def test_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    optimizer = build_optimizer(model, Optimizer(lr=0.5, weight_decay=0.2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    matrix, vector = (p.detach() for p in model.parameters())
    torch.testing.assert_close(matrix, before[0] * (1 - 0.5 * 0.2))
    assert torch.equal(vector, before[1])


def test_clipping_scales_all_gradients_together() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.full((2,), 4.0)
    norm = clip_gradients(model, 1.0)
    assert float(norm) == pytest.approx((4 * 9 + 2 * 16) ** 0.5)
    assert float(model.weight.grad[0, 0] / model.bias.grad[0]) == pytest.approx(3 / 4)
    total = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    assert total == pytest.approx(1.0, rel=1e-4)
