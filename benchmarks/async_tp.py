"""Counts what async tensor parallel fuses in the code of one compiled block, on one GPU: the other tp ranks are imagined.

    python benchmarks/async_tp.py                    # Llama 3 8B's block, tp 2, one sequence of 8,192 tokens
    python benchmarks/async_tp.py training.local_batch_size=2 training.global_batch_size=2

A block has two all-gathers and two reduce-scatters in forward, all to be fused, and as many in backward, where only all-gathers
can be (a reduce-scatter there sums several matmuls); checkpointing adds those that run again. Exit 0 if it is so. Collectives
return wrong numbers here, so nothing is said of results or of speed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from titan_cli.models.llama3.model import Llama3
from titan_cli.models.llama3.tp_plan import TP_PLAN
from titan_cli.plan.target import Target, build
from titan_cli.worker import private
from titan_cli.worker.health import CompileWatch
from titan_cli.worker.parallel import build_mesh, master_dtype, materialize, parallelize

TP = 2
LAYOUT = [
    "model.n_layers=1", f"parallelism.tp={TP}", "parallelism.dp_shard=1", "parallelism.async_tp=true",
    f"launch.gpus_per_node={TP}", "launch.gpu=H200-141", "training.global_batch_size=1",
]  # fmt: skip
CHECKPOINTING = ("none", "selective", "full")
FUSED = ("symm_mem.fused_all_gather_matmul.default(", "symm_mem.fused_matmul_reduce_scatter.default(")
PLAIN = ("_c10d_functional.all_gather_into_tensor.default(", "_c10d_functional.reduce_scatter_tensor.default(")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("overrides", nargs="*", help="of the preset llama3-8b-2d")
    args = parser.parse_args()
    private.fake_world(0, TP)
    complete = True
    print(f"torch {torch.__version__}, fused + plain (all-gather, reduce-scatter):")
    for mode in CHECKPOINTING:
        overrides = [*LAYOUT, f"activation_checkpoint.mode={mode}", *args.overrides]
        target = build("llama3-8b-2d", None, overrides)
        forward, *rest = code_of_block(target, torch.device(args.device))
        backward = "\n".join(rest)
        for direction, code in (("forward", forward), ("backward", backward)):
            fused, plain = ([code.count(name) for name in names] for names in (FUSED, PLAIN))
            print(f"  AC {mode:<9} {direction:<8} {fused[0]} + {plain[0]}, {fused[1]} + {plain[1]}", flush=True)
            complete &= (fused, plain) == ([2, 2], [0, 0]) if direction == "forward" else fused[0] >= 2 and plain[0] == 0
    return 0 if complete else 1


def code_of_block(target: Target, device: torch.device) -> list[str]:
    """What inductor makes of forward and backward of a model that is one block, as the worker wraps it."""
    model = one_block(target)
    parallelize(model, build_mesh(target.world, device.type), target.plan, TP_PLAN, CompileWatch(target.plan.backend))
    materialize(model, device, seed=0)
    training = target.config.training
    shape = (training.local_batch_size, training.seq_len // target.world.tp, target.model.dim)
    h = torch.randn(shape, dtype=getattr(torch, training.dtype), device=device, requires_grad=True)
    positions = torch.arange(training.seq_len, device=device)

    def step() -> None:
        model(h, positions=positions, length=training.seq_len).float().square().mean().backward()

    with private.pretend_symmetric_memory():
        return private.generated_code(step)


def one_block(target: Target) -> nn.Module:
    """A stage of a pipeline with the first block and neither embedding nor head, on the meta device."""
    with torch.device("meta"):
        model = Llama3(target.model, target.config.training.seq_len).to(master_dtype(target.config.training.dtype))
    model.tok_embeddings = model.norm = model.output = None
    return model


if __name__ == "__main__":
    sys.exit(main())
