"""Each rule's smallest cell: the smallest configuration, and the torch, for which the rule has something to say. Data only.

The rule's page shows what it says there, tests hold it to that, and verifying a cell with and without the rule shows
whether a torch still needs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A preset with overrides, for one torch."""

    preset: str
    overrides: tuple[str, ...]
    torch: str = "2.13.0"

    @property
    def command(self) -> str:
        return " ".join(("titan explain-compile --preset", self.preset, *self.overrides, "--torch", self.torch))


_TP = "parallelism.tp=2"
_ASYNC = "parallelism.async_tp=true"
_FLEX = "model.attention=flex"
_ZERO_BUBBLE = ("parallelism.pp=2", "parallelism.pp_schedule=ZBVZeroBubble")
_FOUR_STAGES = "model.n_layers=4"  # a block for each
_AC = "activation_checkpoint.mode=full"
_BY_OP = "activation_checkpoint.mode=selective"

CELLS = {
    "whole-fsdp": Cell("llama3-debug", ("compile.strategy=whole",)),
    "whole-tp-embedding": Cell("llama3-debug", ("compile.strategy=whole", _TP)),
    "whole-selective-ac": Cell("llama3-debug", ("compile.strategy=whole", _BY_OP)),
    "tp-embedding-wait": Cell("llama3-debug", (_TP,)),
    "tp-ac-inside": Cell("llama3-debug", (_TP, _AC)),
    "async-tp-needs-inductor": Cell("llama3-8b-2d", (_ASYNC, "compile.backend=aot_eager")),
    "async-tp-without-tp": Cell("llama3-1b", (_ASYNC,)),
    "async-tp-needs-cuda": Cell("llama3-debug", (_TP, _ASYNC, "compile.backend=inductor", "training.dtype=bfloat16")),
    "async-tp-needs-sequence-parallel": Cell("llama3-8b-2d", (_ASYNC, "parallelism.sequence_parallel=false")),
    "async-tp-needs-bfloat16": Cell("llama3-8b-2d", (_ASYNC, "training.dtype=float32")),
    "async-tp-fusion": Cell("llama3-8b-2d", (_ASYNC,)),
    "nested-experts-ac-inside": Cell("dsv3-debug-ep", (_AC,), "2.11.0"),
    "nested-experts-by-op-outside": Cell("dsv3-debug-ep", (_BY_OP,), "2.11.0"),
    "nested-experts-break": Cell("dsv3-debug-ep", (), "2.11.0"),
    "moe-scalar-outputs": Cell("dsv3-debug-ep", ()),
    "ac-side-effects": Cell("dsv3-debug-ep", (_AC,)),
    "ac-lru-cache": Cell("llama3-debug", (_AC,)),
    "flex-on-cpu": Cell("llama3-debug", (_FLEX,)),
    "flex-alone": Cell("llama3-1b", (_FLEX, "compile.strategy=off")),
    "flex-by-op": Cell("llama3-1b", (_FLEX, "compile.strategy=off", _BY_OP)),
    "split-backward-compiled": Cell("llama3-debug", (_FOUR_STAGES, *_ZERO_BUBBLE), "2.11.0"),
    "split-backward-donated": Cell("llama3-debug", (_FOUR_STAGES, *_ZERO_BUBBLE)),
    "split-backward-by-op": Cell("llama3-debug", (*_ZERO_BUBBLE, "model.n_layers=4", _BY_OP, "compile.strategy=off")),
    "split-backward-flex": Cell("llama3-8b-1d", ("parallelism.dp_shard=4", *_ZERO_BUBBLE, _FLEX)),
    "tied-pipeline": Cell("llama3-debug", ("parallelism.pp=2", "model.tie_embeddings=true")),
    "replicate-by-fsdp": Cell("llama3-debug", ("parallelism.dp_replicate=2",)),
    "context-parallel": Cell("llama3-debug", ("parallelism.cp=2",)),
    "float8-capability": Cell("llama3-debug", ("float8.enable=true",)),
    "float8-needs-compile": Cell("llama3-8b-1d", ("float8.enable=true", "compile.strategy=norm")),
    "float8-ac-rounding": Cell("llama3-8b-1d", ("float8.enable=true", _AC)),
    "recompile-limit": Cell("dsv3-debug-ep", ()),
    "leaf-modules": Cell("llama3-debug", ("compile.strategy=norm",)),
    "cpu-without-compiler": Cell("llama3-debug", ("compile.backend=auto",)),
}
