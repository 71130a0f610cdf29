"""What can go wrong when a wrapping meets a layout. A rule is one pure function, its docstring is its page, its name its id.

A rule looks at the facts and at one wrapping and says nothing (None) or one thing: that the wrapping is forbidden, that
something must be set, that a cure must be applied, or what a person should know. The order of the rules does not matter.
FSDP2 is always there: titan applies it at every world size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from titan_cli.plan.candidates import Wrapping
from titan_cli.plan.facts import Facts

Verdict = Literal["forbid", "set", "cure", "info"]
# cell: a smallest case fails without the rule, on a machine that we have. reported: others saw it (speed, GPU, many nodes).
Evidence = Literal["cell", "reported"]


@dataclass(frozen=True)
class Finding:
    """What one rule says of one wrapping. `because` holds this case's numbers; `instead` is an override that avoids it."""

    verdict: Verdict
    because: str
    evidence: Evidence
    sources: tuple[str, ...]
    instead: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    cure: str = ""


Rule = Callable[[Facts, Wrapping], Finding | None]


def rule_id(rule: Rule) -> str:
    return rule.__name__.replace("_", "-")


MEASURED = "measured on torch 2.11.0, 2.13.0 and 2.14.1"


# Whole-model compile


def whole_fsdp(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Compile blocks, not the whole model, under FSDP2.

    FSDP's hooks are marked as not traceable. A whole-model graph breaks at each of them: with fullgraph=True it is an
    error, without it the model silently falls apart into one graph for each block (2 graphs for 2 blocks), so nothing is
    gained over compiling blocks, and compile time grows with depth: 18, 27 and 42 s for 4, 16 and 32 layers against 13 s
    for any depth by blocks (CPU, inductor). A whole-model graph was reported 1.6 % faster, with recompiles, in 2024.
    """
    if wrapping.strategy != "whole":
        return None
    return Finding(
        "forbid",
        "FSDP2's hooks cannot be traced: the graph breaks at every block, so this compiles what `block` compiles, and takes "
        "longer with every layer",
        "cell",
        ("pytorch/torchtitan#534", MEASURED),
        instead="compile.strategy=block",
    )


def whole_tp_embedding(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Never compile the whole model around an embedding that tensor parallelism cuts by vocabulary.

    FSDP's graph breaks leave the embedding's output hook to be compiled alone, apart from the lookup that made its mask.
    What torch says differs: "... fake tensors ... _MaskPartial", "Mixing fake modes NYI", "Please convert all Tensors to
    FakeTensors first", always below the mask's buffer. Compiling blocks, with the embedding eager, has none of it.
    """
    if wrapping.strategy != "whole" or facts.tp == 1:
        return None
    return Finding(
        "forbid",
        f"tp = {facts.tp} cuts the embedding by vocabulary, and its mask (_MaskPartial) does not compile apart from the lookup",
        "cell",
        ("pytorch/torchtitan#534", "pytorch/pytorch#160697", "pytorch/pytorch#159843"),
        instead="compile.strategy=block",
    )


def whole_selective_ac(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Whole-model compile with selective checkpointing is slower than compiling blocks.

    Reported for Llama 3 8B in August 2024: 5,000 tok/s against 5,700. The structure of the graphs does not show why (the
    same number of matmuls is recomputed), so this cannot be shown on a CPU.
    """
    if wrapping.strategy != "whole" or facts.ac_mode != "selective":
        return None
    return Finding(
        "forbid",
        "with selective checkpointing, whole-model compile was 12 % slower than blocks on Llama 3 8B",
        "reported",
        ("pytorch/torchtitan#534",),
        instead="compile.strategy=block",
    )


# Tensor parallel


def tp_embedding_wait(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Under tensor parallel, wait for the embedding's collective before the first compiled region.

    The eager embedding ends in an asynchronous reduce-scatter (without sequence parallel in an all-reduce, with the same
    effect) and hands on a tensor that is still in flight (AsyncCollectiveTensor). From torch 2.13 on, backward through
    compiled code loses the gradient of such an input: with any fully_shard the embedding's gradient is exactly zero while
    the loss equals eager to every digit; without it backward raises "'Tensor' object has no attribute '_local_tensor'".
    torch 2.11 is right; 2.12 was not run and gets the cure, which costs nothing: the first kernel would wait anyway. Of
    compiled norms alone, another model lost a tenth of the gradient; in titan's models nothing was lost, and they get the
    cure all the same.

    The cure is a forward hook on the embedding that calls wait_tensor. It renames nothing. Not cures: fully_shard (turns
    the crash into the silent zero), AsyncCollectiveTensor.wait() (the gradient becomes None), a wrapper (renames).
    """
    if facts.tp == 1 or wrapping.strategy == "off" or facts.torch < (2, 12, 0):
        return None
    return Finding(
        "cure",
        f"tp = {facts.tp}: the embedding's output is still in flight when compiled code reads it, and on torch "
        f"{facts.torch_text} the embedding's gradient would be exactly zero, without a sign of it in the loss",
        "cell",
        ("pytorch/pytorch#191113", "measured on torch 2.13.0 and 2.14.1; 2.11.0 is right"),
        cure="wait on tok_embeddings output",
    )


def tp_ac_inside(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """On torch 2.13, checkpoint whole blocks outside the compiled region under tensor parallel.

    compile(AC(block)) of a Llama block (SDPA attention, weights are DTensors) raises in backward on 2.13.0: "expected all
    tensors_saved_with_vc_check to be Tensors ... DeviceMesh". 2.11.0 and 2.14.1 are right; 2.12 was not run and is treated
    as 2.13. Operator-level checkpointing, FlexAttention and latent attention are not affected. AC(compile(block)) gives
    gradients equal to eager on all of them, and memory drops as much.
    """
    whole_blocks = facts.ac_mode != "none" and not facts.ac_by_op
    # A family of a user's own may well have a block like Llama's.
    affected = facts.tp > 1 and whole_blocks and facts.attention == "sdpa" and facts.family != "deepseek_v3"
    if not affected or wrapping != Wrapping("block", "inside") or not (2, 12, 0) <= facts.torch < (2, 14, 0):
        return None
    return Finding(
        "forbid",
        f"tp = {facts.tp} with {facts.ac_mode} checkpointing inside the compiled block: backward raises "
        f"'tensors_saved_with_vc_check ... DeviceMesh' on torch {facts.torch_text}",
        "cell",
        (MEASURED,),
    )


def async_tp_needs_inductor(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel is a pass of inductor: what is not compiled by inductor does not overlap.

    With compile off, or only norms compiled, or another backend, the option would silently do nothing. Of a module that is
    compiled on its own, one of the two ends lies outside of what the pass sees.
    """
    if not facts.async_tp or (wrapping.strategy in ("whole", "block") and facts.backend in ("auto", "inductor")):
        return None
    return Finding(
        "forbid",
        f"async_tp needs blocks compiled by inductor, and this is {wrapping.strategy} with backend {facts.backend}",
        "reported",
        ("pytorch/torchtitan#429",),
        instead="parallelism.async_tp=false",
    )


def async_tp_without_tp(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel with tp = 1 has nothing to overlap.

    Other trainers accept it silently; a person who sets it expects an effect.
    """
    if not facts.async_tp or facts.tp > 1:
        return None
    return Finding(
        "forbid",
        "async_tp overlaps tensor parallel's collectives, and tp = 1 has none",
        "reported",
        ("pytorch/torchtitan#4634",),
        instead="parallelism.async_tp=false",
    )


def async_tp_needs_cuda(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel needs GPUs of one machine that read and write each other's memory (NVLink).

    Its matmuls run piece by piece, and each piece is fetched from, or put into, symmetric memory of the other ranks while the
    next one is computed. A CPU has no such memory.
    """
    if not facts.async_tp or facts.device == "cuda":
        return None
    return Finding(
        "forbid",
        "async_tp moves data through the symmetric memory of CUDA devices, and this is a CPU",
        "reported",
        ("pytorch/torchtitan#429", "torch.distributed._symmetric_memory"),
        instead="parallelism.async_tp=false",
    )


def async_tp_needs_sequence_parallel(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel without sequence parallel has nothing to fuse.

    What it fuses is an all-gather with the matmuls after it, and a matmul with the reduce-scatter after it. Where activations
    are whole between the blocks there is an all-reduce instead of both, which the pass does not look for.
    """
    if not facts.async_tp or facts.tp == 1 or facts.sequence_parallel:
        return None
    return Finding(
        "forbid",
        "async_tp fuses matmuls with the all-gathers and reduce-scatters of sequence parallel; without it there are none",
        "reported",
        ("torch/_inductor/fx_passes/micro_pipeline_tp.py",),
        instead="parallelism.sequence_parallel=true",
    )


def async_tp_needs_bfloat16(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel is for bfloat16.

    A float32 matmul takes many times as long and its communication only twice as long, so that there is little to hide, and
    nobody reports having checked it.
    """
    if not facts.async_tp or facts.dtype == "bfloat16":
        return None
    return Finding(
        "forbid",
        f"async_tp hides communication behind bfloat16 matmuls, and this run computes in {facts.dtype}",
        "reported",
        ("pytorch/torchtitan#429",),
        instead="parallelism.async_tp=false",
    )


def async_tp_fusion(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Async tensor parallel is switched on in inductor, and needs its process group registered for symmetric memory.

    The pass looks for both and says nothing where it does not fuse: a group that is not registered keeps its plain
    collectives. Registering is called deprecated since torch 2.11, but the pass asks for it up to 2.14. It does not find an
    all-gather of a batch of one, which torch makes a view, so titan then gathers rows.

    In a block of Llama 3 all four collectives of forward are fused, and the two all-gathers of backward. Its two
    reduce-scatters are not: they reduce a sum of several matmuls. Checkpointing does not change that, by operator or whole;
    it may keep what a reduce-scatter made, which cost the fusion in older releases.
    """
    if not facts.async_tp or facts.tp == 1 or not facts.sequence_parallel:
        return None
    return Finding(
        "set",
        f"async_tp: all-gathers and reduce-scatters of the {facts.tp} tp ranks are fused with their matmuls in compiled blocks",
        "reported",
        ("pytorch/torchtitan#4045", "pytorch/torchtitan#1185", "pytorch/torchtitan#965", f"what is fused: {MEASURED}"),
        settings={"torch._inductor.config._micro_pipeline_tp": True, "tp.symmetric_memory": True},
    )


# Mixture of experts


def nested_experts_ac_inside(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Experts in an FSDP unit inside the block: checkpointing inside the compiled region leaves the block eager.

    compile(AC(block)) meets the unit's hooks, which cannot be traced inside the checkpoint operator. With fullgraph=False
    the whole block silently runs eager (0 graphs); with fullgraph=True it is an error. From torch 2.12 on experts share
    one unit with their block (a mesh for each parameter), and this does not arise.
    """
    if facts.experts != "nested" or facts.ac_mode == "none" or wrapping != Wrapping("block", "inside"):
        return None
    return Finding(
        "forbid",
        f"ep = {facts.ep} on torch {facts.torch_text} makes experts an FSDP unit inside the block, and {facts.ac_mode} "
        "checkpointing inside the compiled region would leave every MoE block eager",
        "cell",
        ("pytorch/torchtitan#1895", "pytorch/pytorch#139989", "pytorch/pytorch#168395"),
    )


def nested_experts_by_op_outside(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Experts in an FSDP unit inside the block: operator-level checkpointing cannot look into compiled blocks.

    SAC(compile(block)) compiles from torch 2.11 on (on 2.9 the block was skipped), but the policy sees one opaque call
    where its operators are: nothing that it should save is saved.
    """
    if facts.experts != "nested" or not facts.ac_by_op or wrapping != Wrapping("block", "outside"):
        return None
    return Finding(
        "forbid",
        "operator-level checkpointing around a compiled block sees none of its operators and saves nothing",
        "cell",
        ("pytorch/pytorch#161889", "measured on torch 2.9.1, 2.11.0, 2.13.0 and 2.14.1"),
    )


def nested_experts_break(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Experts in an FSDP unit inside the block: the graph breaks before and after them, by design.

    The rest of the block is compiled (0.95 of its operators). fullgraph=True would refuse what is wanted here.
    """
    if facts.experts != "nested" or wrapping.strategy != "block":
        return None
    return Finding(
        "set",
        f"ep = {facts.ep} on torch {facts.torch_text}: the experts' FSDP hooks break each MoE block's graph twice",
        "cell",
        ("pytorch/torchtitan#1895", "measured on torch 2.9.1, 2.11.0, 2.13.0 and 2.14.1"),
        settings={"wraps.moe.fullgraph": False, "expect.moe.breaks": 2},
    )


def moe_scalar_outputs(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Let the compiler trace the token counts of experts.

    Routing reads how many tokens each expert got as Python numbers; by default that breaks the graph. (It hung some ranks
    in 2025 and was switched off for two months; since the blocks are compiled whole, it is on again everywhere.)
    """
    if "moe" not in facts.kinds or wrapping.strategy not in ("whole", "block", "submodule"):
        return None
    return Finding(
        "set",
        "MoE blocks read token counts as numbers, which would break their graphs",
        "reported",
        ("pytorch/torchtitan#1895", "pytorch/torchtitan#1649"),
        settings={"torch._dynamo.config.capture_scalar_outputs": True},
    )


# Activation checkpointing


def ac_side_effects(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """With checkpointing inside compiled MoE blocks, let recomputation skip Python's side effects.

    Dispatching tokens counts them in Python objects; recomputing a block would count twice, so Dynamo refuses ("HOP:
    Unsafe side effect") unless told that backward does not repeat them. titan's counts live in forward alone.
    """
    if "moe" not in facts.kinds or facts.ac_mode == "none" or wrapping.ac == "outside":
        return None
    return Finding(
        "set",
        "checkpointing inside compiled MoE blocks would be refused for its side effects",
        "cell",
        ("pytorch/torchtitan#2741", "measured on torch 2.13.0"),
        settings={"torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint": True},
    )


def ac_lru_cache(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """With checkpointing, look compiled graphs up in the order they were made.

    Dynamo moves the graph that was used last to the front. When a second graph exists (another shape, the second
    micro-batch of a pipeline), recomputation can pick another graph than forward did: "list index out of range" on 2.11,
    "not found in storage" on 2.13 and 2.14; and the empty entry of a block that fell to eager can take over other blocks.
    """
    if facts.ac_mode == "none" or wrapping.strategy == "off":
        return None
    return Finding(
        "set",
        f"{facts.ac_mode} checkpointing recomputes with the graph that comes first, which must be the one forward used",
        "cell",
        ("pytorch/pytorch#166926", "pytorch/torchtitan#1991", MEASURED),
        settings={"torch._C._dynamo.eval_frame._set_lru_cache": False},
    )


# FlexAttention


def flex_on_cpu(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """FlexAttention cannot be trained on a CPU: torch has no backward for it there, eager or compiled."""
    if facts.attention != "flex" or facts.device != "cpu":
        return None
    return Finding(
        "forbid",
        "FlexAttention has no backward on a CPU",
        "cell",
        ("torch.nn.attention.flex_attention._validate_device", MEASURED),
        instead="model.attention=sdpa",
    )


def flex_alone(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Where the block is not compiled, compile FlexAttention on its own.

    Uncompiled it writes the whole matrix of scores: correct, and slower by orders of magnitude, with one warning.
    """
    if facts.attention != "flex" or wrapping.strategy not in ("norm", "off"):
        return None
    return Finding(
        "set",
        f"{wrapping.strategy} leaves the block eager, where FlexAttention would write the whole matrix of scores",
        "cell",
        ("pytorch/torchtitan#1631",),
        settings={"flex.compile": True},
    )


def flex_by_op(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Operator-level checkpointing around a FlexAttention that is compiled alone must be able to save it.

    Up to torch 2.9 the checkpoint's dispatch mode kept it from being compiled at all. Since 2.10 inductor can wrap what it
    compiled in one operator, inductor_compiled_code, which the policy sees and must save: otherwise attention, the most
    expensive operator of a block, is always recomputed.
    """
    if facts.attention != "flex" or not facts.ac_by_op or wrapping.strategy not in ("norm", "off"):
        return None
    return Finding(
        "set",
        "operator-level checkpointing sees a FlexAttention that is compiled alone only as inductor_compiled_code",
        "reported",
        ("pytorch/torchtitan#1631", "pytorch/torchtitan#2118", "pytorch/pytorch#175229"),
        settings={"flex.wrap_inductor_compiled_regions": True, "ac.save_inductor_compiled_code": True},
    )


# Pipeline parallel


def split_backward_compiled(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Schedules that split backward do not work with compiled blocks before torch 2.13.

    Zero-bubble schedules ask for the gradient of the input first and that of the weights later; autograd's node of a
    compiled block cannot: "Attribute '_input_metadata' is invalid". torch's own guard looks for torch.compile's wrapper
    module and misses blocks that are compiled in place.
    """
    if not facts.split_backward or wrapping.strategy == "off" or facts.torch >= (2, 13, 0):
        return None
    return Finding(
        "forbid",
        f"{facts.pp_schedule} splits backward, which a compiled block cannot on torch {facts.torch_text}",
        "cell",
        ("pytorch/pytorch#161904", "pytorch/pytorch#162511", MEASURED),
        instead="parallelism.pp_schedule=Interleaved1F1B",
    )


def split_backward_donated(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """From torch 2.13 on, schedules that split backward need the compiler not to reuse forward's buffers.

    Otherwise: "compiled with non-empty donated buffers which requires retain_graph=False". Gradients are then equal to
    eager; the split itself gains little, as one compiled backward computes both halves.
    """
    if not facts.split_backward or wrapping.strategy == "off" or facts.torch < (2, 13, 0):
        return None
    return Finding(
        "set",
        f"{facts.pp_schedule} runs backward twice over what forward saved, so its buffers cannot be reused",
        "cell",
        ("pytorch/torchtitan#2700", "pytorch/pytorch#143599", "measured on torch 2.13.0 and 2.14.1"),
        settings={"torch._functorch.config.donated_buffer": False},
    )


def split_backward_by_op(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Schedules that split backward do not work with operator-level checkpointing outside of compiled code.

    Backward then runs twice over one checkpoint, once for the input's gradient and once for the weights', and what forward
    kept for it is handed out only once: "Trying to backward an extra time". Inside a compiled block the compiler plans what
    is kept, and checkpointing whole blocks keeps nothing that could be used up.
    """
    if not facts.split_backward or not facts.ac_by_op or wrapping.ac == "inside":
        return None
    return Finding(
        "forbid",
        f"{facts.pp_schedule} runs backward twice, and what operator-level checkpointing kept is there only once",
        "cell",
        (MEASURED,),
        instead="activation_checkpoint.mode=full",
    )


def split_backward_flex(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Schedules that split backward do not work with FlexAttention.

    Before torch 2.13 the block mask among a stage's inputs has no gradient to ask for ("'BlockMask' object has no attribute
    'requires_grad'"); later the compiled attention kernel itself refuses a second backward.
    """
    if not facts.split_backward or facts.attention != "flex":
        return None
    return Finding(
        "forbid",
        f"{facts.pp_schedule} splits backward, which FlexAttention's kernel does not allow",
        "reported",
        ("pytorch/torchtitan#3584",),
        instead="parallelism.pp_schedule=Interleaved1F1B",
    )


def tied_pipeline(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """A tied head and the embedding cannot lie on different pipeline stages: they are one matrix."""
    if not facts.tied or facts.pp == 1:
        return None
    return Finding(
        "forbid",
        f"pp = {facts.pp} puts the embedding and the head, which are one matrix, on different ranks",
        "reported",
        ("pytorch/torchtitan#1524",),
        instead="model.tie_embeddings=false",
    )


# Data and context parallel


def replicate_by_fsdp(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Replication goes through fully_shard on a (replicas, 1) mesh, not through the DDP class.

    torch.compile around DDP cuts the graph at its buckets, and with checkpointing falls to a single bucket without overlap;
    DDP also renames every parameter. fully_shard's hooks lie outside the compiled blocks and gradients are the same.
    """
    if facts.dp_replicate == 1:
        return None
    return Finding(
        "info",
        f"dp_replicate = {facts.dp_replicate}: replicated through fully_shard, so that blocks compile as they do without",
        "cell",
        ("pytorch/pytorch#104674", "pytorch/torchtitan#1939"),
    )


def context_parallel(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Context parallel gathers keys and values; attention itself stays in the compiled block.

    torch's ring attention has no CPU path and fails with the cuDNN and math kernels, and its hooks need a boundary inside
    compiled blocks. Gathering keys and values, as Llama 3 was trained, works with every kernel.
    """
    if facts.cp == 1:
        return None
    return Finding(
        "info",
        f"cp = {facts.cp}: keys and values are gathered over the context-parallel ranks inside the compiled block",
        "reported",
        ("pytorch/pytorch#176915", "pytorch/pytorch#147793", "pytorch/torchtitan#2557"),
    )


# Precision, and the compiler itself


def float8_capability(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """float8 matmuls need compute capability 8.9 (Ada) or 9.0 (Hopper).

    The tensor cores of older GPUs have no float8, and emulating it would be slower than bfloat16.
    """
    if not facts.float8 or (facts.device == "cuda" and facts.capability and facts.capability >= (8, 9)):
        return None
    here = "a CPU" if facts.device == "cpu" else f"compute capability {'.'.join(map(str, facts.capability or ('?',)))}"
    return Finding(
        "forbid",
        f"float8 needs compute capability 8.9 or newer, and this is {here}",
        "reported",
        ("torch._scaled_mm",),
        instead="float8.enable=false",
    )


def float8_needs_compile(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """float8 without compile is slower than bfloat16: the casts and scales around each matmul are kernels of their own."""
    if not facts.float8 or wrapping.strategy in ("whole", "block", "submodule"):
        return None
    return Finding(
        "forbid",
        f"float8's casts and scales are only cheap when compiled, and {wrapping.strategy} leaves linear layers eager",
        "reported",
        ("pytorch/torchtitan#1079",),
        instead="float8.enable=false",
    )


def float8_ac_rounding(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """float8 with checkpointing needs recomputation to round as forward did.

    Inductor drops round trips through bfloat16 inside a fused kernel; a recomputed norm is fused differently, its scale
    differs, and the loss stalls, then becomes NaN after some 40 to 80 steps.
    """
    if not facts.float8 or facts.ac_mode == "none" or wrapping.strategy == "off":
        return None
    return Finding(
        "set",
        "recomputed activations must round as they did in forward, or float8 scales differ and the loss becomes NaN",
        "reported",
        ("pytorch/torchtitan#1056", "pytorch/pytorch#150859"),
        settings={"torch._inductor.config.emulate_precision_casts": True},
    )


def recompile_limit(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Leave room for one graph for each kind of block, mode and kind of input.

    Dynamo compiles one piece of code at most 8 times and then runs it eager (with fullgraph=True: FailOnRecompileLimitHit).
    Blocks of different kinds share code; each has a graph for training and one for evaluation; before torch 2.14 inputs
    that are still in flight (AsyncCollectiveTensor) need graphs of their own.
    """
    in_flight = 2 if facts.tp * facts.ep > 1 and facts.torch < (2, 14, 0) else 1
    needed = 4 * len(facts.kinds) * in_flight
    if needed <= 8 or wrapping.strategy == "off":
        return None
    return Finding(
        "set",
        f"{len(facts.kinds)} kinds of blocks need up to {needed} graphs of the same code, and Dynamo stops at 8",
        "reported",
        ("pytorch/torchtitan#3737", "pytorch/pytorch#187073"),
        settings={"torch._dynamo.config.recompile_limit": needed},
    )


def leaf_modules(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """Compile titan's own modules, never torch.nn's: before torch 2.14 those compile to nothing, silently.

    nn.RMSNorm(...).compile() (or nn.Linear, nn.Sequential) produces no graph up to 2.13: Dynamo does not look into files
    of torch.nn. 2.13 raises "found no compiled frames" with fullgraph=True. titan's norms are a class of its own, and
    every wrap is compiled with fullgraph=True, so that nothing can be missed quietly.
    """
    if wrapping.strategy not in ("submodule", "norm") or facts.torch >= (2, 14, 0):
        return None
    return Finding(
        "info",
        f"on torch {facts.torch_text} a module of torch.nn would compile to nothing; the modules compiled here are titan's own",
        "cell",
        ("pytorch/pytorch#177809", "pytorch/pytorch#181817", MEASURED),
    )


def cpu_without_compiler(facts: Facts, wrapping: Wrapping) -> Finding | None:
    """On a CPU without a C++ compiler, use the backend aot_eager.

    Inductor's CPU backend writes C++ and needs g++ or clang++. aot_eager traces and differentiates the same graphs and
    runs them with torch's own kernels: everything but the speed is the same.
    """
    if wrapping.strategy == "off" or facts.device != "cpu" or facts.cxx_compiler or facts.backend != "auto":
        return None
    return Finding(
        "set",
        "no C++ compiler (g++ or clang++) on this machine, which inductor needs on the CPU: compiled with aot_eager",
        "reported",
        ("torch._inductor.exc.InvalidCxxCompiler",),
        settings={"backend": "aot_eager"},
    )


RULES: tuple[Rule, ...] = (
    whole_fsdp,
    whole_tp_embedding,
    whole_selective_ac,
    tp_embedding_wait,
    tp_ac_inside,
    async_tp_needs_inductor,
    async_tp_without_tp,
    async_tp_needs_cuda,
    async_tp_needs_sequence_parallel,
    async_tp_needs_bfloat16,
    async_tp_fusion,
    nested_experts_ac_inside,
    nested_experts_by_op_outside,
    nested_experts_break,
    moe_scalar_outputs,
    ac_side_effects,
    ac_lru_cache,
    flex_on_cpu,
    flex_alone,
    flex_by_op,
    split_backward_compiled,
    split_backward_donated,
    split_backward_by_op,
    split_backward_flex,
    tied_pipeline,
    replicate_by_fsdp,
    context_parallel,
    float8_capability,
    float8_needs_compile,
    float8_ac_rounding,
    recompile_limit,
    leaf_modules,
    cpu_without_compiler,
)
