"""Runs a step's micro-batches through the stages of a pipeline, in the order of torch's schedules. Knows no plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titan_cli.config.stages import Stage
from titan_cli.worker import private
from titan_cli.worker.data import Batch


def keep_stage(model: nn.Module, stage: Stage) -> None:
    """Delete from a whole model what other stages own. What stays keeps its names."""
    layers = model.get_submodule("layers")
    for name, _ in list(layers.named_children()):
        if not stage.first <= int(name) < stage.last:
            delattr(layers, name)
    others = (() if stage.embedding else ("tok_embeddings",)) + (() if stage.head else ("norm", "output"))
    for name in others:
        setattr(model, name, None)


class Joined(nn.Module):
    """Several stages of one model under the whole model's names, for what goes through parameters. It is never called."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, child in (named for stage in stages for named in stage.named_children()):
            if name == "layers":
                self.layers.update(dict(child.named_children()))
            else:
                self.add_module(name, child)


class Pipeline:
    """The stages that this rank owns, by number, in one schedule for a fixed number and size of micro-batches.

    `shapes` are those of a micro-batch between stages, (tokens, hidden, logits), on the meta device; they say what requires
    a gradient. `constants`: what the model is told besides its input, the same for every micro-batch.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        n_stages: int,
        mesh: DeviceMesh,
        schedule: str,
        micro_batches: int,
        shapes: tuple[Tensor, Tensor, Tensor],
        constants: Mapping[str, Any],
        loss_sum: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ) -> None:
        tokens, hidden, logits = shapes
        self.tokens = 1  # that the loss is divided by
        self.first, self.last = 0 in stages, n_stages - 1 in stages
        self.stages = [
            # Shapes are given: torch would find them by running the stages once, hooks, compiler and all.
            private.LeanStage(
                module,
                index,
                n_stages,
                device,
                input_args=tokens if index == 0 else hidden,
                output_args=logits if index == n_stages - 1 else hidden,
                group=mesh.get_group(),
            )
            for index, module in sorted(stages.items())
        ]
        for stage in self.stages:
            stage.constants = constants
        kind = get_schedule_class(schedule)
        self.schedule = kind(
            self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages,
            micro_batches,
            loss_fn=lambda logits, labels: loss_sum(logits, labels) / self.tokens,
            scale_grads=False,  # the loss is a sum
        )
        self.micro_batches = micro_batches
        self.device = device

    def backward(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Add the gradients of a step's micro-batches; () the sum of their losses over `tokens`, 0 without the last stage."""
        self.tokens = tokens
        return self._run(self.schedule.step, batches)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """() the sum of the losses of a multiple of `micro_batches` micro-batches, 0 on ranks without the last stage."""
        self.tokens, size = 1, self.micro_batches
        rounds = [batches[first : first + size] for first in range(0, len(batches), size)]
        return torch.stack([self._run(self.schedule.eval, part) for part in rounds]).sum()

    def _run(self, run: Callable[..., Any], batches: Sequence[Batch]) -> Tensor:
        assert len(batches) == self.micro_batches, f"{len(batches)} micro-batches for a schedule of {self.micro_batches}"
        losses: list[Tensor] = []
        # Whole batches, which the schedule cuts again.
        target = torch.cat([batch.labels for batch in batches]) if self.last else None
        inputs = (torch.cat([batch.inputs for batch in batches]),) if self.first else ()
        starts = [batch.starts for batch in batches if batch.starts is not None]
        documents = {"starts": torch.cat(starts)} if starts else {}
        try:
            run(*inputs, target=target, losses=losses, return_outputs=False, **documents)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch says which stage; what happened, and where, is its cause
        for stage in self.stages:
            stage.clear_runtime_states()  # or what was evaluated is kept until the next time
        if not self.last:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach().double() for loss in losses]).sum()
