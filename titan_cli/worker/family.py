"""The model that a configuration names, whole and on the meta device, and as the family's config says. Knows no layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titan_cli.config import families, imports
from titan_cli.config.derive import model_config
from titan_cli.config.schema import Config
from titan_cli.errors import ExitCode, TitanError
from titan_cli.models.common.attention import SDPA, Flex
from titan_cli.models.common.decoder import Decoder


def make_model(config: Config) -> tuple[Any, Mapping[str, str]]:
    """The nn.Module of `families.Model`, and the family's TP_PLAN.

    Raises TitanError (refused) if the module is not what its family says, or cannot do what the configuration asks for.
    """
    family, dimensions = families.find(config.model.family), model_config(config)
    with torch.device("meta"):
        make = imports.load(f"{family.package}.model").MODEL
        model = make(dimensions, config.training.seq_len, config.model.attention)
    if faults := [*_parts(model, dimensions), *_kernels(model, config)]:
        message = "\n".join(f"{family.package}.model: {fault}" for fault in faults)
        raise TitanError(message, f"{families.GUIDE}.", ExitCode.REFUSED)
    return model, family.tp_plan


def _parts(model: nn.Module, dimensions: Decoder) -> list[str]:
    """Where the module is not what was planned for, or lacks what the worker needs."""
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = dimensions.shapes()
    names = [name for name in {**planned, **found} if found.get(name) != planned.get(name)]
    faults = [f"{n} is {found.get(n, 'missing')}, and in the config {planned.get(n, 'missing')}" for n in names[:4]]
    if len(names) > 4:
        faults.append(f"and {len(names) - 4} other parameters are not as in the config")
    faults += [f"there is no method {name}" for name in ("init_std", "init_buffers") if not hasattr(model, name)]
    kinds = [kind for kind, count in dimensions.block_kinds() for _ in range(count)]
    if not names and [getattr(block, "kind", None) for block in model.get_submodule("layers").children()] != kinds:
        faults.append(f"each block must have its kind, one of {', '.join(dict.fromkeys(kinds))}, as the attribute `kind`")
    return faults


def _kernels(model: nn.Module, config: Config) -> list[str]:
    """What the attention kernels, which are found by their classes, cannot do."""
    kinds = {type(module) for module in model.modules()}
    faults = []
    if config.model.attention == "flex" and Flex not in kinds:
        faults.append("model.attention=flex, but there is no models.common.attention.Flex in it")
    if config.parallelism.cp > 1 and not kinds & {SDPA, Flex}:
        faults.append(f"parallelism.cp={config.parallelism.cp} needs a kernel of models.common.attention, SDPA or Flex")
    return faults
