"""The training loop: reads a run folder, applies its plan, trains, and leaves metrics, events and checkpoints there."""

from __future__ import annotations

import logging
import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_cli import hardware
from titan_cli.config.derive import Resolved, model_config, resolve
from titan_cli.config.layers import load
from titan_cli.config.schema import Config
from titan_cli.config.stages import Stage
from titan_cli.errors import ExitCode, TitanError
from titan_cli.plan.facts import parse_version
from titan_cli.plan.planner import Plan
from titan_cli.runs import records
from titan_cli.runs.folder import RunFolder, last_committed
from titan_cli.tokenizer.tokenizer import load as load_tokenizer
from titan_cli.worker import checkpoint, context_parallel, optim, pipeline, private
from titan_cli.worker.data import Batch, Data, build_data
from titan_cli.worker.family import make_model
from titan_cli.worker.health import CompileWatch, audit_gradients, check_compile, compare_with_eager
from titan_cli.worker.loss import LossSum, make_loss
from titan_cli.worker.parallel import Mesh, build_mesh, master_dtype, materialize, parallelize
from titan_cli.worker.report import Reporter
from titan_cli.worker.stop import StopRequest

# The first steps of an attempt still pay for caches, allocators and clocks; tok/s leaves them out.
UNTIMED_STEPS = 2
CHECKED_TOKENS = 512
SAVE_TIMEOUT_S = 3600.0


def train(run: RunFolder, report: Reporter, stop: StopRequest) -> ExitCode:
    """Train the run in `run` to its last step, or until asked to stop. Called once on every rank, under torchrun."""
    config = load(config_file=str(run.config)).config
    plan = Plan.from_json(records.read_json(run.plan))
    check_machine(plan)
    device = set_up_device(plan, config)
    world = resolve(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if plan.device == "cuda" else 0)
    if dist.get_world_size() != world.world_size:
        message = f"torchrun started {dist.get_world_size()} ranks and the plan is for {world.world_size}"
        raise TitanError(message, "leave the number of ranks to launch.nodes and launch.gpus_per_node", ExitCode.USAGE)
    report.phase("building", f"{config.model.family} {config.model.flavor} on {world.world_size} x {device.type}")
    trainer = build(config, plan, world, device, run)
    report.phase("compiling", plan.sentence())
    begin = time.perf_counter()
    if config.compile.check_gradients:
        trainer.check_gradients(report)
    trainer.warm_up()
    dist.barrier()
    report.event("phase", "warm-up finished", seconds=round(time.perf_counter() - begin, 2))
    private.set_collective_timeout(config.launch.timeout_s)
    report.step = trainer.step
    report.phase("running", f"from step {trainer.step + 1} to {config.training.steps}")
    return trainer.run_steps(run, report, stop)


def check_machine(plan: Plan) -> None:
    """The plan was made for one torch and one device; another one would be wrapped by rules that do not hold there."""
    here = ".".join(map(str, parse_version(torch.__version__)))
    if plan.torch != here:
        raise TitanError(
            f"the plan was made for torch {plan.torch}, but this worker runs torch {here}",
            "start titan with the Python that the workers use, so that it plans for their torch",
            ExitCode.REFUSED,
        )
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise TitanError(
            "the plan is for a GPU and this worker sees none",
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES on this machine, or set launch.gpu=cpu",
            ExitCode.REFUSED,
        )
    if plan.device == "cuda" and plan.capability and torch.cuda.get_device_capability() != plan.capability:
        name = torch.cuda.get_device_name()
        raise TitanError(
            f"the plan is for compute capability {plan.capability}, but {name} has {torch.cuda.get_device_capability()}",
            "set launch.gpu to the GPU of this machine, or to auto",
            ExitCode.REFUSED,
        )


def set_up_device(plan: Plan, config: Config) -> torch.device:
    """Join the process group (NCCL for CUDA tensors, gloo for CPU ones) and choose this rank's device."""
    # Once a log line for every rank, about writing in place on a unit's output, which no model here does ...
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # ... and about two small all-reduces where one would do: the gradient norm, once a step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it only
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high" if config.training.dtype == "bfloat16" else "highest")
    timeout = timedelta(seconds=config.compile.warmup_timeout_s)
    if plan.device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return device


def build_model(config: Config, stage: Stage) -> tuple[Any, Mapping[str, str]]:
    """One stage of the model on the meta device (families.Model), and where tensor parallelism cuts it."""
    model, tp_plan = make_model(config)
    model.to(master_dtype(config.training.dtype))
    pipeline.keep_stage(model, stage)
    return model, tp_plan


