"""The pieces of a model in the stages of a layout.

    pieces      first | layer layer layer layer | last
    stages      |------ 0 ------|------- 1 --------|        balanced by their time and their messages
    segments    |---------|-----------|-----------|         of `remat=full`: the backward makes each again

The times and the bytes of a stage are those of its pieces with what the layout adds: recomputation, sums over
micro-batches, gathers of weights and sums of gradients over `data`, `seq` and `expert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from tutti.costs.collective_seconds import collective_seconds
from tutti.costs.rank_groups import RankGroups
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.layout.budget import Budget
from tutti.passes.bucket import bucket_nbytes
from tutti.pipeline.micro_batches.moments import GRADIENTS_FROM
from tutti.pipeline.stages.balance import balanced
from tutti.planner.depth.piece_clock import PieceWork, played
from tutti.planner.depth.recomputed_segments import RecomputedSegments, segments_of
from tutti.planner.depth.step_pieces import Blocks, Piece, total
from tutti.planner.depth.thinned_layers import thinned
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.simulator import Timeline


class CrossingWeight(NamedTuple):
    """A weight that two pipeline ranks read: the first sends bytes of it to the later one before all
    micro-batches, which sends bytes of its gradient back."""

    first: int
    later: int
    read: float
    back: float


class GradientSum(NamedTuple):
    """A sum of gradients over `axes`: so many bytes in so many buckets, by collectives of a kind."""

    axes: tuple[str, ...]
    kind: str
    nbytes: float
    num_buckets: float


# Axes, and bytes of weights that ranks along them have parts of.
Parts = tuple[tuple[tuple[str, ...], float], ...]


class StagedPieces:
    """The pieces of `blocks` under a layout.

    cut: of each stage. begins: the number of the first piece of each. stage_pieces, rank_pieces: the sum of
    each stage and of each pipeline rank. bucket_nbytes: the most bytes of a bucket of gradients or weights.
    ways: the parts of state under `zero`, but for weights that `expert` splits. summing_split: the axes over
    which gradients of these add up.
    """

    def __init__(self, blocks: Blocks, layout: Layout, machine: PricedMachine) -> None:
        self.layout, self.machine = layout, machine
        budget = Budget.parse(layout.remat)
        share = budget.share if budget else None
        self.groups = RankGroups(layout.mesh, machine.topology.host_size)
        self._over: dict[tuple[tuple[str, ...], str, float, float], float] = {}
        self.ways = layout.zero_ways
        self.summing_split = tuple(a for a in layout.zero_axes if a != "expert")
        self.pipe = layout.axes.get("pipe", 1)
        # Weights in the dtype of the forward: micro-batches share them; a budget drops them first.
        self.shares_casts = layout.in_time and layout.zero < 3
        self.drops_casts = share is not None
        gathers = layout.zero == 3 or layout.in_time
        summing = self.groups[self.summing].size
        self.bucket_nbytes = bucket_nbytes(summing, on_gpus=not machine.shares_memory)
        blocks = blocks.filling(self.bucket_nbytes)
        thin = blocks if share is None else thinned(blocks, share, gathers=gathers)
        self.blocks = replace(
            thin,
            first=self._fitted(thin.first),
            layers=tuple((tuple(map(self._fitted, pieces)), n) for pieces, n in thin.layers),
            last=self._fitted(thin.last),
        )

    def _fitted(self, piece: Piece) -> Piece:
        """A piece with casts of weights, and sums over micro-batches, as the layout has them.

        Casts of parts of weights come before their gathers. Micro-batches share casts, which are then no part
        of `forward`.
        """
        zero = self.layout.zero
        casting, adding = piece.casting, 0.0
        if zero == 3:
            casting = max(self.part_of_weights(piece, casting), piece.cast_launches)
        each = 0.0 if self.layout.in_time else casting
        if self.layout.micro > 1:
            if zero >= GRADIENTS_FROM:
                adding = max(self.part_of_gradients(piece, piece.adding), piece.add_launches)
            else:
                adding = max(piece.adding, piece.apart_launches)
                piece = self._reduced_once(piece)
        return replace(
            piece,
            forward=piece.forward - piece.casting + each,
            backward=piece.backward + adding,
            casting=casting,
        )

    def _reduced_once(self, piece: Piece) -> Piece:
        """A piece whose gradients are reduced over the model's axes behind the last micro-batch."""
        return replace(
            piece,
            backward=piece.backward - piece.joint,
            exchange=piece.exchange - piece.joint,
            update=piece.update + piece.joint,
            sent=piece.sent - piece.joint_sent,
            sent_across=piece.sent_across - piece.joint_across,
            late_sent=piece.late_sent + piece.joint_sent,
            late_across=piece.late_across + piece.joint_across,
        )

    def part_of_weights(self, piece: Piece, amount: float) -> float:
        """A rank's part of an amount that belongs to the weights of a piece, if `zero` shards it."""
        return self._part(amount, piece.split_parameters, piece.parameters)

    def part_of_gradients(self, piece: Piece, amount: float) -> float:
        """A rank's part of an amount that belongs to the gradients of a piece, if `zero` shards it."""
        return self._part(amount, piece.split_gradients, piece.gradients)

    def _part(self, amount: float, split: float, whole: float) -> float:
        """`split` of `whole` are bytes of weights that `expert` splits."""
        own = amount * split / whole if split else 0.0
        return (amount - own) / self.ways + own / self.groups[self.summing_split].size

    def backwards(self, stage: int, *, last: bool = False) -> list[PieceWork]:
        """The backward of each piece of a stage, from the last to the first, with sums after each if each
        micro-batch has them, or the `last` one."""
        sums = last or self.layout.zero >= GRADIENTS_FROM or self.layout.micro == 1
        late = last and self.halves  # the other half is behind the stages before this one
        made = []
        for piece in reversed(self._recomputing(stage)):
            moved = piece.exchange - piece.ahead
            gather = self.gathered(piece, again=True) if self.pipe == 1 else 0.0
            total = self.reduced(piece) if sums else 0.0
            numbers = self.num_again(piece), self._num_sums(piece)
            work = piece.backward - (piece.inputs if late else moved)
            made.append(PieceWork(max(0.0, work), 0.0 if late else moved, gather, total, *numbers))
        return made

    @cached_property
    def summing(self) -> tuple[str, ...]:
        """The axes over which most gradients add up at once, and `zero` shards state; some gradients add up
        over fewer."""
        return self.layout.zero_axes

    @property
    def sums_any(self) -> bool:
        """Whether ranks sum gradients."""
        return self.groups[self.summing].size > 1

    @property
    def sums_beside(self) -> bool:
        """Whether the last micro-batch reduces the sums of all: not in memory that ranks share."""
        shared = self.machine.shares_memory and self.groups[self.summing].num_hosts == 1
        return self.layout.in_time and self.layout.zero < GRADIENTS_FROM and not shared

    def summed_late(self, rank: int, timeline: Timeline | None = None) -> float:
        """Seconds that the sums of gradients over all micro-batches add to a pipeline rank's backwards.

        Those of a stage run beside the backwards of others until the next stage's last one. Without a
        timeline that is one round of the other micro-batches later.
        """
        if self.layout.zero >= GRADIENTS_FROM or not self.sums_any:
            return 0.0
        if not self.sums_beside:
            return self.reduced(self.rank_pieces[rank])
        stages = [s for s in reversed(range(len(self.cut))) if self.rank_of(s) == rank]
        more = left = 0.0
        for stage, later in pairwise([*stages, None]):
            assert stage is not None
            last, stays = self.backwards(stage, last=True), later is not None
            times = played(last, lags=stays, one_link=self.one_link, stays=stays)
            more += times.seconds - sum(work.kernels + work.exchange for work in last) + left
            if later is not None:
                left = max(0.0, times.left - self._between(stage, later, timeline))
        return more

    def _between(self, stage: int, later: int, timeline: Timeline | None) -> float:
        """Seconds between the last backwards of two stages of a rank."""
        if timeline is None:
            rounds = min(self.pipe, self.layout.micro) - 1
            return rounds * self.stage_pieces[later].backward
        row = timeline.rows[self.rank_of(stage)]
        ends = {s.action.stage: s for s in row if s.action.kind in ("B", "W")}
        return max(0.0, ends[later].start - ends[stage].end)

    @property
    def one_link(self) -> bool:
        """Whether the collectives of the model's axes take the link of sums of gradients."""
        axes = tuple(a for a in ("expert", "seq", "tensor") if a in self.layout.axes)
        return (self.groups[axes].num_hosts == 1) == (self.groups[self.summing].num_hosts == 1)

    def gathered(self, piece: Piece, *, again: bool = False) -> float:
        """Seconds to gather the weights of a piece from all parts, in the dtypes of the forward."""
        if self.layout.zero < 3:
            return 0.0
        count = self.num_again(piece) if again else piece.num_gathers
        return self._from_parts(self.read_parts(piece, again=again), count)

    def renewed(self, piece: Piece) -> float:
        """Seconds to gather the weights that each rank has updated a part of."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self._from_parts(self.renewed_parts(piece), piece.num_sums)

    def _from_parts(self, parts: Parts, count: float) -> float:
        """Seconds to gather these bytes in so many buckets."""
        whole = sum(nbytes for _, nbytes in parts)
        return sum(self.over(axes, "all_gather", n, count * n / whole) for axes, n in parts if n)

    def read_parts(self, piece: Piece, *, again: bool = False) -> Parts:
        """Bytes of weights that the forward of a piece reads, or the backward, and the axes that have the
        parts. The backward reads all weights that `expert` splits."""
        whole = self.read_again(piece) if again else piece.read
        return self._parts(whole, min(piece.split_read, whole))

    def renewed_parts(self, piece: Piece) -> Parts:
        """Bytes of weights of a piece that are updated, and the axes that have the parts."""
        return self._parts(piece.gradients, piece.split_gradients)

    def _parts(self, whole: float, split: float) -> Parts:
        return (self.summing, whole - split), (self.summing_split, split)

    def read_again(self, piece: Piece) -> float:
        """Bytes of the weights that the backward reads, with those of a second forward."""
        return piece.recomputed if self.layout.remat == "full" else piece.read_again

    def num_again(self, piece: Piece) -> float:
        """The buckets of these bytes."""
        count = piece.num_recomputed if self.layout.remat == "full" else piece.num_again
        return self._filled(self.read_again(piece), count)

    def num_gathers(self, piece: Piece) -> float:
        """The buckets of the weights of the forward."""
        return self._filled(piece.read, piece.num_gathers)

    def _num_sums(self, piece: Piece) -> float:
        """The buckets of gradients in a backward: one spans a part of the graph, and that of a stage is
        short."""
        count = self._filled(piece.gradients, piece.num_sums)
        return count if self.pipe == 1 else max(1.0, count)

    def reduced(self, piece: Piece) -> float:
        """Seconds to sum the gradients of a piece."""
        return sum(self.over(*one) for one in self.sums(piece))

    def sums(self, piece: Piece) -> Iterator[GradientSum]:
        """The sums of the gradients of a piece: over `data`, of most over `seq` with it, and of weights that
        `expert` does not split over it, too; of parts, if the ranks of an axis have the same values."""
        whole, expert = piece.gradients, self.groups["expert",].size
        others = whole - piece.split_gradients
        every = min(piece.over_expert, others)
        joint = min(piece.over_seq, whole) if "seq" in self.summing else whole
        joint_others = min(joint, others)
        kind = "reduce_scatter" if self.layout.zero else "all_reduce"
        fewer = tuple(a for a in self.summing if a != "seq")

        def one(axes: tuple[str, ...], nbytes: float, of: float = 1.0) -> GradientSum:
            share = nbytes / whole if nbytes else 0.0
            return GradientSum(axes, kind, nbytes / of, share * piece.num_sums)

        both = min(every, joint_others)
        yield one(self.summing, both)
        yield one(fewer, every - both)
        alone = others - every  # the ranks of `expert` have the same
        both, parts = min(alone, joint_others - both), expert if self.layout.zero else 1
        yield one(self.summing_split, both, parts)
        yield one(("data",), alone - both, parts)
        yield one(self.summing_split, joint - joint_others)
        yield one(("data",), piece.split_gradients - (joint - joint_others))

    def over(self, axes: tuple[str, ...], kind: str, nbytes: float, count: float) -> float:
        """Seconds of collectives over `axes`: so many bytes in so many buckets."""
        group = self.groups[axes]
        if group.size == 1 or nbytes <= 0:
            return 0.0
        count = self._filled(nbytes, count)
        known = axes, kind, nbytes, count
        if known not in self._over:
            seconds = collective_seconds(kind, nbytes / count, group, self.machine.topology)
            self._over[known] = count * seconds
        return self._over[known]

    def _filled(self, nbytes: float, count: float) -> float:
        """A number of buckets; where none was counted, as many as these bytes fill. One may be larger than
        others: a tensor is in one bucket."""
        return count or nbytes / self.bucket_nbytes

    def _recomputing(self, stage: int) -> list[Piece]:
        """The pieces of a stage; with `remat=full` the backward of all but the last segment has a forward."""
        pieces, segments = self.cut[stage], self.segments
        if segments is None:
            return pieces
        ends = {at - 1 for at in (*self.begins, *segments.begins)}
        made, known = list[Piece](), dict[tuple[int, bool], Piece]()  # equal layers are one object
        for i, piece in enumerate(pieces, self.begins[stage]):
            key = id(piece), i in ends
            if i < segments.last and key not in known:
                known[key] = self._recomputed(piece, ends=i in ends)
            made.append(known[key] if i < segments.last else piece)
        return made

    def _recomputed(self, piece: Piece, *, ends: bool) -> Piece:
        """A piece whose backward begins with a forward, but for the collectives whose results are kept.

        The last piece of a segment does not make again what later segments read.
        """
        casting = 0.0 if self.layout.in_time else piece.casting
        whole = piece.forward - (piece.ahead - piece.moved_again)
        again = min(whole, piece.again + casting) if ends else whole
        return replace(
            piece,
            backward=piece.backward + again,
            inputs=piece.inputs + again,
            exchange=piece.exchange + min(again, piece.moved_again),
            sent=piece.sent + piece.again_sent,
            sent_across=piece.sent_across + piece.again_across,
        )

    def _stage_piece(self, stage: int) -> Piece:
        """A stage; its backward waits for the sums of gradients that each micro-batch has."""
        whole = total(self._recomputing(stage))
        if self.layout.zero >= 2 and self.pipe > 1:
            times = played(self.backwards(stage), lags=False, one_link=self.one_link)
            more = max(0.0, times.seconds - whole.backward)
            backward, exchange = whole.backward + more, whole.exchange + times.waits
            whole = replace(whole, backward=backward, exchange=exchange)
        return replace(whole, kept=self.left(stage))

    def left(self, stage: int) -> float:
        """Bytes that the forward of a micro-batch leaves."""
        held, end = self.held(stage), self.begins[stage] + len(self.cut[stage])
        if self.segments is None or end > self.segments.last:
            return held[-1]
        begin = max(i for i in self.segment_begins(stage) if i < end)
        return max(0.0, held[-1] - sum(self._inside[begin:end]))

    def segment_begins(self, stage: int) -> tuple[int, ...]:
        """The first pieces of segments, of the stage's own first one, too."""
        return (self.begins[stage], *(self.segments.begins if self.segments else ()))

    @cached_property
    def begins(self) -> list[int]:
        """The first piece of each stage."""
        return list(accumulate(map(len, self.cut[:-1]), initial=0))

    @cached_property
    def _inside(self) -> tuple[float, ...]:
        """Bytes of each piece that only its backward reads."""
        return tuple(max(0.0, p.kept - p.once) for stage in self.cut for p in stage)

    @cached_property
    def segments(self) -> RecomputedSegments | None:
        """Of the whole model; None if nothing is recomputed."""
        if self.layout.remat != "full":
            return None
        across = tuple(self.crossing(i) for i in range(len(self._inside) - 1))
        return segments_of(self._inside, across)

    def crossing(self, piece: int) -> float:
        """Bytes from a piece to later ones."""
        return self.blocks.messages[piece] if self.blocks.messages else self.blocks.message

    @property
    def chunks(self) -> int:
        """Stages of a pipeline rank."""
        name, _, chunks = self.layout.schedule.rstrip(")").partition("(")
        return int(chunks or 2) if name == "interleaved" else 2 if name == "zbv" else 1

    @property
    def interleaves(self) -> bool:
        """Whether a rank takes its stages in turns."""
        return self.layout.schedule.startswith("interleaved")

    @property
    def halves(self) -> bool:
        """Whether the backward has gradients of weights apart."""
        return self.layout.schedule in ("zb", "zbv")

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        if self.layout.schedule == "zbv":  # there and back
            return min(stage, 2 * self.pipe - 1 - stage)
        return stage % self.pipe

    @cached_property
    def stage_pieces(self) -> list[Piece]:
        """The pieces of each stage: contiguous layers, balanced by their time."""
        return [self._stage_piece(stage) for stage in range(len(self.cut))]

    @cached_property
    def cut(self) -> list[list[Piece]]:
        whole = [self.blocks.first, *self.blocks.sequence(), self.blocks.last]
        count = self.pipe * self.chunks
        if count > len(whole):
            raise LayoutError(
                f"{count} stages for {len(whole)} pieces of the model",
                why="each stage has a layer, or what is before or behind the layers",
                fix=f"pipe={len(whole) // self.chunks} or fewer",
            )
        stages: list[list[Piece]] = [[] for _ in range(count)]
        times = tuple(p.forward + p.backward for p in whole)
        each = self.blocks.messages or (self.blocks.message,) * (len(whole) - 1)
        moving = tuple(2 * self.moving(nbytes) for nbytes in each)
        stage_of = _balanced(times, moving, count)
        for piece, stage in zip(whole, stage_of, strict=True):
            stages[stage].append(piece)
        return stages

    @cached_property
    def messages(self) -> list[float]:
        """Bytes from each stage but the last to the next."""
        return [self.crossing(end - 1) for end in accumulate(map(len, self.cut[:-1]))]

    @property
    def moved(self) -> tuple[float, ...]:
        """Seconds of these messages; there and back on one rank takes none."""
        return tuple(
            self.moving(nbytes) if self.rank_of(i) != self.rank_of(i + 1) else 0.0
            for i, nbytes in enumerate(self.messages)
        )

    def moving(self, nbytes: float) -> float:
        """Seconds of a message between stages."""
        return self.machine.message(nbytes, across_hosts=self.groups.crosses_hosts("pipe"))

    @cached_property
    def tied(self) -> list[CrossingWeight]:
        """The weights that two pipeline ranks read."""
        rank_of_piece = [
            self.rank_of(i) for i, pieces in enumerate(self.cut) for _ in range(len(pieces))
        ]
        zero, found = self.layout.zero, []
        for one in self.blocks.tied:
            first, later = rank_of_piece[one.first], rank_of_piece[one.last]
            if later != first:
                read = one.read / (self.ways if zero == 3 else 1)
                back = one.gradient / (self.ways if zero >= GRADIENTS_FROM else 1)
                found.append(CrossingWeight(first, later, read, back))
        return found

    @cached_property
    def rank_pieces(self) -> list[Piece]:
        if self.pipe == 1:
            return self.stage_pieces
        ranks = [Piece() for _ in range(self.pipe)]
        for stage, piece in enumerate(self.stage_pieces):
            ranks[self.rank_of(stage)] += piece
        return ranks

    def held(self, stage: int) -> list[float]:
        """Bytes of values of a micro-batch from its forward in the backward of each piece: later ones are
        gone, and those of its segment are made again.

        A collective's result that is kept is not kept again as a part of what crosses to the next segment.
        """
        pieces, begins = self.cut[stage], self.segment_begins(stage)
        whole = list(accumulate(max(0.0, p.kept) for p in pieces))
        if self.segments is None:
            return whole
        found, kept, inside = [], 0.0, 0.0
        for i, (piece, most) in enumerate(zip(pieces, whole, strict=True), self.begins[stage]):
            if i in begins:
                before = pieces[i - 1 - self.begins[stage]].once if i > self.begins[stage] else 0.0
                kept += max(0.0, self.crossing(i - 1) - before) if i else 0.0
                inside = 0.0
            kept += piece.once
            inside += self._inside[i]
            found.append(min(most, kept + inside))
        return found


_balanced = lru_cache(maxsize=1024)(balanced)
