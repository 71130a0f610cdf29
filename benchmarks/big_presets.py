"""Prints the CPU seconds (user + system, with the imports) that looking at the presets for hundreds of GPUs takes.

    python -m benchmarks.big_presets        # from the top of the checkout

Each preset is built at full size and takes two reduced steps, on its first and on its last rank (tests/fake_world.py).
Exit 0 if none needs more than LIMIT.
"""

from __future__ import annotations

import resource
from multiprocessing import get_context

from tests.fake_world import full, look

PRESETS = ("llama3-70b-2d", "llama3-70b-3d", "llama3-405b-4d")
LIMIT = 60.0


def main() -> int:
    slow = False
    for preset in PRESETS:
        world_size = full(preset).world.world_size
        seconds = [cpu_seconds(preset, rank) for rank in (0, world_size - 1)]
        slow |= sum(seconds) > LIMIT
        print(f"{preset}: {world_size} ranks, {sum(seconds):.1f} s = {' + '.join(f'{s:.1f}' for s in seconds)}", flush=True)
    return int(slow)


def cpu_seconds(preset: str, rank: int) -> float:
    """What a fresh process uses that looks at one rank. Raises RuntimeError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = get_context("spawn").Process(target=look, args=(preset, rank))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"rank {rank} of {preset} ended with {process.exitcode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
