"""The estimate of a layout for a deep model, composed of its pieces.

stage      the layers that balance its time, first and last pieces at the ends
step       the schedule on a clock + sums of gradients + update + gathers of new weights
zero=3     gathers of weights beside the layers' work (`piece_clock.py`)
peak       `staged_memory.py`
bytes      `sent_bytes.py`
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, lru_cache

from tutti.costs.kernel_seconds import LAUNCHES, MEMORY
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.layout.budget import Budget
from tutti.pipeline.ready import schedule_of
from tutti.pipeline.stages.balance import micro_batch_seconds
from tutti.planner.depth.piece_clock import PieceTimes, PieceWork, played
from tutti.planner.depth.sent_bytes import most_sent
from tutti.planner.depth.staged_memory import StagedMemory
from tutti.planner.depth.staged_pieces import StagedPieces
from tutti.planner.depth.step_pieces import Blocks, Piece
from tutti.planner.estimates.graph_clock import (
    COLLECTIVES,
    COMPUTE,
    IDLE,
    MESSAGES,
    SHARED,
    kinds_of,
    without_rounding,
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
    def __init__(self, blocks: Blocks, layout: Layout, machine: PricedMachine, plays: bool) -> None:
        self.staged = StagedPieces(blocks, layout, machine)
        self.layout, self.machine, self.groups = layout, machine, self.staged.groups
        self.pipe, self.plays = self.staged.pipe, plays

    def make(self) -> Estimate:
        timeline = self._played if self.pipe > 1 and self.plays else None
        kinds: Counter[str] = Counter()
        hidden = 0.0
        ranks = self.staged.rank_pieces
        busiest = max(ranks, key=lambda p: p.forward + p.backward)
        micro = self.layout.micro
        late: list[float] = []
        computing = micro * (busiest.forward + busiest.backward - busiest.exchange)
        kinds[COLLECTIVES] += micro * busiest.exchange  # type: ignore[assignment]
        if self.pipe == 1:
            times = last = self._alone()
            exposed = 0.0
            if micro > 1 and self.staged.sums_beside:
                last = self._alone(last=True)
            elif micro > 1:
                exposed = self.staged.summed_late(0)
            computing = (micro - 1) * times.kernels + last.kernels
            hidden = (micro - 1) * times.hidden + last.hidden
            exposed += (micro - 1) * times.waits + last.waits
            seconds = computing + kinds[COLLECTIVES] + exposed
            kinds[COLLECTIVES] += exposed  # type: ignore[assignment]
        else:
            seconds = timeline.seconds if timeline else self._closed_form
            kinds[IDLE] += max(0.0, seconds - computing - kinds[COLLECTIVES])  # type: ignore[assignment]
            late = [self.staged.summed_late(rank, timeline) for rank in range(self.pipe)]
            exposed = max(self.staged.gathered(p) + x for p, x in zip(ranks, late, strict=True))
            seconds += exposed
            kinds[COLLECTIVES] += exposed  # type: ignore[assignment]
            crossing = self._crossing_weights
            seconds += crossing
            kinds[MESSAGES] += crossing  # type: ignore[assignment]
        update = max(map(self._update, ranks))
        if self.layout.in_time:
            update += max(p.casting for p in ranks)
        renewed = max(map(self.staged.renewed, ranks))
        kinds[COMPUTE] += computing + update  # type: ignore[assignment]
        kinds[COLLECTIVES] += renewed  # type: ignore[assignment]
        alone, share = seconds + update + renewed, self.machine.ranks_per_processor
        if timeline is not None:
            shared = timeline.shared_seconds(share) + share * (alone - timeline.seconds)
        else:  # all work must find room on the processors
            shared = max(alone, share * (alone if self.pipe == 1 else self._busy(late)))
        kinds[SHARED] += shared - alone  # type: ignore[assignment]
        launching = max(p.update_launches for p in ranks)
        limits = self._limits(busiest, computing, update - launching, launching)
        memory = StagedMemory(self.staged, timeline)
        return Estimate(
            layout=self.layout,
            seconds=shared,
            kinds=kinds_of(kinds),
            hidden_seconds=without_rounding(hidden),
            nbytes=most_sent(self.staged),
            peak_nbytes=int(max(map(memory.peak, range(self.pipe)))),
            timeline=timeline,
            limits=kinds_of(limits),
        )

    def _limits(
        self, busiest: Piece, computing: float, update: float, launching: float
    ) -> dict[str, float]:
        """Seconds of compute by what they are for. A second forward is like the first; an update is for
        memory, and for its launches."""
        known = sum(busiest.limits.values())
        if not known:
            return {}
        found = {limit: computing * x / known for limit, x in busiest.limits.items()}
        return found | {MEMORY: found[MEMORY] + update, LAUNCHES: found[LAUNCHES] + launching}

    def _busy(self, late: list[float]) -> float:
        """Seconds that a rank of the pipeline works, in the mean; `late`: of the sums of each rank."""
        return sum(
            self.layout.micro * (p.forward + p.backward)
            + self.staged.gathered(p)
            + summed
            + self._update(p)
            + self.staged.renewed(p)
            for p, summed in zip(self.staged.rank_pieces, late, strict=True)
        ) / len(self.staged.rank_pieces)

    def _alone(self, *, last: bool = False) -> PieceTimes:
        """A micro-batch without a pipeline, or the `last` one, which reduces the sums of all: its forward and
        its backward."""
        pieces, backwards = self.staged.cut[0], self.staged.backwards(0, last=last)
        work = [
            PieceWork(
                p.forward - p.ahead,
                p.ahead,
                self.staged.gathered(p),
                0.0,
                self.staged.num_gathers(p),
            )
            for p in pieces
        ]
        lags = self.layout.zero == 0 and not last
        return played([*work, *backwards], lags=lags, one_link=self.staged.one_link)

    def _update(self, piece: Piece) -> float:
        """Seconds of the update of a piece."""
        seconds = piece.update
        if self.layout.zero:
            seconds = self.staged.part_of_gradients(piece, seconds)
        return seconds + piece.update_launches

    @property
    def _pipeline(self) -> Layout:
        """The words on which the schedule depends."""
        micro, schedule = self.layout.micro, self.layout.schedule
        return Layout(axes={"pipe": self.pipe}, micro=micro, schedule=schedule)

    @cached_property
    def _closed_form(self) -> float:
        """Every micro-batch takes the time of the slowest rank; the first also passes the others.

        1F1B: `sum + (K - 1) max`; interleaved chunks divide the sum of the others; gradients of weights in
        W seconds apart leave `(F + I - W) / (F + I + W)` of it, or with `zbv` one W less.

        The first micro-batch waits for the messages there and back. Under 1F1B so do those that follow the
        first ones of all ranks, if messages take longer than the work of the others (`stages/balance.py`).

        Narayanan et al. 2021, section 2.2. Qi et al. 2023, table 1; 2024 for `zbv`.
        """
        times = [p.forward + p.backward for p in self.staged.rank_pieces]
        longest, whole = max(times), sum(times)
        share = 1 / self.staged.chunks if self.staged.interleaves else 1.0
        if self.staged.halves and whole:
            late = 1 - sum(p.forward + p.inputs for p in self.staged.rank_pieces) / whole
            share = max(0.0, 1 - (2 if self.layout.schedule == "zb" else 3) * late)
        moved = [2 * seconds for seconds in self.staged.moved]
        seconds = (
            self.layout.micro * longest + share * (whole - longest) + sum(moved[: self.pipe - 1])
        )
        if self.staged.chunks == 1 and self.layout.schedule != "gpipe":
            late = micro_batch_seconds(times, moved) - longest
            seconds += max(0, self.layout.micro - self.pipe) * late
        return seconds

    @property
    def _crossing_weights(self) -> float:
        """Seconds of tied weights to later pipeline ranks, before all micro-batches, and of their gradients
        back, while the ranks between end theirs."""
        seconds = 0.0
        for one in self.staged.tied:
            drained = sum(p.backward for p in self.staged.rank_pieces[: one.later])
            moving = self.staged.moving
            seconds += moving(one.read) + max(0.0, moving(one.back) - drained)
        return seconds

    @cached_property
    def _played(self) -> Timeline:
        costs: list[tuple[tuple[int, str], float]] = []
        for stage, piece in enumerate(self.staged.stage_pieces):
            inputs = piece.inputs if stage else 0.0  # the first stage has none
            parts = {
                "F": piece.forward,
                "B": piece.backward,
                "I": inputs,
                "W": piece.backward - inputs,
            }
            costs += [((stage, kind), seconds) for kind, seconds in parts.items()]
        kept = tuple(int(piece.kept) for piece in self.staged.stage_pieces)
        freed = 0, *(int(piece.kept - piece.delayed) for piece in self.staged.stage_pieces[1:])
        return _simulated(self._pipeline, tuple(costs), self.staged.moved, kept, freed)


_schedule_of = lru_cache(maxsize=256)(schedule_of)


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
