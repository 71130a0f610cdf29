"""What titan knows of devices without torch: their memory, compute capability and peak, and which are here."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU model: usable memory in GiB, CUDA compute capability, dense bf16 peak in TFLOP/s (vendor datasheets)."""

    name: str
    memory_gib: float
    capability: tuple[int, int]
    peak_tflops: float


# Memory is what the driver reports as total, a little under the name's figure.
GPUS = (
    Gpu("A100-40", 39.4, (8, 0), 312.0),
    Gpu("A100-80", 79.2, (8, 0), 312.0),
    Gpu("H100-80", 79.2, (9, 0), 989.0),
    Gpu("H200-141", 139.8, (9, 0), 989.0),
    Gpu("B200-180", 178.3, (10, 0), 2250.0),
)


def known(name: str) -> Gpu | None:
    """The GPU called `name` (case does not matter), or None."""
    return next((gpu for gpu in GPUS if gpu.name.lower() == name.lower()), None)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of the device that the driver calls `device_name` ("NVIDIA H100 80GB HBM3"); None if unknown."""
    words = device_name.upper().replace("-", " ").split()
    return next((gpu.peak_tflops for gpu in GPUS if gpu.name.split("-")[0] in words), None)


def mfu(tok_per_s_per_device: float, flops_per_token: int, device_name: str) -> float | None:
    """Model FLOPs utilisation, a share of the device's dense bf16 peak (PaLM, 2204.02311); None on an unknown device."""
    peak = peak_tflops(device_name)
    return tok_per_s_per_device * flops_per_token / (peak * 1e12) if peak else None


@dataclass(frozen=True)
class Visible:
    """One GPU that a process started here would see."""

    name: str
    memory_gib: float
    capability: tuple[int, int]


def visible_gpus() -> tuple[Visible, ...]:
    """The NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES lets through, from the driver; () without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for handle in _selected(pynvml):
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            found.append(Visible(name if isinstance(name, str) else name.decode(), memory, (major, minor)))
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def _selected(pynvml: Any) -> list[Any]:
    """Device handles in CUDA's order. An entry that CUDA would not accept ends the list, as it does for CUDA."""
    count = pynvml.nvmlDeviceGetCount()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    handles = []
    for entry in filter(None, (part.strip() for part in wanted.split(","))):
        if entry.isdigit() and int(entry) < count:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(entry)))
            continue
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
        except pynvml.NVMLError:
            break
    return handles


def has_cxx_compiler() -> bool:
    """Whether inductor can compile for the CPU: it asks for $CXX and nothing else if that is set, else g++ (macOS: clang++)."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")) is not None
