"""The bytes that a rank of a deep model's layout sends in a step, by link, from its pieces in stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tutti.costs.collective_seconds import sent_nbytes
from tutti.planner.depth.staged_pieces import StagedPieces
from tutti.planner.depth.step_pieces import Piece


def most_sent(staged: StagedPieces) -> dict[str, int]:
    """The most bytes that a pipeline rank sends, `inside` its host and `between` hosts."""
    most: defaultdict[str, float] = defaultdict(float)
    for rank, piece in enumerate(staged.rank_pieces):
        sent: defaultdict[str, float] = defaultdict(float)
        for link, nbytes in (*_collectives(staged, piece), _messages(staged, rank)):
            sent[link] += nbytes
        for link, nbytes in sent.items():
            most[link] = max(most[link], nbytes)
    return {link: int(nbytes) for link, nbytes in most.items() if int(nbytes)}


def _collectives(staged: StagedPieces, piece: Piece) -> Iterator[tuple[str, float]]:
    """Bytes by link: of the model's axes in each micro-batch, of gradients, and of weights."""
    micro, zero = staged.layout.micro, staged.layout.zero
    part = staged.part_of_gradients if zero else lambda _, nbytes: nbytes
    yield "inside", micro * piece.sent + part(piece, piece.late_sent)
    yield "between", micro * piece.sent_across + part(piece, piece.late_across)
    sums = micro if zero >= 2 else 1
    moved = [(one.axes, one.kind, sums * one.nbytes) for one in staged.sums(piece)]
    if zero in (1, 2):
        moved += [(axes, "all_gather", n) for axes, n in staged.renewed_parts(piece)]
    elif zero == 3:
        parts, times = staged.read_parts(piece), 1
        if staged.pipe == 1:  # a pipeline gathers once
            parts, times = (*parts, *staged.read_parts(piece, again=True)), micro
        moved += [(axes, "all_gather", times * n) for axes, n in parts]
    for axes, kind, nbytes in moved:
        yield from zip(
            ("inside", "between"), sent_nbytes(kind, nbytes, staged.groups[axes]), strict=True
        )


def _messages(staged: StagedPieces, rank: int) -> tuple[str, float]:
    """Bytes from a pipeline rank to others: values and tied weights, and the gradients of both."""
    nbytes = sum(one.read for one in staged.tied if one.first == rank)
    nbytes += sum(one.back for one in staged.tied if one.later == rank)
    for stage, size in enumerate(staged.messages):
        ends = staged.rank_of(stage), staged.rank_of(stage + 1)
        if ends[0] != ends[1]:
            nbytes += staged.layout.micro * size * ends.count(rank)
    return "between" if staged.groups.crosses_hosts("pipe") else "inside", nbytes
