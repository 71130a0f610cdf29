"""Compiles FlexAttention on its own where a plan leaves the blocks around it eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from titan_cli.models.common.attention import Flex
from titan_cli.plan.planner import Plan


def apply_flex(model: nn.Module, plan: Plan) -> None:
    """Give every Flex of the model a compiled kernel if the plan says so; a block that is compiled brings its own.

    Settings: "flex.compile" (default False), and "flex.wrap_inductor_compiled_regions" (default False): let the compiled
    kernel be one operator, which selective checkpointing can see and keep. Inductor's; other backends have no kernel to wrap.
    """
    if not plan.settings.get("flex.compile", False):
        return
    wrap = plan.backend == "inductor" and plan.settings.get("flex.wrap_inductor_compiled_regions", False)
    options: dict[str, Any] | None = {"wrap_inductor_compiled_regions": True} if wrap else None
    # One for all kernels: each compiled object would trace, guard and hold the same graph again.
    compiled = torch.compile(flex_attention, backend=plan.backend, options=options, fullgraph=True, dynamic=False)
    for module in model.modules():
        if isinstance(module, Flex):
            module.flex = compiled
