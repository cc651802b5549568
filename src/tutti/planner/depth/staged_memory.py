"""The memory of a layout for a deep model, from its pieces in stages.

held in a backward  =  state, batch
                    +  micro-batches under way, sums of earlier ones, weights in the dtype of the forward
                    +  the piece: its temporary values, its gathered weights, its segment made again
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tutti.pipeline.micro_batches.moments import GRADIENTS_FROM
from tutti.planner.depth.piece_clock import FULL
from tutti.planner.depth.staged_pieces import StagedPieces
from tutti.planner.depth.step_pieces import Piece
from tutti.planner.simulator import Timeline


class StagedMemory:
    """The peaks of pipeline ranks; `timeline` of the schedule, if it was played on a clock."""

    def __init__(self, staged: StagedPieces, timeline: Timeline | None) -> None:
        self.staged, self.timeline = staged, timeline
        self.layout, self.blocks, self.machine = staged.layout, staged.blocks, staged.machine
        self.pipe = staged.pipe

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
        count, kept = self.staged.chunks, 0.0
        left = 2 * (self.pipe - rank - 1) + (count - 1) * self.pipe + 1
        left = min(left, self.layout.micro * count)
        for i in range(math.ceil(left / self.pipe)):
            turn = min(self.pipe, left - i * self.pipe)
            kept += turn * self.staged.stage_pieces[rank + i % count * self.pipe].kept
        return kept

    def _kept(self, rank: int) -> float:
        """Bytes of the most micro-batches that a rank holds."""
        if self.pipe == 1:
            return self.staged.rank_pieces[0].kept
        if self.timeline is not None:
            return self.timeline.peak_nbytes[rank]
        if self.staged.interleaves:
            return self._kept_in_turns(rank)
        live, piece = self._live(rank), self.staged.rank_pieces[rank]
        if not self.staged.halves or not rank:
            return live * piece.kept
        # Micro-batches whose gradients of weights are late.
        late = min(rank, self.layout.micro - live) if self.layout.schedule == "zb" else 0
        return live * piece.kept + late * piece.delayed + max(0.0, piece.delayed - piece.kept)

    def peak(self, rank: int) -> float:
        """The peak of a pipeline rank, in bytes."""
        zero, micro = self.layout.zero, self.layout.micro
        piece, part = self.staged.rank_pieces[rank], self.staged.part_of_gradients
        parameters, slots = piece.parameters, part(piece, piece.slots) if zero else piece.slots
        if zero == 3:
            parameters = self.staged.part_of_weights(piece, parameters)
        state = self.blocks.batch + parameters + slots
        splits = zero >= GRADIENTS_FROM or (zero == 1 and micro == 1)
        gradients = part(piece, piece.gradients) if splits else piece.gradients
        gradients += sum(one.back for one in self.staged.tied if one.later == rank)
        summed = gradients if self.layout.in_time else 0.0
        stages = [
            stage for stage in range(len(self.staged.cut)) if self.staged.rank_of(stage) == rank
        ]
        moved = self._moved(piece) if self.staged.groups[self.staged.summing].size > 1 else 0.0
        cast = piece.cast if self.staged.shares_casts else 0.0
        above = max(self._above(stage, splits) for stage in stages)
        ends = gradients + moved
        if zero in (1, 2) and not self.machine.shares_memory:
            ends = max(ends, piece.gradients)  # new weights beside the old ones
        return state + max(cast + self._kept(rank) + summed + above, ends)

    def _moved(self, piece: Piece) -> float:
        """Bytes of the largest bucket of gradients, about."""
        bucket = piece.gradients / max(1.0, piece.num_sums)
        return max(min(self.staged.bucket_nbytes, bucket), self.blocks.gradient)

    def _casts(self, stage: int) -> list[float]:
        """Bytes of weights in the dtype of the forward in the backward of each piece."""
        pieces, begins = self.staged.cut[stage], self.staged.segment_begins(stage)
        if self.layout.in_time or self.layout.zero == 3 or self.staged.drops_casts:
            return [0.0] * len(pieces)
        found = [0.0]
        for i, piece in enumerate(pieces, self.staged.begins[stage]):
            again = self.staged.segments is not None and i in begins
            found.append(piece.cast + (0.0 if again else found[-1]))
        return found[1:]

    def _above(self, stage: int, splits: bool) -> float:
        """The most bytes in a backward of a stage above the state, the sums of earlier micro-batches and the
        values that the forwards leave: in that of a piece, gradients of later ones are there."""
        pieces, in_time = self.staged.cut[stage], self.layout.in_time
        left, gradients, later, most = self.staged.left(stage), 0.0, 0.0, 0.0
        held, casts = self.staged.held(stage), self._casts(stage)
        rows = zip(pieces, held, casts, self._whole_weights(stage), self._tied(stage), strict=True)
        for p, kept, cast, gathered, tied in reversed(list(rows)):
            within = p.passing if in_time else p.within
            later += p.gradients
            if splits:  # one bucket is on its way while another is made
                within = self._beside_buckets(p, later)
            most = max(most, kept - left + cast + gradients + tied + within + gathered)
            if not in_time:
                own = p.gradients
                gradients += self.staged.part_of_gradients(p, own) if splits else own
        return most

    def _tied(self, stage: int) -> list[float]:
        """Bytes of gradients of tied weights in the backward of each piece: between both readers the later
        one's part is there. Sums over micro-batches have a part of each reader."""
        begin, count = self.staged.begins[stage], len(self.staged.cut[stage])
        found = [0.0] * count
        if not self.layout.in_time:
            for tied in self.blocks.tied:
                for i in range(max(begin, tied.first + 1), min(begin + count, tied.last)):
                    found[i - begin] += tied.gradient
        return found

    def _beside_buckets(self, piece: Piece, later: float) -> float:
        """The most bytes within a piece, with one bucket of gradients on its way while another is made.

        later: bytes of gradients of this piece and of later ones of its stage, with which those of a
        pipeline's small layers share a bucket.
        """
        if self.pipe > 1 and piece.num_sums:
            bucket = min(self.staged.bucket_nbytes, piece.gradients / piece.num_sums)
            return piece.passing + min(2 * bucket, later)
        return min(piece.within, piece.passing + 2 * piece.gradients / max(1.0, piece.num_sums))

    def _ahead(self, pieces: Sequence[Piece], piece: int) -> float:
        """Bytes of a bucket of weights that the backward gathers next, of one or several pieces."""
        nbytes = share = 0.0
        for p in reversed(pieces[:piece]):
            if share >= FULL:
                break
            nbytes += p.read / max(1.0, p.num_gathers)
            share += p.num_gathers
        return nbytes

    def _whole_weights(self, stage: int) -> list[float]:
        """Bytes of gathered weights in the backward of each piece: a bucket in use and the next one on its
        way; all of a stage, which a pipeline gathers once."""
        pieces = self.staged.cut[stage]
        if self.layout.zero < 3:
            return [0.0] * len(pieces)
        if self.pipe > 1:
            return [sum(p.read for p in pieces)] * len(pieces)
        one = [p.read / max(1.0, p.num_gathers) for p in pieces]  # in use: no more than a bucket
        found = [
            one[i]
            + max(one[i] if p.num_gathers > 1 else 0.0, self._ahead(pieces, i), *one[i + 1 : i + 2])
            for i, p in enumerate(pieces)
        ]
        for tied in self.blocks.tied:  # gathered for the first, and still there
            found[tied.last] += tied.nbytes
        return found
