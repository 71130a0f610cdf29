"""Runs a function on several gloo ranks of this machine: forked from one server that has torch loaded, met through a file.

No ports, so tests cannot collide; a rank that fails ends the others at once and its traceback is the test's error.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["titan_cli.worker.train"])


class RankFailed(AssertionError):
    """One rank raised or died."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in a process group of `world` ranks; the results by rank. All must be picklable."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, args=(theirs, rank, world, Path(folder) / "store", function, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in results]):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if failed:
                raise RankFailed(f"rank {rank} of {len(pipes)}:\n{results[rank]}")
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, rank: int, world: int, store: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(minutes=5)
        )
        pipe.send_bytes(pickle.dumps((False, function(*args))))  # by value: tensors outlive the rank
        dist.barrier()  # a rank that leaves early breaks the connections that others still use
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
    os._exit(0)  # destroying the group can hang once something was compiled
