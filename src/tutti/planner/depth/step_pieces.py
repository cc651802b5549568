"""The pieces of a step: numbers that add up to the times and the bytes of any layout.

first     everything before the units                  embeddings
layers    one unit of each run of repeated layers; or every module of a model whose layers do not repeat
last      everything behind them                       norm, logits, loss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from tutti.costs.kernel_seconds import ARITHMETIC, LAUNCHES, MEMORY
from tutti.passes.bucket import LARGE_BUCKET_NBYTES
from tutti.planner.depth.dropped_values import Drop

# Axes whose collectives belong to a piece; those over `data` belong to the whole step, and so do sums of
# gradients over `seq` and `expert`.
MODEL_AXES = frozenset({"tensor", "seq", "expert"})


@dataclass(frozen=True)
class Piece:
    """What one piece needs of a rank, under `zero=0`.

    forward, backward: seconds of a micro-batch, collectives over the model's axes included; `exchange` is
    their part of collectives, `ahead` that of the forward. arithmetic, memory, launches: what the seconds of
    kernels are for, as `limits` of an `Estimate`. casting: seconds of the forward on weights alone.
    adding: seconds to add gradients to the sums of earlier micro-batches. cast_launches, add_launches: the
    launches of both, which they take at least; apart_launches of those that no matmul does beside its work.
    update: seconds of its bytes; update_launches: more seconds, of its kernels that last no longer than their
    launch.
    kept: bytes of a micro-batch from forward to backward. delayed: those that gradients of weights read.
    cast: bytes of weights in the dtype of the forward, for all micro-batches. parameters, slots: bytes of
    state; slots with buffers. gradients: bytes that the update reads; over_seq, over_expert: those of them
    that add up over `seq` and `expert`, too. split_parameters, split_gradients, split_read: the parts of
    `parameters`, `gradients` and `read` of weights that `expert` splits. sent, sent_across: bytes over the
    model's axes, within a host and to others. joint, joint_sent, joint_across: the parts of `exchange` and of
    these bytes that reduce gradients, which micro-batches add up first. late_sent, late_across: more bytes,
    of gradients on their way to the update.
    once: bytes of results of collectives in the forward, which no backward recomputes. moved_again: seconds
    of the others in the forward; again_sent, again_across: the bytes that these send. inputs: the part of
    `backward` on which an earlier piece depends.
    read: bytes of weights in the dtypes in which the forward reads them; `read_again` of those that the
    backward reads, too, `recomputed` of these and those that a second forward reads. num_sums, num_gathers,
    num_again, num_recomputed: buckets of `gradients` and of these bytes; a part of one that other pieces
    share. within: the most bytes above those that it and earlier pieces keep, and above gradients of later
    ones; `passing` without its own gradients, each of which is summed and gone.
    """

    forward: float = 0.0
    backward: float = 0.0
    exchange: float = 0.0
    ahead: float = 0.0
    arithmetic: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    casting: float = 0.0
    adding: float = 0.0
    cast_launches: float = 0.0
    add_launches: float = 0.0
    apart_launches: float = 0.0
    update: float = 0.0
    update_launches: float = 0.0
    kept: float = 0.0
    cast: float = 0.0
    parameters: float = 0.0
    slots: float = 0.0
    gradients: float = 0.0
    over_seq: float = 0.0
    over_expert: float = 0.0
    split_parameters: float = 0.0
    split_gradients: float = 0.0
    split_read: float = 0.0
    sent: float = 0.0
    sent_across: float = 0.0
    joint: float = 0.0
    joint_sent: float = 0.0
    joint_across: float = 0.0
    late_sent: float = 0.0
    late_across: float = 0.0
    once: float = 0.0
    moved_again: float = 0.0
    again_sent: float = 0.0
    again_across: float = 0.0
    again: float = 0.0
    inputs: float = 0.0
    delayed: float = 0.0
    read: float = 0.0
    read_again: float = 0.0
    recomputed: float = 0.0
    num_sums: float = 0.0
    num_gathers: float = 0.0
    num_again: float = 0.0
    num_recomputed: float = 0.0
    within: float = 0.0
    passing: float = 0.0

    def __add__(self, other: Piece) -> Piece:
        """Both; they do not work at the same time."""
        return total((self, other))

    @property
    def limits(self) -> dict[str, float]:
        """Seconds of kernels by what they are for; nothing if that is not known."""
        return {limit: getattr(self, limit) for limit in (ARITHMETIC, MEMORY, LAUNCHES)}

    def times(self, factor: float) -> Piece:
        """Each number times `factor`."""
        *sums, within, passing = _numbers(self)
        return Piece(*[*(factor * x for x in sums), within, passing])


_numbers = attrgetter(*(f.name for f in fields(Piece)))


def total(pieces: Iterable[Piece]) -> Piece:
    """All of these pieces, which work one after the other: of `within` and `passing` it has the most."""
    columns = list(zip(*map(_numbers, pieces), strict=True))
    if not columns:
        return Piece()
    *sums, within, passing = columns
    return Piece(*[*map(sum, sums), max(within), max(passing)])


@dataclass(frozen=True)
class TiedWeight:
    """A weight that two pieces read, by their numbers in the order of the forward.

    nbytes: of the weight. read: bytes that the later one reads, in its dtype. gradient: bytes of its
    gradient.
    """

    first: int
    last: int
    nbytes: float
    read: float
    gradient: float


# Of each run of layers, the pieces of one, and the number of layers.
Layers = tuple[tuple[tuple[Piece, ...], int], ...]


@dataclass(frozen=True)
class Blocks:
    """The pieces of a step.

    first, last: pieces. layers: (the pieces of one layer, number of layers) for each run, in order.
    message: bytes of a value between two layers, or two pieces of one.
    messages: bytes of all values at the end of each piece but the last, if layers differ.
    gradient: bytes of the largest gradient of a weight. batch: bytes of all samples, of which each rank has a
    copy. drops: of each run, what each piece may recompute (`dropped_values.py`). tied: weights of two
    pieces, not of repeated layers. among_many: `first`, `layers` and `last` with the large buckets that many
    GPUs have.
    """

    first: Piece
    layers: Layers
    last: Piece
    message: float
    drops: tuple[tuple[tuple[Drop, ...], ...], ...] = ()
    messages: tuple[float, ...] = ()
    gradient: float = 0.0
    batch: float = 0.0
    tied: tuple[TiedWeight, ...] = ()
    among_many: tuple[Piece, Layers, Piece] | None = None

    def filling(self, most_nbytes: float) -> Blocks:
        """The pieces with buckets of at most so many bytes."""
        if self.among_many is None or most_nbytes < LARGE_BUCKET_NBYTES:
            return self
        first, layers, last = self.among_many
        return replace(self, first=first, layers=layers, last=last)

    def sequence(self) -> Iterator[Piece]:
        """The pieces of all layers, in order."""
        for pieces, count in self.layers:
            for _ in range(count):
                yield from pieces
