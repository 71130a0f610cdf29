"""One rank of a run, started by torchrun as `python -m titan_cli.worker RUN_DIR`. Sets the stage before torch loads."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from titan_cli.errors import ExitCode, TitanError
from titan_cli.runs.folder import RunFolder
from titan_cli.worker.report import Reporter
from titan_cli.worker.stop import StopRequest, end_with_parent


def main() -> int:
    """Run the rank that torchrun's environment names. Returns the process's exit status: 0 unless it failed."""
    run, rank = RunFolder(Path(sys.argv[1])), int(os.environ["RANK"])
    attempt = run.attempts()[-1]
    redirect(attempt.rank_log(rank))
    stop = StopRequest()
    stop.install()
    end_with_parent()
    report = Reporter(attempt, rank)
    report.phase("starting", "importing torch", pid=os.getpid())
    try:
        from titan_cli.worker.train import train

        code = train(run, report, stop)
        report.event("exit", f"exit {int(code)}", code=int(code))
        leave_group()
    except BaseException as exception:
        code, peer = classify(exception)
        report.error(exception, code, peer)
        sys.excepthook(type(exception), exception, exception.__traceback__)
        sys.stderr.flush()
        # Not sys.exit: a failed collective can leave threads that never join, and the others wait for this rank's end.
        os._exit(int(code))
    return 0


def redirect(log: Path) -> None:
    """Send both streams to the rank's log, below Python, so that C++ and child processes write there too."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def leave_group() -> None:
    import torch.distributed as dist

    with warnings.catch_warnings(action="ignore"):
        dist.destroy_process_group()


def classify(exception: BaseException) -> tuple[ExitCode, bool]:
    """The exit code of an exception, and whether it only shows that another rank is gone."""
    import torch
    import torch.distributed as dist

    text = str(exception)
    if isinstance(exception, TitanError):
        return exception.code, False
    if isinstance(exception, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return ExitCode.OUT_OF_MEMORY, False
    lost_peer = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "remote process exited")
    peer = isinstance(exception, dist.DistError) or any(words in text for words in lost_peer)
    return ExitCode.WORKER_EXCEPTION, peer


if __name__ == "__main__":
    sys.exit(main())
