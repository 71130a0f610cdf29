"""No process outlives the one that started it: Linux is asked to send SIGTERM when the parent dies. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here, not in `end_with_parent`: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int) -> None:
    """Ask for SIGTERM when the process `parent` dies; end at once if it has died already. Linux only, elsewhere nothing."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
