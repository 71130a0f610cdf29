"""Asked to stop by a signal: every rank stops after the same step. No torch at import, the handler stands before it loads."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop. Later signals add nothing: the launcher alone decides to end it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def vote(self) -> Vote:
        """Begin asking all ranks; collective, so every rank calls it at the same place."""
        return Vote(self)


class Vote:
    """Signals reach ranks at different moments; a maximum over ranks makes it one decision.

    The all-reduce is one number on the CPU group and runs beside the step: nothing waits for it but `result`.
    """

    def __init__(self, request: StopRequest) -> None:
        import torch
        import torch.distributed as dist

        self._asked: torch.Tensor = torch.tensor(request.signal or 0)
        self._work: Any = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> int:
        """The signal that some rank had received when the vote began; 0: none."""
        self._work.wait()
        return int(self._asked)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent process dies, so that no worker outlives a killed launcher."""
    import ctypes

    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() == 1:  # it died before we asked
            os.kill(os.getpid(), signal.SIGTERM)
