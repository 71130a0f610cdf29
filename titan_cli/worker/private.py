"""The only module that names what torch keeps private or does not document. Each name is guarded and tested."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention

from titan_cli.models.common.attention import masked_last


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor whose collective has finished; differentiable. (torch.ops has no public twin.)"""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole, one slice for each dimension. No communication."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    # Moved once already between releases, hence imported where it is used.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def fake_world(rank: int, world_size: int) -> None:
    """Make this process `rank` of a world in which it is alone: no collective waits, and none carries anything.

    Reductions leave what they are given, and gathers repeat this rank's part. What a stage of a pipeline receives is noise of
    size 1 (a fake group leaves the memory as it was, and zeros or NaN would be in every gradient), and as integers ones: from
    torch 2.13 on the stages vote on whether their shapes are known. So shapes, graphs and which gradients there are are those
    of the real world; no value is. One world for the life of a process: compiled code remembers its groups by name.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    receive = dist.irecv

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        make = torch.randn if tensor.is_floating_point() else torch.ones
        tensor.detach().copy_(make(tensor.shape))
        return receive(tensor, *args, **kwargs)

    dist.irecv = dist.distributed_c10d.irecv = irecv  # torch compares what it is given with the second
    if not hasattr(dist, "reduce_scatter_single"):  # the name is 2.13's, and so is that a fake one gives each rank its part
        _let_reduce_scatter_copy()


def _let_reduce_scatter_copy() -> None:
    """Let a fake reduce-scatter give each rank its part. 2.11's leaves the memory as it was."""
    scatter, group_of = dist.reduce_scatter_tensor, import_module("torch.distributed.distributed_c10d")._resolve_process_group

    def functional(tensor: torch.Tensor, operation: str, size: int, name: str) -> torch.Tensor:
        return tensor.chunk(size)[group_of(name).rank()].clone()

    def in_place(
        output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return scatter(output, input, op, group, async_op)

    torch.library.impl("_c10d_functional::reduce_scatter_tensor", "cpu", functional)  # what tensor parallel calls
    dist.reduce_scatter_tensor = in_place  # what FSDP calls


def hooks(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """What runs before and after a module's forward, in this order."""
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def group_name(mesh: DeviceMesh) -> str:
    """The name by which compiled code finds the process group of a 1-D mesh."""
    return mesh.get_group().group_name


def gather(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The tensors of all ranks of a group, (size, *shape). Differentiable: gradients are summed into each rank's own."""
    from torch.distributed import _functional_collectives as collectives

    # Renamed in 2.13.
    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")
    gathers = next(getattr(collectives, name) for name in names if hasattr(collectives, name))
    return gathers(tensor.contiguous()[None], 0, group)


def all_reduce(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """The "sum" or "max" over the ranks of a group, finished. A new tensor; compiled code can hold it. Not differentiable."""
    return wait_tensor(torch.ops._c10d_functional.all_reduce(tensor.contiguous(), operation, group))


def attention_kernels() -> frozenset[Any]:
    """The operators that scaled_dot_product_attention becomes, on CPU and CUDA, and FlexAttention's."""
    names = (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable", "attention_math",
    )  # fmt: skip
    operators = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names)
    return frozenset((*operators, torch.ops.higher_order.flex_attention))


def attend_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`masked_last` without its mask where FlashAttention can: on CUDA, in 16 bits, with head dimensions of 8, 16 .. 256.

    The operator below scaled_dot_product_attention, whose causal mask ends with queries and keys, which the function on top
    has no word for. (Queries (B, H, Tq, D), keys and values (B, H_kv, Tk, D); operator and kernels take grouped heads.)
    """
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return masked_last(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]


@contextmanager
def allow_flex_on_cpu() -> Iterator[None]:
    """Let FlexAttention be differentiated on a CPU, eager or by aot_eager, within this context.

    torch refuses it for all backends, though only inductor lacks it; the others compute the right gradients, slowly.
    """
    refusal = flex_attention._validate_device
    flex_attention._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex_attention._validate_device = refusal


def exchanges() -> frozenset[Any]:
    """The operators of functional collectives whose results are no larger than what a rank gives: all but gathers."""
    names = ("all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
    return frozenset(getattr(torch.ops._c10d_functional, name).default for name in (*names, "all_to_all_single"))


def inductor_compiled_code() -> Any:
    """The operator that inductor wraps its code in where `wrap_inductor_compiled_regions` is set."""
    return torch.ops.higher_order.inductor_compiled_code


def is_copy_to_host(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator is what `.to("cpu")` makes of a tensor on a device."""
    if operator is not torch.ops.aten._to_copy.default or kwargs.get("device") is None:
        return False
    return torch.device(kwargs["device"]).type == "cpu" and args[0].device.type != "cpu"


def enable_symmetric_memory(mesh: DeviceMesh) -> None:
    """Let compiled code fuse matmuls with collectives of this 1-D mesh (CUDA ranks that reach each other's memory).

    Deprecated since torch 2.11 as no longer needed, but up to 2.14 inductor's pass still skips a group that it was not called
    for, without a word.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`enable_symm_mem_for_group` is deprecated", category=FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


@contextmanager
def pretend_symmetric_memory() -> Iterator[None]:
    """Within this context every group counts as registered, and fused operators run unfused, also on a CPU, without NCCL.

    For ranks that do not exist: it shows what would be fused.
    """
    from torch.distributed import _symmetric_memory as memory

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", memory._fused_matmul_reduce_scatter_fallback, "CPU")
    available = dist.is_nccl_available
    dist.is_nccl_available = lambda: True
    try:
        with memory._test_mode():
            yield
    finally:
        dist.is_nccl_available = available


def generated_code(function: Callable[[], object]) -> list[str]:
    """The source of everything that inductor compiles while `function` runs, oldest first. Resets Dynamo before."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(function)[1]


class LeanStage(PipelineStage):
    """A stage that has memory for what it receives from when it comes until it is used up.

    torch's own makes buffers for every micro-batch of a step in advance and keeps them for ever. Here those lie on the meta
    device and say only what to make. (For Llama 3 405B with 128 micro-batches that is 68 GB on each device.)

    `constants`: arguments of forward that are the same for every micro-batch. As arguments of the schedule they would have
    to be tensors (up to torch 2.12), and be cut into micro-batches.
    """

    constants: Mapping[str, Any] = MappingProxyType({})

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward_maybe_with_nosync(*args, **kwargs, **self.constants)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])  # backward would take the logits from there: nothing does
        return output

    # What two stages of a V hand to each other on one rank is asked for in evaluation too, where there is none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # In a V a stage may be its neighbour's neighbour on one rank: torch 2.11 sends to itself here, which gloo cannot.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            result = super()._prepare_forward_infra(*args, **kwargs)
        self._keep_forms(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            result = super()._prepare_backward_infra(*args, **kwargs)
        self._keep_forms(self.grad_recv_info)
        return result

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        real, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = real

    def _keep_forms(self, chunks: dict[int, tuple[Any, ...]]) -> None:
        for info in (info for infos in chunks.values() for info in infos):
            info.form = getattr(info, "buffer", None)  # tokens, which come from outside, have none

    def _get_recv_ops(self, recv_infos: tuple[Any, ...], *args: Any) -> Any:
        for info in recv_infos:
            if info.form is not None:
                info.buffer = torch.empty_like(info.form, device=self.device).requires_grad_(info.form.requires_grad)
        return super()._get_recv_ops(recv_infos, *args)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        return self._release(super()._retrieve_recv_activations(fwd_chunk_id), self.args_recv_info[fwd_chunk_id])

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return self._release(super()._retrieve_recv_grads(bwd_chunk_id), self.grad_recv_info[bwd_chunk_id])

    def _release(self, received: Any, recv_infos: tuple[Any, ...]) -> Any:
        for info in recv_infos:
            info.buffer = info.form
        return received


def set_collective_timeout(seconds: float) -> None:
    """Change the timeout of every process group's collectives. Compiling needs a longer one than training."""
    # Public since 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in dist.distributed_c10d._pg_map:
        set_timeout(timedelta(seconds=seconds), group)


def backend(name: str) -> Callable[..., Any]:
    """torch.compile's backend of that name as a callable."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def graph_breaks() -> list[str]:
    """Reasons of the graph breaks of this process so far, one for each break, first line only."""
    from torch._dynamo.utils import counters

    return [reason.strip().splitlines()[0] for reason, count in counters["graph_break"].items() for _ in range(count)]


def recompile_reasons() -> list[str]:
    """Why code was compiled again, oldest first: the guard that failed, and the user's line that it comes from.

    Without the change between training and evaluation, which every piece of code sees once.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    first = [" ".join(reason.strip().splitlines()[0].partition("(HINT")[0].split()) for reason in found]
    return [reason for reason in first if "GLOBAL_STATE changed: grad_mode" not in reason]


def apply_setting(name: str, value: object) -> None:
    """Set torch.a.b.c to a value; if it is a function (a setter without a name in a config), call it with the value."""
    path, _, last = name.rpartition(".")
    assert path.startswith("torch."), f"{name} is not torch's: what sets it must be applied by the module that it is for"
    owner: Any = torch
    for depth, part in enumerate(path.split(".")[1:], start=2):
        if not hasattr(owner, part):
            import_module(".".join(path.split(".")[:depth]))
        owner = getattr(owner, part)
    if callable(getattr(owner, last)):
        getattr(owner, last)(value)
    else:
        setattr(owner, last, value)
