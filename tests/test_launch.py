"""What is started and how its end is read: pure functions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan_cli import hardware
from titan_cli.errors import TitanError
from titan_cli.launch import checks, command
from titan_cli.launch.process import _killed_rank
from titan_cli.models.llama3.config import FLAVORS
from titan_cli.plan.target import build
from titan_cli.runs.records import LogTail


def test_the_command_line() -> None:
    world = build("llama3-debug-2d", None, []).world
    assert command.torchrun(Path("/runs/r"), world, ["--log-dir", "x"]) == [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=4", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0", "--log-dir", "x",
        "-m", "titan_cli.worker", "/runs/r",
    ]  # fmt: skip


def test_what_the_user_has_set_stays() -> None:
    added = command.environment({"OMP_NUM_THREADS": "7"}, "cpu", ranks=2, cores=8)
    assert "OMP_NUM_THREADS" not in added
    assert command.environment({}, "cpu", ranks=2, cores=8)["OMP_NUM_THREADS"] == "4"
    assert command.environment({}, "cpu", ranks=16, cores=8)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in command.environment({}, "cuda", ranks=8, cores=64)


def test_secrets_are_not_recorded() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "s", "TORCH_API_KEY": "s", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert command.recorded(environ) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"}


REPORT = """
Failures:
[1]:
  rank      : 2 (local_rank: 2)
  exitcode  : 10 (pid: 1)
[2]:
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 2)  (SIGKILL)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 10 (pid: 3)
"""


def test_the_killed_rank_is_read_from_torchruns_report() -> None:
    assert _killed_rank(REPORT.format(code=-9)) == (3, 9)
    assert _killed_rank(REPORT.format(code=-15)) is None, "SIGTERM is what we and torchrun send"
    assert _killed_rank("") is None


def test_a_flooded_log_gives_its_last_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    tail = LogTail(path, at_most=100)
    assert tail.read() == []
    path.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert tail.read()[-1] == "line 9999"
    with path.open("a") as file:
        file.write("half")
    assert tail.read() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes", "2"], "launch.nodes"),
        (["--nproc_per_node=2"], "launch.gpus_per_node"),
        (["--max-restarts=3"], "repeat the line"),
    ],
)
def test_torchrun_options_that_are_titans(words: list[str], says: str) -> None:
    with pytest.raises(TitanError) as refused:
        checks.torchrun_arguments(words)
    assert says in refused.value.hint


def test_other_torchrun_options_pass() -> None:
    checks.torchrun_arguments(["--rdzv-endpoint=127.0.0.1:0", "--log-dir", "x", "--tee", "3"])


def test_offline_is_found_without_asking_the_network(tmp_path: Path) -> None:
    target = build("llama3-debug", None, ["data.source=c4"])
    (problem,) = checks.text(target, {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in problem.what
    (problem,) = checks.text(target, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "http://127.0.0.1:9" in problem.what
    assert checks.text(build("llama3-debug", None, ["data.source=c4", f"data.path={tmp_path}"]), {}) == []


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("cpu", None),
        ("NVIDIA L4", None),
    ],
)
def test_the_peak_of_a_device(device: str, peak: float | None) -> None:
    assert hardware.peak_tflops(device) == peak


def test_mfu_is_a_share_of_the_devices_peak() -> None:
    # Llama 3 8B's width in 8 layers: 6 x (2.795 B parameters - 0.525 B of the embedding) + 6 x 8 x 32 x 256 x 8,192
    flops = replace(FLAVORS["8b"], n_layers=8).flops_per_token(8192)
    assert flops == pytest.approx(6 * 2.2705e9 + 6 * 8 * 32 * 256 * 8192, rel=1e-3)
    assert hardware.mfu(34_865, flops, "NVIDIA H200") == pytest.approx(34_865 * flops / 989e12)
    assert hardware.mfu(34_865, flops, "NVIDIA H200") == pytest.approx(0.594, abs=0.001)
    assert hardware.mfu(34_865, flops, "cpu") is None


def test_devices_are_known_by_name() -> None:
    gpu = hardware.known("h100-80")
    assert gpu
    assert gpu.name == "H100-80"
    assert hardware.known("H100") is None
