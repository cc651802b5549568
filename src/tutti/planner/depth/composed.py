"""The estimate of a layout for a deep model, composed of its pieces.

stage      the layers that balance its time, first and last pieces at the ends
step       the schedule on a clock + sums of gradients + update + gathers of new weights
zero=3     gathers of weights beside the layers' work
peak       the fullest of: the border of forward and backward, the end of the backward, the update
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate

from tutti.costs.collective_seconds import collective_seconds
from tutti.costs.rank_groups import RankGroups
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.layout.budget import Budget
from tutti.passes.bucket import BUCKET_NBYTES
from tutti.pipeline.ready import schedule_of
from tutti.pipeline.stages.balance import balanced
from tutti.planner.depth.block_work import Blocks, Piece
from tutti.planner.depth.recomputed_segments import RecomputedSegments, segments_of
from tutti.planner.depth.thinned_layers import thinned
from tutti.planner.estimates.graph_clock import (
    COLLECTIVES,
    COMPUTE,
    IDLE,
    OVERLAP_SLOWDOWN,
    SHARED,
)
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.simulator import Timeline, simulate


def composed(
    blocks: Blocks, layout: Layout, machine: PricedMachine, *, played: bool = True
) -> Estimate:
    """The estimate of `layout`.

    Args:
        blocks: of the layout's model axes and rows of a micro-batch, nothing recomputed.
        layout: to estimate.
        machine: its hardware.
        played: play a pipeline's schedule on a clock; otherwise closed forms stand for it, which are much
            cheaper and a few percent off where stages differ.

    Raises:
        LayoutError: a budget of `remat` in bytes. More stages than layers.
        ScheduleError: there is no such schedule for these pipeline ranks and micro-batches.
    """
    budget = Budget.parse(layout.remat)
    if budget is not None and budget.nbytes is not None:
        raise LayoutError(
            f"remat={layout.remat} of a deep model has no estimate",
            fix="remat=none, remat=full, or a share of the activations such as remat=0.5",
        )
    return _Composition(blocks, layout, machine, played).make()


class _Composition:
    def __init__(
        self, blocks: Blocks, layout: Layout, machine: PricedMachine, played: bool
    ) -> None:
        self.layout, self.machine = layout, machine
        share = budget.share if (budget := Budget.parse(layout.remat)) else None
        self.blocks = blocks if share is None else thinned(blocks, share, gathers=layout.zero == 3)
        self.plays = played
        self.groups = RankGroups(layout.mesh, machine.topology.host_size)
        self.data = layout.axes.get("data", 1)
        self.pipe = layout.axes.get("pipe", 1)

    def make(self) -> Estimate:
        timeline = self._played if self.pipe > 1 and self.plays else None
        kinds: Counter[str] = Counter()
        hidden = 0.0
        ranks = self._rank_pieces
        busiest = max(ranks, key=lambda p: p.forward + p.backward)
        micro = self.layout.micro
        computing = micro * (busiest.forward + busiest.backward - busiest.exchange)
        kinds[COLLECTIVES] += micro * busiest.exchange  # type: ignore[assignment]
        if self.pipe == 1:
            computing, hidden, exposed = self._alone(busiest, computing)
            seconds = computing + kinds[COLLECTIVES] + exposed
            kinds[COLLECTIVES] += exposed  # type: ignore[assignment]
        else:
            seconds = timeline.seconds if timeline else self._closed_form
            kinds[IDLE] += max(0.0, seconds - computing - kinds[COLLECTIVES])  # type: ignore[assignment]
            exposed = max(self._gathered(p) + self._summed(p) for p in ranks)
            seconds += exposed
            kinds[COLLECTIVES] += exposed  # type: ignore[assignment]
        update = max(p.update for p in ranks) / (self.data if self.layout.zero else 1)
        renewed = max(self._renewed(p) for p in ranks)
        kinds[COMPUTE] += computing + update  # type: ignore[assignment]
        kinds[COLLECTIVES] += renewed  # type: ignore[assignment]
        alone, share = seconds + update + renewed, self.machine.ranks_per_processor
        if timeline is not None:
            shared = timeline.shared_seconds(share) + share * (alone - timeline.seconds)
        else:  # all work must find room on the processors
            shared = max(alone, share * (alone if self.pipe == 1 else self._busy))
        kinds[SHARED] += shared - alone  # type: ignore[assignment]
        return Estimate(
            layout=self.layout,
            seconds=shared,
            kinds={k: x for k, x in kinds.items() if x > 0},
            hidden_seconds=hidden,
            nbytes=self._sent(busiest),
            peak_nbytes=int(max(self._peak(i) for i in range(self.pipe))),
            timeline=timeline,
        )

    @property
    def _busy(self) -> float:
        """Seconds that a rank of the pipeline works, in the mean."""
        share = self.data if self.layout.zero else 1
        return sum(
            self.layout.micro * (p.forward + p.backward)
            + self._gathered(p)
            + self._summed(p)
            + p.update / share
            + self._renewed(p)
            for p in self._rank_pieces
        ) / len(self._rank_pieces)

    def _alone(self, piece: Piece, computing: float) -> tuple[float, float, float]:
        """Without a pipeline: seconds of compute, of collectives beside it, and of those it waits for."""
        micro, zero = self.layout.micro, self.layout.zero
        each = self._gathered(piece) + self._gathered(piece, again=True)
        reduced = self._reduced(piece)
        beside = zero >= 2 or micro == 1
        within = micro * (each + reduced) if beside else micro * each
        # Nothing runs beside the gather before the first piece, and beside the sum of its gradients.
        front = self._front(self._cut[0])
        ends = micro * (self._gathered(front) + self._reduced(front)) if beside else 0.0
        hidden = min(within - ends, computing)
        slower = hidden * (1 - 1 / OVERLAP_SLOWDOWN)
        waits = within - hidden + (0.0 if beside else reduced)
        return computing + slower, hidden, waits

    @staticmethod
    def _front(pieces: Sequence[Piece]) -> Piece:
        """The first of them that has weights."""
        return next((piece for piece in pieces if piece.read), Piece())

    def _gathered(self, piece: Piece, *, again: bool = False) -> float:
        """Seconds to gather the weights of a piece over `data`, in the dtypes of the forward."""
        if self.layout.zero < 3:
            return 0.0
        return self._over_data("all_gather", self._read_again(piece) if again else piece.read)

    def _read_again(self, piece: Piece) -> float:
        """Bytes of the weights that the backward reads, with those of a second forward."""
        return piece.recomputed if self.layout.remat == "full" else piece.read_again

    def _reduced(self, piece: Piece) -> float:
        kind = "reduce_scatter" if self.layout.zero else "all_reduce"
        return self._over_data(kind, piece.gradients)

    def _summed(self, piece: Piece) -> float:
        """Seconds of sums of gradients after the last micro-batch of a pipeline."""
        return self._reduced(piece) if self.layout.zero < 2 else 0.0

    def _renewed(self, piece: Piece) -> float:
        """Seconds to gather the weights that each rank has updated a part of."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self._over_data("all_gather", piece.parameters)

    def _over_data(self, kind: str, nbytes: float) -> float:
        if self.data == 1 or not nbytes:
            return 0.0
        return collective_seconds(kind, nbytes, self.groups[("data",)], self.machine.topology)

    def _recomputing(self, stage: int) -> Piece:
        """A stage of a pipeline; with `remat=full` its backward recomputes one segment at a time."""
        pieces = self._cut[stage]
        whole = sum(pieces, Piece())
        if self.layout.zero >= 2 and self.pipe > 1:
            # Nothing runs beside the last sum of a micro-batch.
            alone = self._reduced(self._front(pieces))
            whole = replace(whole, backward=whole.backward + alone, exchange=whole.exchange + alone)
        found = self._segments[stage]
        if found is None or whole.kept <= 0:
            return whole
        again = sum(pieces[: found.last], Piece())
        once = max(0.0, again.exchange - 2 * again.moved_again) / 3
        seconds = again.forward - once
        more = {
            "backward": whole.backward + seconds,
            "inputs": whole.inputs + seconds,
            "exchange": whole.exchange + again.moved_again,
        }
        return replace(whole, **more, kept=min(whole.kept, found.crossing + whole.once), cast=0.0)

    @cached_property
    def _segments(self) -> list[RecomputedSegments | None]:
        """Of each stage; None if nothing is recomputed. Weights in another dtype are cast again, too."""
        if self.layout.remat != "full":
            return [None] * len(self._cut)
        found: list[RecomputedSegments | None] = []
        begin = 0
        for pieces in self._cut:
            inside = tuple(max(0.0, p.kept + p.cast - p.once) for p in pieces)
            ends = range(begin, begin + len(pieces) - 1)
            found.append(segments_of(inside, tuple(self._crossing(i) for i in ends)))
            begin += len(pieces)
        return found

    def _crossing(self, piece: int) -> float:
        """Bytes from a piece to later ones."""
        return self.blocks.messages[piece] if self.blocks.messages else self.blocks.message

    @property
    def _pipeline(self) -> Layout:
        """The words on which the schedule depends."""
        micro, schedule = self.layout.micro, self.layout.schedule
        return Layout(axes={"pipe": self.pipe}, micro=micro, schedule=schedule)

    @property
    def _chunks(self) -> int:
        """Stages of a pipeline rank."""
        name, _, chunks = self.layout.schedule.rstrip(")").partition("(")
        return int(chunks or 2) if name == "interleaved" else 2 if name == "zbv" else 1

    @property
    def _halves(self) -> bool:
        """Whether the backward has gradients of weights apart."""
        return self.layout.schedule in ("zb", "zbv")

    @property
    def _interleaves(self) -> bool:
        """Whether a rank takes its stages in turns."""
        return self.layout.schedule.startswith("interleaved")

    def _rank_of(self, stage: int) -> int:
        if self.layout.schedule == "zbv":  # there and back
            return min(stage, 2 * self.pipe - 1 - stage)
        return stage % self.pipe

    @cached_property
    def _closed_form(self) -> float:
        """Every micro-batch takes the time of the slowest rank; the first also passes the others.

        1F1B: `sum + (K - 1) max`; interleaved chunks divide the sum of the others; gradients of weights in
        W seconds apart leave `(F + I - W) / (F + I + W)` of it, or with `zbv` one W less.

        Narayanan et al. 2021, section 2.2. Qi et al. 2023, table 1; 2024 for `zbv`.
        """
        times = [p.forward + p.backward for p in self._rank_pieces]
        longest, whole = max(times), sum(times)
        share = 1 / self._chunks if self._interleaves else 1.0
        if self._halves and whole:
            late = 1 - sum(p.forward + p.inputs for p in self._rank_pieces) / whole
            share = max(0.0, 1 - (2 if self.layout.schedule == "zb" else 3) * late)
        return self.layout.micro * longest + share * (whole - longest)

    def _live(self, rank: int) -> float:
        """Micro-batches that a rank holds at most, of all its stages, which are not interleaved."""
        micro, name = self.layout.micro, self.layout.schedule
        if name == "gpipe":
            return micro
        return min(micro, self.pipe if name == "zbv" else self.pipe - rank)

    def _kept_in_turns(self, rank: int) -> float:
        """Bytes of the most micro-batches that a rank holds if its stages are interleaved.

        It begins with `pipe` forwards of each stage in turn, before its first backward.
        """
        count, kept = self._chunks, 0.0
        left = 2 * (self.pipe - rank - 1) + (count - 1) * self.pipe + 1
        left = min(left, self.layout.micro * count)
        for i in range(math.ceil(left / self.pipe)):
            turn = min(self.pipe, left - i * self.pipe)
            kept += turn * self._stage_pieces[rank + i % count * self.pipe].kept
        return kept

    @cached_property
    def _stage_pieces(self) -> list[Piece]:
        """The pieces of each stage: contiguous layers, balanced by their time."""
        return [self._recomputing(stage) for stage in range(len(self._cut))]

    @cached_property
    def _cut(self) -> list[list[Piece]]:
        whole = [self.blocks.first, *self.blocks.sequence(), self.blocks.last]
        count = self.pipe * self._chunks
        if count > len(whole):
            raise LayoutError(
                f"{count} stages for {len(whole)} pieces of the model",
                why="each stage has a layer, or what is before or behind the layers",
                fix=f"pipe={len(whole) // self._chunks} or fewer",
            )
        stages: list[list[Piece]] = [[] for _ in range(count)]
        times = tuple(p.forward + p.backward for p in whole)
        each = self.blocks.messages or (self.blocks.message,) * (len(whole) - 1)
        moving = tuple(2 * self._moving(nbytes) for nbytes in each)
        stage_of = _balanced(times, moving, count)
        for piece, stage in zip(whole, stage_of, strict=True):
            stages[stage].append(piece)
        return stages

    @cached_property
    def _messages(self) -> list[float]:
        """Bytes from each stage but the last to the next."""
        return [self._crossing(end - 1) for end in accumulate(map(len, self._cut[:-1]))]

    @property
    def _moved(self) -> tuple[float, ...]:
        """Seconds of these messages; there and back on one rank takes none."""
        return tuple(
            self._moving(nbytes) if self._rank_of(i) != self._rank_of(i + 1) else 0.0
            for i, nbytes in enumerate(self._messages)
        )

    def _moving(self, nbytes: float) -> float:
        """Seconds of a message between stages."""
        return self.machine.message(nbytes, across_hosts=self.groups.crosses_hosts("pipe"))

    @cached_property
    def _rank_pieces(self) -> list[Piece]:
        if self.pipe == 1:
            return self._stage_pieces
        ranks = [Piece() for _ in range(self.pipe)]
        for stage, piece in enumerate(self._stage_pieces):
            ranks[self._rank_of(stage)] += piece
        return ranks

    @cached_property
    def _played(self) -> Timeline:
        costs: list[tuple[tuple[int, str], float]] = []
        for stage, piece in enumerate(self._stage_pieces):
            inputs = piece.inputs if stage else 0.0  # the first stage has none
            parts = {
                "F": piece.forward,
                "B": piece.backward,
                "I": inputs,
                "W": piece.backward - inputs,
            }
            costs += [((stage, kind), seconds) for kind, seconds in parts.items()]
        kept = tuple(int(piece.kept) for piece in self._stage_pieces)
        freed = 0, *(int(piece.kept - piece.delayed) for piece in self._stage_pieces[1:])
        return _simulated(self._pipeline, tuple(costs), self._moved, kept, freed)

    def _kept(self, rank: int) -> float:
        """Bytes of the most micro-batches that a rank holds."""
        if self.pipe == 1:
            return self._rank_pieces[0].kept
        if self.plays:
            return self._played.peak_nbytes[rank]
        if self._interleaves:
            return self._kept_in_turns(rank)
        live, piece = self._live(rank), self._rank_pieces[rank]
        if not self._halves or not rank:
            return live * piece.kept
        # Micro-batches whose gradients of weights are late.
        late = min(rank, self.layout.micro - live) if self.layout.schedule == "zb" else 0
        return live * piece.kept + late * piece.delayed + max(0.0, piece.delayed - piece.kept)

    def _peak(self, rank: int) -> float:
        piece, zero, data, micro = (
            self._rank_pieces[rank],
            self.layout.zero,
            self.data,
            self.layout.micro,
        )
        parameters = piece.parameters / (data if zero == 3 else 1)
        state = self.blocks.batch + parameters + piece.slots / (data if zero else 1)
        split = zero >= 2 or (zero == 1 and micro == 1)
        gradients = piece.gradients / (data if split else 1)
        summed = gradients if self.layout.in_time else 0.0
        stages = [stage for stage in range(len(self._cut)) if self._rank_of(stage) == rank]
        cast = 0.0 if zero == 3 else piece.cast
        moved = max(BUCKET_NBYTES, self.blocks.gradient) if data > 1 else 0.0
        border = self._kept(rank) + summed + max(map(self._above, stages))
        if self.pipe == 1:  # or where the backward ends, with all gradients
            first = max(self._neighbors(0)[:2])
            border = max(border, gradients + self.blocks.within_layers + self._again(0) + first)
        return state + max(cast + border, gradients + moved)

    def _above(self, stage: int) -> float:
        """The most bytes of temporary values, of a segment that is recomputed and of gathered weights, above
        the state, gradients and the values that the forwards leave."""
        kept = list(accumulate(max(0.0, p.kept) for p in self._cut[stage]))
        left = self._stage_pieces[stage].kept / max(1.0, kept[-1])
        read = self._neighbors(stage)
        gathered = max(r - (kept[-1] - k) * left for r, k in zip(read, kept, strict=True))
        temporary = self.blocks.within_layers + gathered
        if stage == len(self._cut) - 1:
            temporary = max(temporary, self.blocks.transient + read[-1])
        return temporary + self._again(stage)

    def _again(self, stage: int) -> float:
        """Bytes of a segment while it is recomputed, above those across the cuts."""
        found = self._segments[stage]
        return found.above if found else 0.0

    def _neighbors(self, stage: int) -> list[float]:
        """Bytes of the gathered weights of each piece and the one before, which overlap."""
        pieces = self._cut[stage]
        if self.layout.zero < 3:
            return [0.0] * len(pieces)
        return [sum(p.read for p in pieces[max(0, i - 1) : i + 1]) for i in range(len(pieces))]

    def _sent(self, piece: Piece) -> dict[str, int]:
        """Bytes that the busiest rank sends in a step, by link."""
        micro, zero, data = self.layout.micro, self.layout.zero, self.data
        found: Counter[str] = Counter()
        share = (data - 1) / data
        gathered = 0.0
        if zero == 3:  # a pipeline gathers once
            both = piece.read + self._read_again(piece)
            gathered = micro * both if self.pipe == 1 else piece.read
        sums = micro if zero >= 2 else 1
        over_data = share * (
            gathered
            + sums * (1 if zero else 2) * piece.gradients
            + (piece.parameters if zero in (1, 2) else 0.0)
        )
        link = "inside" if self.groups[("data",)].num_hosts == 1 else "between"
        found[link] += int(over_data)
        within = self.groups[tuple(a for a in ("expert", "seq", "tensor") if a in self.layout.axes)]
        found["inside" if within.num_hosts == 1 else "between"] += int(micro * piece.sent)
        if self.pipe > 1:
            link = "between" if self.groups.crosses_hosts("pipe") else "inside"
            ways = 2 if len(self._cut) > 2 else 1  # to the next stage, and back to the one before
            found[link] += int(ways * micro * max(self._messages))
        return {k: n for k, n in found.items() if n}


_schedule_of = lru_cache(maxsize=256)(schedule_of)
_balanced = lru_cache(maxsize=1024)(balanced)


@lru_cache(maxsize=4096)
def _simulated(
    layout: Layout,
    costs: tuple[tuple[tuple[int, str], float], ...],
    moved: tuple[float, ...],
    kept: tuple[int, ...],
    freed: tuple[int, ...],
) -> Timeline:
    """Levels of `zero` have the same schedule and costs, so they share its timeline."""
    nbytes, freed_nbytes = dict(enumerate(kept)), dict(enumerate(freed))
    return simulate(
        _schedule_of(layout),
        dict(costs),
        transfer_seconds={(i, i + 1): seconds for i, seconds in enumerate(moved)},
        nbytes=nbytes,
        freed_nbytes=freed_nbytes,
    )
