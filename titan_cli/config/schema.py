"""Every option titan has: its section, type, default and one line of documentation. Values only; no I/O, no torch.

A field's description is its documentation: `titan options` prints it and errors quote it. Text fields (`str`) take the
command line's characters as they are; every other field reads them as TOML.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Text, as the words beside which it stands; `format` is what a person reads in place of the pattern.
Nth = Annotated[str, Field(pattern="^([2-9]|[1-9][0-9]+)$", json_schema_extra={"format": '"2", "3", "4" ...'})]
_PATH = r"[A-Za-z]\w*(\.[A-Za-z_]\w*)*"
Package = Annotated[str, Field(pattern=f"^{_PATH}$", json_schema_extra={"format": "package.module"})]
Function = Annotated[str, Field(pattern=rf"^{_PATH}:[A-Za-z_]\w*$", json_schema_extra={"format": "package.module:function"})]


class Section(BaseModel):
    """One TOML table. Frozen; an unknown key is an error; a value of the wrong type is never converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """Dimensions that are unset are the flavor's. Setting one that the family does not have is an error."""

    family: Literal["llama3", "deepseek_v3"] | Package = Field(
        "llama3", description="model family; your own: the import path of its package (docs/add-a-model.md)"
    )
    flavor: str = Field("debug", description="published size; llama3: debug, 1b, 8b, 70b, 405b; deepseek_v3: debug, 16b, 671b")
    dim: Count | None = Field(None, description="width of the residual stream, features; unset: the flavor's")
    n_layers: Count | None = Field(None, description="transformer blocks; unset: the flavor's")
    n_heads: Count | None = Field(None, description="query heads; unset: the flavor's")
    n_kv_heads: Count | None = Field(
        None, description="llama3: key and value heads (grouped-query attention); unset: the flavor's"
    )
    ffn_dim: Count | None = Field(
        None, description="hidden width of the feed-forward (not of experts), features; unset: the flavor's"
    )
    vocab_size: Count | None = Field(
        None, description="rows of the embedding, at least the tokenizer's size; unset: the flavor's"
    )
    norm_eps: float | None = Field(None, gt=0, description="epsilon of RMSNorm; unset: the flavor's")
    rope_theta: float | None = Field(None, gt=0, description="base of the rotary frequencies; unset: the flavor's")
    tie_embeddings: bool | None = Field(None, description="use the embedding's matrix as the output head; unset: the flavor's")
    n_dense_layers: Whole | None = Field(
        None, description="deepseek_v3: first blocks, which have no experts; unset: the flavor's"
    )
    q_lora_rank: Whole | None = Field(
        None, description="deepseek_v3: width of the queries' latent, features; 0: none; unset: the flavor's"
    )
    kv_lora_rank: Count | None = Field(
        None, description="deepseek_v3: width of the keys' and values' latent, features; unset: the flavor's"
    )
    qk_nope_head_dim: Count | None = Field(
        None, description="deepseek_v3: features of a head's query and key without position; unset: the flavor's"
    )
    qk_rope_head_dim: Count | None = Field(
        None, description="deepseek_v3: rotated features of a head's query and key; unset: the flavor's"
    )
    v_head_dim: Count | None = Field(None, description="deepseek_v3: features of a head's value; unset: the flavor's")
    moe_ffn_dim: Count | None = Field(None, description="deepseek_v3: hidden width of an expert, features; unset: the flavor's")
    n_experts: Count | None = Field(None, description="deepseek_v3: routed experts of a block; unset: the flavor's")
    n_shared_experts: Count | None = Field(
        None, description="deepseek_v3: experts of a block that see every token; unset: the flavor's"
    )
    top_k: Count | None = Field(None, description="deepseek_v3: routed experts that see a token; unset: the flavor's")
    n_expert_groups: Count | None = Field(
        None, description="deepseek_v3: groups that a block's experts are divided into; unset: the flavor's"
    )
    n_limited_groups: Count | None = Field(
        None, description="deepseek_v3: groups that a token's experts may be in; unset: the flavor's"
    )
    score_func: Literal["softmax", "sigmoid"] | None = Field(
        None, description="deepseek_v3: from the router's logits to the experts' scores; unset: the flavor's"
    )
    route_scale: float | None = Field(
        None, gt=0, description="deepseek_v3: factor of the chosen experts' weights; unset: the flavor's"
    )
    norm_topk: bool | None = Field(
        None, description="deepseek_v3: the chosen experts' weights add up to 1; unset: the flavor's"
    )
    rope_factor: float | None = Field(
        None, ge=1, description="deepseek_v3: YaRN's stretch of slow rotations beyond original_seq_len; unset: the flavor's"
    )
    original_seq_len: Count | None = Field(
        None, description="deepseek_v3: longest sequence without YaRN, tokens; unset: the flavor's"
    )
    beta_fast: float | None = Field(
        None, gt=0, description="deepseek_v3: rotations in original_seq_len above which YaRN keeps them; unset: the flavor's"
    )
    beta_slow: float | None = Field(
        None, gt=0, description="deepseek_v3: rotations in original_seq_len below which YaRN stretches all; unset: the flavor's"
    )
    mscale: float | None = Field(None, ge=0, description="deepseek_v3: YaRN's sharpening of the softmax; unset: the flavor's")
    attention: Literal["sdpa", "flex"] = Field("sdpa", description="attention kernel")


