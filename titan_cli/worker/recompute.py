"""Activation checkpointing: which blocks run again in backward, and whether whole or without their costly operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_cli.plan.facts import is_checkpointed
from titan_cli.plan.planner import Plan
from titan_cli.worker import private

# What torch asks at the start of each checkpointed call: what surrounds its forward, and what its recomputation.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten = torch.ops.aten
# A linear layer is mm on CPU and CUDA, with a bias addmm; some backends keep linear whole (torchtitan#2445).
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default)


def checkpoint_blocks(blocks: Sequence[tuple[str, nn.Module]], plan: Plan) -> None:
    """Wrap the forward of each block that the plan checkpoints. `blocks`: (full name "layers.7", module), called positionally.

    mode full: every block whole. selective "N": every N-th block whole. selective "op": every block, but the results of
    its costly operators are kept.
    """
    contexts = keep_costly(plan.settings) if plan.ac_option == "op" else None
    for name, block in blocks:
        if is_checkpointed(int(name.rpartition(".")[2]), plan.ac_mode, plan.ac_option):
            block.forward = checkpointed(block.forward, contexts)


def checkpointed(forward: Callable[..., Any], contexts: Contexts | None = None) -> Callable[..., Any]:
    """`forward` that keeps its inputs (and what `contexts` keep) and runs again in backward. Nothing in a block is random.

    A closure around the bound method, which Dynamo traces into, and no wrapper module, which would rename parameters.
    """
    if contexts is None:

        def whole(*args: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

        return whole

    def by_operator(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return by_operator


def keep_costly(settings: Mapping[str, Any]) -> Contexts:
    """Contexts of checkpointed calls that keep what is costly, by the plan's settings, and compute the rest again."""
    kept = costly(settings)
    return lambda: create_selective_checkpoint_contexts(make_policy(kept))


def costly(settings: Mapping[str, Any]) -> frozenset[Any]:
    """The operators, beside matmuls, whose results are expensive to compute and small to hold.

    Attention; what collectives reduce or exchange; the router's topk, which may choose others the second time
    (torchtitan#3146). Not what an all-gather makes: it is as large as the whole sequence, and backward can gather it again;
    nor abs, as large as the weight whose scale float8 looks for (torchtitan#820); nor waiting: for what has arrived it is free.

    Setting: "ac.save_inductor_compiled_code" (default False).
    """
    kept = private.attention_kernels() | private.exchanges() | {aten.topk.default}
    if settings.get("ac.save_inductor_compiled_code", False):
        kept |= {private.inductor_compiled_code()}
    return kept


def make_policy(kept: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    """What torch asks for each operator of one checkpointed call: `kept`, copies to the host, and matmuls but every 2nd.

    Matmuls are counted apart in recomputation, where torch 2.11 asks again, so that both decide alike.
    """
    matmuls: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in MATMULS:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:  # the host waits for a copy, and would wait again (torchtitan#1672)
            keep = operator in kept or private.is_copy_to_host(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
