"""Saves and loads everything a run needs to go on, so that a crash at any moment leaves the last commit intact."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titan_cli.errors import ExitCode, TitanError
from titan_cli.runs import records
from titan_cli.runs.folder import COMMIT_MARKER, RunFolder, committed_steps, last_committed
from titan_cli.worker.report import lost_peer

NO_SPACE_BYTES = 2**20
# Everything of a parameter lies under its own name: the ranks of a pipeline have different ones, and the next layout others.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    run: RunFolder, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write checkpoints/step-N on all ranks and commit it. Returns its folder.

    `state` is plain data that `load` gives back. The marker is written last and holds it: a folder without the marker is
    torn and nobody picks it. Older commits beyond `keep` (0: none) are deleted after the new one stands.
    """
    folder = run.checkpoint(step)
    if dist.get_rank() == 0:
        _delete_torn(run)
        folder.mkdir(parents=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    try:
        state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:  # raised on every rank, whichever could not write
        # torch's zip writer hides the reason ("unexpected pos"), so ask the disk.
        if "No space left on device" not in str(error) and shutil.disk_usage(folder).free > NO_SPACE_BYTES:
            raise
        if dist.get_rank() == 0:
            _delete_torn(run)
        hint = f"free some space and repeat the line: step {last_committed(run)} is saved\n"
        hint += "checkpoint.keep=1 keeps only the newest; launch.runs_dir may lie on another disk"
        raise TitanError(f"no space left for the checkpoint {folder}", hint, ExitCode.WORKER_EXCEPTION) from error
    dist.barrier()
    if dist.get_rank() == 0:
        records.write_json(folder / COMMIT_MARKER, {"step": step, **state})
        _delete_old(run, keep)
    dist.barrier()
    return folder


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimizer from a committed checkpoint, of any layout of the same model. Returns the saved state."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    content: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        state_dict_loader.load(content, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:  # (torch's is a BaseException) the log has all of it
        if lost_peer(error):
            raise
        traceback.print_exc()
        last = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise TitanError(
            f"the checkpoint {folder} cannot be loaded: {last.strip()[:200]}",
            "if it is damaged, delete its folder to go on from the one before; if it is another run's (--fork), "
            "its model must have the same dimensions",
            ExitCode.WORKER_EXCEPTION,
        ) from error
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"], options=BY_NAME)
    return records.read_json(folder / COMMIT_MARKER)


def _delete_torn(run: RunFolder) -> None:
    committed = {run.checkpoint(step) for step in committed_steps(run)}
    for folder in run.checkpoints.glob("step-*"):
        if folder not in committed:
            shutil.rmtree(folder)


def _delete_old(run: RunFolder, keep: int) -> None:
    old = committed_steps(run)[:-keep] if keep else []
    for step in old:
        folder = run.checkpoint(step)
        (folder / COMMIT_MARKER).unlink()  # first, so that half a deletion is not a commit
        shutil.rmtree(folder)