def build(config: Config, plan: Plan, world: Resolved, device: torch.device, run: RunFolder) -> Trainer:
    """Model, optimizer and data, continued from the last commit of the run (or of the run it was forked from)."""
    mesh = build_mesh(world, device.type)
    private.set_collective_timeout(config.compile.warmup_timeout_s)  # the mesh's groups have torch's default
    watch = CompileWatch(plan.backend)
    stages: dict[int, nn.Module] = {}
    for index, stage in enumerate(world.stages):
        if stage.rank == mesh.pp.get_local_rank():
            part, tp_plan = build_model(config, stage)
            parallelize(part, mesh, plan, tp_plan, watch)
            materialize(part, device, config.training.seed)
            stages[index] = part
    model = stages[0] if world.pp == 1 else pipeline.Joined(list(stages.values()))
    optimizer = optim.build_optimizer(model, config.optimizer)
    tokenizer = load_tokenizer(config.tokenizer.name, config.tokenizer.path)
    data = build_data(config, mesh.dp_rank, world.dp, tokenizer, round_size(world))
    check_same_data(data.fingerprint)
    trainer = Trainer(config, plan, world, mesh, device, model, stages, optimizer, data, watch)
    if start := starting_point(run):
        saved = checkpoint.load(start, model, optimizer)
        optim.configure(optimizer, config.optimizer)
        if start.parent == run.checkpoints and saved["data"] != data.fingerprint:
            raise TitanError(
                f"the data is not what {start} was trained on: its order cannot be continued",
                "use the Python, data and tokenizer of the run, or begin a new one",
                ExitCode.REFUSED,
            )
        trainer.step = saved["step"]
        trainer.last_saved = saved["step"] if start.parent == run.checkpoints else 0
    return trainer


def round_size(world: Resolved) -> int:
    """Micro-batches that every schedule of a pipeline takes, when the number is free: where nothing is trained."""
    return 2 * world.pp if world.pp > 1 else 1


def starting_point(run: RunFolder) -> Path | None:
    """The run's last commit; before its first, the checkpoint it was forked from; None: begin with fresh weights.

    Rank 0 looks and tells the others, whose file system may show them an older listing.
    """
    chosen: list[Path | None] = [None]
    if dist.get_rank() == 0:
        step, fork = last_committed(run), records.read_json(run.fork)
        chosen = [run.checkpoint(step) if step else Path(fork["checkpoint"]) if fork else None]
    dist.broadcast_object_list(chosen, device=torch.device("cpu"))
    return chosen[0]


def check_same_data(fingerprint: str) -> None:
    """Every rank reads the data on its own; ranks that see other texts would train on another order without a sign."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, fingerprint)
    odd = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
    if odd:
        raise TitanError(
            f"ranks {odd[:8]} read other data than rank 0", "use the same Python and files on every machine", ExitCode.REFUSED
        )


@dataclass(frozen=True)
class Direct:
    """Runs micro-batches through a model that is whole on this rank, one after the other."""

    model: nn.Module
    loss_sum: LossSum

    def backward(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Add the gradients of a step's micro-batches; () the sum of their losses over `tokens`."""
        parts = []
        for batch in batches:
            part = self._loss(batch) / tokens
            part.backward()
            parts.append(part.detach().double())
        return torch.stack(parts).sum()

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """() the sum of the micro-batches' losses."""
        return torch.stack([self._loss(batch).double() for batch in batches]).sum()

    def _loss(self, batch: Batch) -> Tensor:
        return self.loss_sum(self.model(batch.inputs, **batch.where()), batch.labels)


Passes = Direct | pipeline.Pipeline


