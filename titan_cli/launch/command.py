"""What is started: torchrun's command line and the environment it gets. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_cli.config.derive import Resolved


def torchrun(run_dir: Path, world: Resolved, extra: Sequence[str] = ()) -> list[str]:
    """The command that starts one worker for each rank of this machine. `extra` are the user's own torchrun arguments.

    The rendezvous listens on a free port of the loopback interface, so two runs on one machine cannot collide, and
    restarts are the launcher's business, not torchrun's.
    """
    options = [
        "--nnodes=1",
        f"--nproc-per-node={world.ranks_per_node}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *options, *extra, "-m", "titan_cli.worker", str(run_dir)]


def environment(given: Mapping[str, str], device: str, ranks: int, cores: int) -> dict[str, str]:
    """The variables titan adds to the user's environment; a variable that the user has set is left alone."""
    wanted = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cuda":
        # Segments that grow avoid fragmentation, which otherwise costs several GiB at long sequences.
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    else:
        # torchrun gives each of several workers one thread; on a CPU, share out the cores instead.
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
        # Waiting OpenMP threads sleep. Spinning is 15 % faster on an idle machine and 13 times slower beside one busy program.
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
        # gloo would look the host's name up to find an interface, which fails on a laptop that is off its network.
        wanted["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {name: value for name, value in wanted.items() if name not in given}


# Written to env.json: settings that change what a run does. Never the whole environment, which holds secrets.
_RECORDED = (
    "CUDA_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "GLOO_",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "SLURM_JOB",
    "SLURM_NODE",
    "CXX",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that env.json may hold."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_RECORDED) and not any(word in name.upper() for word in _SECRET)
    }
