"""Which blocks lie on which rank of a pipeline, and which numbers of micro-batches its schedule takes. Pure, no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, groupby, pairwise
from math import prod

from titan_cli.models.common.decoder import Decoder

# Stages on each rank. The interleaved schedules take any number, which parallelism.pp_layers can ask for.
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# These split backward into the gradient of the input and that of the weights.
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model: blocks first to last (exclusive), and what lies before the first or after the last."""

    rank: int  # of the pipeline
    first: int
    last: int
    embedding: bool
    head: bool  # with the final norm

    def holds(self, name: str) -> bool:
        """Whether a parameter or module of this name ("layers.3.attention.wq.weight") belongs to the stage."""
        part, _, rest = name.partition(".")
        if part == "layers":
            return self.first <= int(rest.partition(".")[0]) < self.last
        return self.embedding if part == "tok_embeddings" else self.head

    def __str__(self) -> str:
        """Its parts in forward order: "embedding, layers.0 .. 16"."""
        last = f" .. {self.last - 1}" if self.last - self.first > 1 else ""
        blocks = f"layers.{self.first}{last}" if self.last > self.first else ""
        return ", ".join(filter(None, ("embedding" if self.embedding else "", blocks, "head" if self.head else "")))


def split(model: Decoder, seq_len: int, pp: int, schedule: str, layers: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages in forward order: with `layers` blocks each, or balanced over as many stages as the schedule wants.

    Raises ValueError with every reason why there are no such stages, and what to change.
    """
    per_rank = STAGES_PER_RANK[schedule] if pp > 1 else 1
    if layers is None:
        if pp * per_rank > model.n_layers:
            raise ValueError(_too_many(pp, per_rank, schedule, model.n_layers))
        flops, sizes = _costs(model, seq_len)
        layers = balance(flops, sizes, pp * per_rank)
    elif problems := _wrong_layers(layers, model.n_layers, pp, per_rank, schedule):
        raise ValueError("\n".join(problems))
    ends = list(accumulate(layers))
    n = len(ends)
    return tuple(
        Stage(owner(i, pp, schedule), first, last, embedding=i == 0, head=i == n - 1)
        for i, (first, last) in enumerate(pairwise([0, *ends]))
    )


def held_by(rank: int, stages: Sequence[Stage]) -> str:
    """What lies on a pipeline rank: "embedding, layers.0 .. 2; layers.8 .. 10"."""
    return "; ".join(str(stage) for stage in stages if stage.rank == rank)


def owner(stage: int, pp: int, schedule: str) -> int:
    """The pipeline rank of a stage, as torch's schedules place them: round and round, or there and back."""
    return min(stage, 2 * pp - 1 - stage) if schedule in V_SHAPED else stage % pp


def balance(flops: Sequence[int], sizes: Sequence[int], n: int) -> list[int]:
    """Blocks of each of n contiguous groups, at least one, for blocks of these costs.

    The largest group's FLOPs are as few as possible, because every group waits for it; then its size, because memory is
    what the fullest rank has. Of what is left to choose, early groups get less: a pipeline keeps the activations of more
    micro-batches there. Exact, by bisection over both limits (a greedy filling decides whether limits can be kept).
    """

    def fewest(most_flops: float, most_size: float) -> list[int]:
        """For each block, how few groups hold it and all later ones; then a 0 for the end."""
        groups, work, size = 0, math.inf, math.inf
        needed = [0]
        for f, s in zip(reversed(flops), reversed(sizes), strict=True):
            work, size = work + f, size + s
            if work > most_flops or size > most_size:
                groups, work, size = groups + 1, f, s
            needed.append(groups)
        return needed[::-1]

    def least(costs: Sequence[int], limits: Callable[[int], tuple[float, float]]) -> int:
        """The lowest limit, never below one block, with which n groups are enough."""
        allowed = range(max(costs), sum(costs) + 1)
        return allowed[bisect_left(allowed, True, key=lambda most: fewest(*limits(most))[0] <= n)]

    most_flops = least(flops, lambda most: (most, math.inf))
    most_size = least(sizes, lambda most: (most_flops, most))
    needed = fewest(most_flops, most_size)
    before, size_before = [0, *accumulate(flops)], [0, *accumulate(sizes)]
    ends = [0]
    for later in reversed(range(n)):  # groups after this one
        first = ends[-1]
        possible = [
            end
            for end in range(first + 1, len(flops) - later + 1)
            if before[end] - before[first] <= most_flops
            and size_before[end] - size_before[first] <= most_size
            and needed[end] <= later
        ]
        share = before[first] + (before[-1] - before[first]) // (later + 1)
        ends.append(max((end for end in possible if before[end] <= share), default=possible[0]))
    return [end - first for first, end in pairwise(ends)]


def flops_per_token(model: Decoder, seq_len: int, stages: Sequence[Stage]) -> list[int]:
    """Training FLOPs of each stage for one token of a sequence of `seq_len`; together the model's `flops_per_token`."""
    flops, _ = _costs(model, seq_len, ends=False)
    return [sum(flops[s.first : s.last]) + s.head * model.head_flops_per_token() for s in stages]


def in_words(stages: Sequence[Stage]) -> str:
    """Numbers of blocks, three and more equal neighbours together: "7, 14 x 8, 7"."""
    runs = [(str(blocks), len(list(same))) for blocks, same in groupby(s.last - s.first for s in stages)]
    return ", ".join(f"{n} x {blocks}" if n > 2 else ", ".join(n * [blocks]) for blocks, n in runs)


def takes(schedule: str, pp: int, stages: int, micro_batches: int) -> bool:
    """Whether torch's schedule runs that many micro-batches (torch.distributed.pipelining.schedules, 2.11 to 2.14)."""
    if schedule in INTERLEAVED:  # in rounds of equal size, at least pp each
        return micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= stages or schedule not in ("1F1B", "DualPipeV")


def check_micro_batches(schedule: str, pp: int, stages: int, micro_batches: int, sequences: int) -> None:
    """Raises ValueError, with the nearest numbers, if the schedule does not run that many micro-batches.

    `sequences` is the size of one over all data-parallel ranks.
    """
    if takes(schedule, pp, stages, micro_batches):
        return
    below = next((n for n in range(micro_batches - 1, 0, -1) if takes(schedule, pp, stages, n)), 0)
    above = next(n for n in count(micro_batches + 1) if takes(schedule, pp, stages, n))
    wanted = f"at least {stages}, one for each stage"
    if schedule in INTERLEAVED:
        wanted = f"a number that divides into {micro_batches // pp} equal rounds (of at least pp {pp})"
    nearest = " or ".join(str(n * sequences) for n in (below, above) if n)
    raise ValueError(
        f"parallelism.pp_schedule = {schedule} with pp {pp} needs micro-batches, {wanted}; a step has {micro_batches}\n"
        f"    Nearest: training.global_batch_size = {nearest}."
    )


def bubble(schedule: str, pp: int, stages: int, micro_batches: int) -> str:
    """The share of a step in which a rank waits, if all stages take equally long; empty for schedules that split backward.

    (pp - 1) / (stages of a rank x micro-batches + pp - 1), as in 2104.04473. What a split backward saves depends on how
    the compiler splits it.
    """
    if schedule in SPLIT_BACKWARD:
        return ""
    per_rank = stages // pp
    waits = pp - 1 + (per_rank - 1) * max(0, pp - micro_batches)  # an incomplete round waits again before each next stage
    share = f"{waits / (per_rank * micro_batches + waits):.0%}".replace("%", " %")
    if micro_batches < pp:
        return f"{share}: {micro_batches} micro-batches for {pp} ranks; a larger training.global_batch_size makes it less"
    stage = f"{per_rank} stages a rank x " if per_rank > 1 else ""
    return f"{share} = (pp {pp} - 1) / ({stage}{micro_batches} micro-batches + pp {pp} - 1)"


def _costs(model: Decoder, seq_len: int, ends: bool = True) -> tuple[list[int], list[int]]:
    """FLOPs for one token, and parameters, of each block. The ends of the model belong to the first and the last block."""
    flops, sizes = [], []
    for kind, n in model.block_kinds():
        flops += n * [model.block_flops_per_token(kind, seq_len)]
        sizes += n * [sum(map(prod, model.block_shapes(kind).values()))]
    if ends:
        table = model.vocab_size * model.dim
        flops[-1] += model.head_flops_per_token()  # looking up an embedding costs nothing
        sizes[0] += table
        sizes[-1] += table
    return flops, sizes


def _too_many(pp: int, per_rank: int, schedule: str, n_layers: int) -> str:
    others = [name for name, n in STAGES_PER_RANK.items() if pp * n <= n_layers]
    instead = f", or parallelism.pp_schedule={' or '.join(others)}" if others else ""
    most = n_layers // per_rank
    possible = f"pp can be 1 to {most}" if most > 1 else "pp can be 1"
    return (
        f"parallelism.pp = {pp} with {schedule} makes {pp * per_rank} stages, and the model has {n_layers} blocks\n"
        f"    {possible} with {schedule}{instead}."
    )


def _wrong_layers(layers: Sequence[int], n_layers: int, pp: int, per_rank: int, schedule: str) -> list[str]:
    problems, n = [], len(layers)
    if pp > 1 and schedule in INTERLEAVED:
        wrong, wanted = not n or n % pp, f"a multiple of {pp}"
    else:
        wrong, wanted = n != pp * per_rank, str(pp * per_rank)
    if wrong:
        problems.append(
            f"parallelism.pp_layers has {n} stages, and pp {pp} with {schedule} has {wanted}\n"
            f"    Give {wanted} numbers, or leave parallelism.pp_layers unset to balance the stages."
        )
    if sum(layers) != n_layers:
        problems.append(
            f"parallelism.pp_layers adds up to {sum(layers)} blocks, and the model has {n_layers}\n"
            f"    Change a number by {abs(n_layers - sum(layers))}, or leave parallelism.pp_layers unset to balance the stages."
        )
    if empty := [str(i) for i in range(1, n - 1) if not layers[i]]:
        problems.append(
            f"parallelism.pp_layers gives stage {', '.join(empty)} (of 0 to {n - 1}) no block\n"
            "    Only the first stage, with the embedding, and the last, with the head, can be without."
        )
    return problems
