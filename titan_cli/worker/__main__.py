"""One rank of a run, started by torchrun as `python -m titan_cli.worker RUN_DIR`. Sets the stage before torch loads."""

from __future__ import annotations

import fcntl
import os
import sys
import warnings
from pathlib import Path

from titan_cli.errors import ExitCode, TitanError
from titan_cli.orphans import end_with_parent
from titan_cli.runs.folder import RunFolder
from titan_cli.worker.report import Reporter, lost_peer
from titan_cli.worker.stop import StopRequest


def main() -> int:
    """Run the rank that torchrun's environment names. Returns the process's exit status: 0 unless it failed."""
    run, rank = RunFolder(Path(sys.argv[1])), int(os.environ["RANK"])
    if not run.attempts():
        sys.exit(f"{run.path} is not a run: `titan train` makes the folder that a worker reads")
    attempt = run.attempts()[-1]
    redirect(attempt.rank_log(rank))
    stop = StopRequest()
    stop.install()
    end_with_parent(os.getppid())
    hold(run.workers_lock)
    report = Reporter(attempt, rank)
    report.phase("starting", "importing torch", pid=os.getpid())
    try:
        from titan_cli.worker.train import train

        code = train(run, report, stop)
        report.event("exit", f"exit {int(code)}", code=int(code))
        leave_group()
    except BaseException as exception:
        code = ExitCode.WORKER_EXCEPTION
        try:
            if isinstance(exception, TitanError):
                print(f"error: {exception.message}\n{exception.hint}", file=sys.stderr)
            else:
                sys.excepthook(type(exception), exception, exception.__traceback__)
            sys.stderr.flush()
            code, peer = classify(exception)
            report.error(exception, code, peer)
        finally:
            # Not sys.exit: a failed collective can leave threads that never join, and the others wait for this rank's end.
            os._exit(int(code))
    return 0


def hold(lock: Path) -> None:
    """Share a lock until this process ends: a launcher that finds it held waits, and does not start beside us."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)  # closed, and so released, by the process's end
    fcntl.flock(fd, fcntl.LOCK_SH)


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
    text = str(exception)
    if isinstance(exception, TitanError):
        return exception.code, False
    if isinstance(exception, ImportError):  # perhaps torch's own, so do not ask it
        return ExitCode.WORKER_EXCEPTION, False
    import torch
    import torch.distributed as dist

    if any(words in text for words in ("Timed out waiting", "timed out after", "Watchdog caught collective operation timeout")):
        return ExitCode.HANG, True
    if isinstance(exception, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return ExitCode.OUT_OF_MEMORY, False
    return ExitCode.WORKER_EXCEPTION, isinstance(exception, dist.DistError) or lost_peer(exception)


if __name__ == "__main__":
    sys.exit(main())