def train_step(
    passes: Passes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    tokens: int,
    max_norm: float,
    pipe: dist.ProcessGroup | None,
    inspect: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over this rank's micro-batches. Returns (loss, gradient norm), each () on the device.

    `tokens` counts the whole step's labels over all ranks: each micro-batch's summed loss is divided by it and FSDP sums
    gradients over ranks, so the step is the mean over tokens for any split into ranks and micro-batches. The returned
    loss is this rank's share of that mean. `pipe` are the ranks of the pipeline, whose parameters share one gradient norm.
    `inspect` is called when all gradients are there.

    Raises TitanError, with nothing updated, when the norm is NaN or infinite.
    """
    loss = passes.backward(batches, tokens)
    if inspect:
        inspect()
    norm = optim.clip_gradients(model, max_norm, pipe)
    if not torch.isfinite(norm):  # waits for the device; the same answer on every rank
        raise TitanError(
            f"the gradient's norm is {float(norm)}" + (f" (this rank's share of the loss: {float(loss):.6g})" if loss else ""),
            "nothing was updated with it, and the last checkpoint is from before it\n"
            "usual causes: optimizer.lr too high, lr_schedule.warmup_steps too few, a damaged sequence in the data",
            ExitCode.NOT_FINITE,
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


@dataclass
class Window:
    """What happened since the last metrics line."""

    step_s: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    timed_s: list[float] = field(default_factory=list)  # without the first steps of the attempt


@dataclass
class Trainer:
    """Everything that changes from step to step, and the loop over it."""

    config: Config
    plan: Plan
    world: Resolved
    mesh: Mesh
    device: torch.device
    model: nn.Module  # what this rank has of it
    stages: dict[int, nn.Module]
    optimizer: torch.optim.Optimizer
    data: Data
    watch: CompileWatch
    step: int = 0
    last_saved: int = 0
    graphs: int = 0  # made up to the last step

    def __post_init__(self) -> None:
        self.loss_sum = make_loss(self.plan, self.mesh.tp)
        if self.plan.loss:
            self.loss_sum = torch.compile(self.loss_sum, backend=self.watch.backend, fullgraph=True)
        seq_len = self.config.training.seq_len
        self.tokens_per_step = self.world.global_batch_size * seq_len
        self.passes = self.make_passes(self.world.gradient_accumulation_steps, seq_len)
        self.eval_passes = self.make_passes(round_size(self.world), seq_len)

    def make_passes(self, micro_batches: int, seq_len: int) -> Passes:
        """What runs micro-batches of sequences of this length. Collective."""
        if self.world.pp == 1:
            return Direct(self.model, self.loss_sum)
        dims, plan, tp = model_config(self.config), self.plan, self.world.tp
        batch, part = self.config.training.local_batch_size, seq_len // self.world.cp
        empty = partial(torch.empty, device="meta", dtype=getattr(torch, plan.dtype), requires_grad=True)
        shapes = (
            torch.empty(batch, part, dtype=torch.long, device="meta"),
            empty(batch, part // (tp if plan.sequence_parallel else 1), dims.dim),
            empty(batch, part, dims.vocab_size // (tp if plan.loss_parallel else 1)),
        )
        constants = {name: value for name, value in self.example(seq_len).where().items() if name != "starts"}
        return pipeline.Pipeline(
            self.stages,
            len(self.world.stages),
            self.mesh.pp,
            self.config.parallelism.pp_schedule,
            micro_batches,
            shapes,
            constants,
            self.loss_sum,
            self.device,
        )

    def example(self, seq_len: int) -> Batch:
        """This rank's part of a micro-batch that nothing is learned from."""
        shape = (self.config.training.local_batch_size, seq_len)
        tokens = torch.arange(shape[0] * shape[1]).view(shape) % model_config(self.config).vocab_size
        starts = torch.zeros_like(tokens) if self.config.model.attention == "flex" else None
        return self.local(Batch(tokens, tokens.clone(), starts))

    def local(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch, on its device."""
        return context_parallel.cut(batch, self.mesh.cp_rank, self.world.cp).map(self.on_device)

    def warm_up(self) -> None:
        """Compile by running every shape once, and leave no trace: no gradient, no random number, no data consumed."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            seq_len = self.config.training.seq_len
            example = self.example(seq_len)
            few = min(round_size(self.world), self.world.gradient_accumulation_steps)  # not the whole step's in a pipeline
            self.make_passes(few, seq_len).backward([example] * few, 1)
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.metrics.eval_every:
                with torch.no_grad():
                    self.eval_passes.evaluate([example] * round_size(self.world))

    def run_steps(self, run: RunFolder, report: Reporter, stop: StopRequest) -> ExitCode:
        """Train to the last step or until asked to stop; commit what was trained in both cases."""
        window, begun_at, metrics = Window(), self.step, self.config.metrics
        steps = self.config.training.steps
        asked = stop.vote()
        while self.step < steps and not asked:
            report.step = self.step + 1
            begin = time.perf_counter()
            batches = [self.local(batch) for batch in self.data.micro_batches(self.step + 1)]
            window.data_wait_s.append(time.perf_counter() - begin)
            rate = optim.learning_rate(self.step + 1, steps, self.config.optimizer.lr, self.config.lr_schedule)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            first = self.step == begun_at
            self.watch.calls.clear()
            try:
                loss, norm = self.train_step(batches, partial(self.inspect, report) if first else None)
            except TitanError as error:
                if error.code == ExitCode.NOT_FINITE and dist.get_rank() == 0:
                    null = {"loss": None, "grad_norm": None, "lr": rate}
                    number = report.attempt.number
                    records.append(
                        run.metrics, {"schema": 1, "step": self.step + 1, "time": time.time(), "attempt": number, **null}
                    )
                    report.event("alert", error.message, "alert")
                raise
            asked = stop.vote()
            self.step += 1
            if not first:
                self.report_recompiles(report)
            window.step_s.append(time.perf_counter() - begin)
            if self.step > begun_at + UNTIMED_STEPS:
                window.timed_s.append(window.step_s[-1])

            evaluate = metrics.eval_every and (self.step % metrics.eval_every == 0 or self.step in (1, steps))
            if evaluate or self.step % metrics.log_every == 0 or self.step in (begun_at + 1, steps):
                line = self.measure(window, report.attempt.number, loss, norm, rate)
                if evaluate:
                    line["val_loss"] = self.evaluate()
                if dist.get_rank() == 0:
                    records.append(run.metrics, line)
                window = Window()
            interval = self.config.checkpoint.interval
            if interval and self.step % interval == 0:
                self.save(run, report)
                if self.step < steps and not asked:
                    report.phase("running", f"from step {self.step + 1} to {steps}")
        if self.step > self.last_saved and self.config.checkpoint.at_end:
            self.save(run, report)
        if self.step >= steps:
            return ExitCode.DONE
        report.event("signal", f"asked to stop, ended after step {self.step}", signal=asked)
        return ExitCode.STOPPED_WITH_LOSS if self.step > self.last_saved else ExitCode.STOPPED

    def train_step(self, batches: Sequence[Batch], inspect: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """`train_step` with what this trainer has."""
        max_norm, pipe = self.config.training.max_norm, self.mesh.pp.get_group() if self.world.pp > 1 else None
        return train_step(self.passes, self.model, self.optimizer, batches, self.tokens_per_step, max_norm, pipe, inspect)

    def on_device(self, tensor: Tensor) -> Tensor:
        """A copy that does not wait for what the GPU is still doing."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def inspect(self, report: Reporter) -> None:
        """Compile health and the gradient audit, in the attempt's first step, before anything is updated with it."""
        health = check_compile(self.watch, self.plan, evaluated=bool(self.config.metrics.eval_every))
        if self.world.pp > 1 and health.blocks is not None:  # each rank has a part of the blocks
            counts = torch.tensor([health.compiled, health.blocks], device=self.device)
            dist.all_reduce(counts, group=self.mesh.pp.get_group())
            compiled, blocks = counts.tolist()
            health = replace(health, compiled=compiled, blocks=blocks)
        audit = audit_gradients(self.model, list(model_config(self.config).shapes()))
        self.graphs = len(self.watch.graphs)
        report.event("compile_health", health.sentence(), "warn" if health.faults else "info", **asdict(health))
        report.event("gradient_audit", audit.sentence(), "warn" if audit.faults else "info", **asdict(audit))
        self.alert([*health.faults, *audit.faults], report, "nothing was updated with this step")

    def alert(self, faults: list[str], report: Reporter, lost: str) -> None:
        """Alerts that stay; with compile.strict the run stops (the same on every rank that sees the fault)."""
        for fault in faults:
            report.event("alert", fault, "alert")
        if faults and self.config.compile.strict:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            hint = f"{lost}; compile.strict=false trains on with a warning, compile.strategy=off trains eager"
            raise TitanError(f"compile.strict: {faults[0]}{more}", hint, ExitCode.COMPILE_HEALTH)

    def report_recompiles(self, report: Reporter) -> None:
        """A graph that is made after the first step costs seconds and means that something changed: say what."""
        made = self.watch.graphs[self.graphs :]
        self.graphs = len(self.watch.graphs)
        if made:
            where = ", ".join(sorted({graph.block or "the loss" for graph in made}))
            cause = (private.recompile_reasons() or ["unknown"])[-1]
            self.alert([f"recompiled {where}: {cause}"], report, f"the steps since step {self.last_saved} are not saved")

    def check_gradients(self, report: Reporter) -> None:
        """Compare every gradient of the first micro-batch, cut to CHECKED_TOKENS, with eager ones, on the real devices."""
        unit = 2 * self.world.cp * self.world.tp
        length = min(-(-CHECKED_TOKENS // unit) * unit, self.config.training.seq_len)
        size, batches = round_size(self.world), self.data.micro_batches(self.step + 1)
        batches = [self.local(batches[i % len(batches)].map(lambda t: t[:, :length].contiguous())) for i in range(size)]
        passes = self.make_passes(size, length)
        names = list(model_config(self.config).shapes())
        differences = compare_with_eager(self.model, names, lambda: passes.backward(batches, 1))
        # bfloat16: rounding alone made up to 0.053 (wq, wk of fresh weights, Llama 3 8B's width on an H200).
        limit = {"bfloat16": 0.15, "float32": 1e-4, "float64": 1e-9}[self.config.training.dtype]
        worst = max(differences, key=differences.__getitem__)
        wrong = {name: d for name, d in differences.items() if not d <= limit}
        text = f"{len(differences) - len(wrong)}/{len(differences)} compiled gradients equal eager ones"
        text += f" (largest difference {differences[worst]:.1e}, {worst})"
        report.event("gradient_audit", text, "warn" if wrong else "info")
        self.alert(
            [f"the compiled gradient of {name} differs from eager by {d:.1e}" for name, d in wrong.items()],
            report,
            "nothing was trained",
        )
        torch._dynamo.reset()  # the cut shape's graphs must not count, nor make the real shape dynamic
        self.watch.graphs.clear()

    def evaluate(self) -> float:
        """Mean loss over the held-out sequences of all ranks, in nats a token."""
        batches = [self.local(batch) for batch in self.data.eval_batches()]
        with torch.no_grad():
            loss = self.eval_passes.evaluate(batches)
        for module in self.model.modules():  # what stays gathered after forward is freed by backward, and there was none
            if isinstance(module, FSDPModule):
                module.reshard()
        # Labels are counted where losses are: on the ranks of the last stage.
        last = len(self.world.stages) - 1 in self.stages
        total = torch.stack((loss, loss.new_tensor(sum(batch.labels.numel() for batch in batches) * last)))
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def save(self, run: RunFolder, report: Reporter) -> None:
        report.phase("saving", f"checkpoint of step {self.step}")
        begin = time.perf_counter()
        private.set_collective_timeout(SAVE_TIMEOUT_S)  # all wait for the slowest disk
        state = {"data": self.data.fingerprint}
        folder = checkpoint.save(run, self.step, self.model, self.optimizer, state, self.config.checkpoint.keep)
        private.set_collective_timeout(self.config.launch.timeout_s)
        self.last_saved = self.step
        report.event("checkpoint", f"committed {folder.name}", step=self.step, seconds=round(time.perf_counter() - begin, 3))

    def measure(self, window: Window, attempt: int, loss: Tensor, norm: Tensor, rate: float) -> dict[str, Any]:
        """One metrics line (the run folder's contract); collective. Times are seconds, means over the window."""
        everywhere = loss.clone()
        dist.all_reduce(everywhere)
        peak, reserved = memory_gib(self.device)
        step_s = mean(window.step_s)
        ranks = [torch.zeros(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, torch.tensor([step_s, peak, reserved], dtype=torch.float64))
        times, peaks, reserves = (column.tolist() for column in torch.stack(ranks).T)
        rate_s = self.tokens_per_step / mean(window.timed_s) if window.timed_s else None
        device_rate = rate_s / self.world.world_size if rate_s else None
        flops = model_config(self.config).flops_per_token(self.config.training.seq_len)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        slowest = max(range(len(times)), key=times.__getitem__)
        return {
            "schema": 1,
            "step": self.step,
            "time": time.time(),
            "attempt": attempt,
            "loss": float(everywhere) / self.world.tp,  # every tp rank holds the whole of its share
            "grad_norm": float(norm),
            "lr": rate,
            "tokens": self.step * self.tokens_per_step,
            "tok_per_s": rate_s,
            "tok_per_s_per_device": device_rate,
            "mfu": hardware.mfu(device_rate, flops, name) if device_rate else None,
            "tflops_per_device": device_rate * flops / 1e12 if device_rate else None,
            "memory_peak_gib": max(peaks),
            "memory_reserved_gib": max(reserves),
            "data_wait_s": mean(window.data_wait_s),
            "step_s": step_s,
            "ranks": {
                "step_s": {"min": min(times), "median": sorted(times)[len(times) // 2], "max": max(times), "argmax": slowest},
                "memory_peak_gib": peaks,
            },
        }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def memory_gib(device: torch.device) -> tuple[float, float]:
    """(most allocated, most reserved) on the device so far; on the CPU the largest resident size for both."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    return resident, resident