class Data(Section):
    source: Literal["python-stdlib", "c4"] | Function = Field(
        "python-stdlib",
        description="where text comes from: this interpreter's standard library, allenai/c4 (streamed), or a function of your "
        "own (docs/add-a-model.md)",
    )
    path: str = Field(
        "", description="local file, or folder of .json.gz / .jsonl files, to read `source` from instead of the network"
    )
    shuffle_seed: Whole = Field(0, description="seed of the order of the packed sequences")
    val_every: Annotated[int, Field(ge=2)] = Field(20, description="every n-th document is held out for validation")


class Tokenizer(Section):
    name: str = Field("titan", description="`titan` (shipped, 4,096 tokens) or `llama3` (Meta's; needs tokenizer.path)")
    path: str = Field("", description="tokenizer file on this machine: tiktoken's tokenizer.model")


class Training(Section):
    steps: Count = Field(1000, description="optimizer steps, counted from the beginning of the run")
    seq_len: Count = Field(2048, description="tokens in one sequence")
    local_batch_size: Count = Field(1, description="sequences in one micro-batch of one data-parallel rank")
    global_batch_size: Count | None = Field(
        None, description="sequences in one optimizer step over all ranks; unset: local_batch_size x data-parallel ranks"
    )
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16", description="type of compute; parameters, gradients and optimizer stay float32 (float64 with float64)"
    )
    max_norm: float = Field(1.0, gt=0, description="largest L2 norm of all gradients together; larger ones are scaled down")
    seed: Whole = Field(0, description="seed of the initial weights")
    deterministic: bool = Field(False, description="deterministic kernels only; slower, the same bits every time")


