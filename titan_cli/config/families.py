"""Model families: titan's own, and a user's package by its import path. Knows of each only what needs no torch.

PACKAGE.config   FLAVORS: {"name": a models.common.decoder.Decoder}
PACKAGE.tp_plan  TP_PLAN: {"module pattern": style}, the styles being those of models/llama3/tp_plan.py
PACKAGE.model    MODEL: called as MODEL(config, seq_len, attention), it gives a `Model`; imported by workers alone
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from titan_cli.config import imports
from titan_cli.errors import ExitCode, TitanError
from titan_cli.models.common.decoder import Decoder
from titan_cli.models.deepseek_v3 import config as deepseek_v3
from titan_cli.models.llama3 import config as llama3
from titan_cli.models.llama3.tp_plan import CUT_DIM

if TYPE_CHECKING:
    from torch import Tensor, nn

FLAVORS: Mapping[str, Mapping[str, Decoder]] = {"llama3": llama3.FLAVORS, "deepseek_v3": deepseek_v3.FLAVORS}

GUIDE = "docs/add-a-model.md says what a family provides"


class Model(Protocol):
    """What the worker uses of a model, an nn.Module that is built on the meta device and knows one device only.

    A stage of a pipeline keeps what it owns: of `tok_embeddings`, `norm` and `output` it has None instead of a module, and
    of `layers` fewer. Keys and values go through a module of models.common.attention, SDPA or Flex, where context
    parallelism finds them.
    """

    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict  # "0", "1" ...: blocks, with an attribute `kind`, which is "dense", and called positionally
    norm: nn.Module | None
    output: nn.Module | None

    def forward(
        self, x: Tensor, starts: Tensor | None = None, positions: Tensor | None = None, length: int | None = None
    ) -> Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T); for a stage: (B, T, dim) from the stage before, and for the one after.

        `length` is always given: tokens in the whole sequence, which x does not show in later stages. Where they matter:
        starts (B, T), with attention "flex", where the document of each token begins; positions (T,) of these tokens in the
        sequence, with context parallelism.
        """

    def init_std(self, name: str) -> float | None:
        """Standard deviation of the initial values of the parameter `name`; None: they are all 1."""

    def init_buffers(self) -> None:
        """Compute all buffers, in place, on whatever device they are."""


@dataclass(frozen=True)
class Family:
    """What the front and the worker ask of a family. `package` is its import path."""

    package: str
    flavors: Mapping[str, Decoder]
    tp_plan: Mapping[str, str]
    cut_dim: Mapping[str, int | None]  # the dimension of a weight that each style cuts


def find(name: str) -> Family:
    """The family that `model.family` names. Raises TitanError for one that is not there, or not complete."""
    if name in FLAVORS:
        package = f"titan_cli.models.{name}"
        cuts = import_module(f"{package}.tp_plan")
        return Family(package, FLAVORS[name], cuts.TP_PLAN, cuts.CUT_DIM)
    if _module(name) is None:
        packages = [path.parent.name for path in Path.cwd().glob("*/config.py")]
        near = difflib.get_close_matches(name, [*FLAVORS, *packages], n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        message = (
            f"model.family: titan has no family {name}, and there is no package {name} in {Path.cwd()} or on Python's path"
        )
        raise TitanError(message, f"{meant}titan has {', '.join(FLAVORS)}; {GUIDE}.")
    flavors, tp_plan = _table(f"{name}.config", "FLAVORS"), _table(f"{name}.tp_plan", "TP_PLAN")
    for flavor, config in flavors.items():
        if not isinstance(config, Decoder) or {kind for kind, _ in config.block_kinds()} != {"dense"}:
            what = f'{name}.config: FLAVORS["{flavor}"] is no titan_cli.models.common.decoder.Decoder with "dense" blocks only'
            raise TitanError(what, f"{GUIDE}.", ExitCode.REFUSED)
    return Family(name, flavors, tp_plan, CUT_DIM)


def _table(module: str, name: str) -> Mapping[str, Any]:
    """The mapping `name` of a user's module. Raises TitanError (refused) if either is missing."""
    loaded = _module(module)
    found = getattr(loaded, name, None)
    if not isinstance(found, Mapping):
        what = f"{module} has no {name} (a dict)" if loaded else f"there is no {module}"
        raise TitanError(what, f"{GUIDE}.", ExitCode.REFUSED)
    return found


def _module(name: str) -> ModuleType | None:
    """A module of the user's, None if there is none. Raises TitanError (refused) if it fails, or imports torch."""
    waited = "torch" in sys.modules
    try:
        module = imports.load(name) if imports.find(name) else None
    except Exception as error:  # it is the user's code
        why = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise TitanError(why, f"see {imports.place(error)}; {GUIDE}", ExitCode.REFUSED) from error
    if "torch" in sys.modules and not waited:
        raise TitanError(
            f"{name} imports torch, and no command that plans may wait for that",
            f"move what needs torch to PACKAGE.model, which workers import; {GUIDE}",
            ExitCode.REFUSED,
        )
    return module
