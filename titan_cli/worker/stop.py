"""Asked to stop by a signal: every rank stops after the same step. No torch at import, the handler stands before it loads."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop. Later signals add nothing: the launcher alone decides to end it at once."""

    def __init__(self) -> None:
        self.signal: int = 0

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def vote(self) -> int:
        """The signal that some rank has received; 0: none. Collective.

        Signals reach ranks at different moments; a maximum over ranks makes it one decision. One number over gloo: asked
        at the end of a step, while a GPU still runs the optimizer, it costs nothing.
        """
        import torch
        import torch.distributed as dist

        asked = torch.tensor(self.signal)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return int(asked)