class Optimizer(Section):
    """AdamW (1711.05101), fused where the device has it."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices (norms have none)")


class LrSchedule(Section):
    name: Literal["cosine", "wsd"] = Field("cosine", description="after warm-up: cosine decay, or warmup-stable-decay (linear)")
    warmup_steps: Whole = Field(200, description="steps of linear warm-up from 0")
    decay_share: Share = Field(0.2, description="wsd: last share of the steps in which the rate falls")
    min_share: Share = Field(0.1, description="final learning rate as a share of the peak")


class Parallelism(Section):
    """dp_replicate x dp_shard x cp x tp x pp = ranks; ep divides dp_shard x cp x tp."""

    dp_replicate: Count = Field(1, description="copies of the model, each sharded over dp_shard ranks")
    dp_shard: Count | Literal[-1] = Field(
        -1, description="ranks that share one copy's parameters (FSDP2); -1: all that are left"
    )
    tp: Count = Field(1, description="ranks that split each matrix (tensor parallel)")
    cp: Count = Field(1, description="ranks that split each sequence (context parallel); 2 x cp divides training.seq_len")
    pp: Count = Field(1, description="ranks that split the blocks (pipeline); a step's micro-batches pass through in turn")
    ep: Count = Field(1, description="ranks that split the experts, taken from dp_shard x cp x tp; divides n_experts")
    pp_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"] = Field(
        "1F1B", description="order of micro-batches in the pipeline, by torch's name; all but the first two: 2 stages a rank"
    )
    pp_layers: list[Whole] | None = Field(
        None, description="blocks of each pipeline stage, first to last; unset: balanced by FLOPs, then by parameters"
    )
    reshard_after_forward: Literal["auto", "always", "never"] = Field(
        "auto",
        description="FSDP frees gathered parameters after forward; with pp never, which auto knows",
    )
    sequence_parallel: bool = Field(True, description="with tp: cut activations along the sequence between the blocks")
    loss_parallel: bool = Field(False, description="with tp: keep the logits cut by vocabulary in the loss")
    async_tp: bool = Field(False, description="with tp: overlap its communication with the matmuls (inductor, NVLink)")


class ActivationCheckpoint(Section):
    mode: Literal["none", "full", "selective"] = Field("none", description="what backward computes again instead of keeping it")
    selective_option: Literal["op"] | Nth = Field(
        "op", description="with selective: op keeps the results of costly operators, N computes every N-th block again"
    )


class Compile(Section):
    strategy: Literal["auto", "off", "whole", "block", "submodule", "norm"] = Field(
        "auto", description="what torch.compile wraps; auto: the best that is safe for this layout"
    )
    loss: bool = Field(True, description="compile the loss on its own")
    backend: Literal["auto", "inductor", "aot_eager"] = Field(
        "auto", description="torch.compile backend; auto: inductor, or aot_eager on a CPU without a C++ compiler"
    )
    strict: bool = Field(False, description="stop, exit 9, when compile health or the gradient audit finds a fault")
    check_gradients: bool = Field(
        False,
        description="before step 1, compare every gradient of a short batch with eager (also: titan train --check-gradients)",
    )
    force: bool = Field(False, description="use the named strategy although a rule forbids it; a warning stays")
    warmup_timeout_s: float = Field(1800.0, gt=0, description="longest time for building and compiling before step 1, seconds")


class Float8(Section):
    enable: bool = Field(False, description="matmuls of the linear layers in float8 (needs torchao and compute capability 8.9)")


class Checkpoint(Section):
    interval: Whole = Field(500, description="steps between checkpoints; 0: none on the way")
    at_end: bool = Field(True, description="also when the run ends or is stopped; false loses what came after the last one")
    keep: Whole = Field(2, description="committed checkpoints kept, newest first; 0: all")


class Metrics(Section):
    log_every: Count = Field(10, description="steps between two metrics lines")
    eval_every: Whole = Field(0, description="steps between evaluations on the held-out split; 0: never")
    eval_sequences: Count = Field(64, description="sequences in one evaluation, over all ranks")


class Launch(Section):
    nodes: Count = Field(1, description="machines")
    gpus_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="ranks on each machine; auto: visible GPUs, on CPU the product of the fixed degrees"
    )
    gpu: str = Field(
        "auto", description="device to plan for: auto, cpu, or a GPU with its memory (A100-80, H100-80, H200-141 ...)"
    )
    runs_dir: str = Field("runs", description="folder that holds one folder for each run")
    timeout_s: float = Field(600.0, gt=0, description="longest time for one collective after warm-up, seconds")


class Config(Section):
    """A whole run. What TOML presets, `--config` and `key=value` fill, layer over layer."""

    model: Model = Model()
    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    launch: Launch = Launch()
