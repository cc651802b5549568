"""Layers that keep a share of their activations, and recompute the others (`remat=0.5`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tutti.planner.depth.dropped_values import Drop
from tutti.planner.depth.step_pieces import Blocks, Piece


def thinned(blocks: Blocks, share: float, *, gathers: bool) -> Blocks:
    """The blocks of a program that keeps this share of its activations.

    Args:
        blocks: nothing recomputed.
        share: 0 to 1, of all bytes that the forward leaves.
        gathers: the backward gathers weights again, or all micro-batches share their casts: none of them are
            among these bytes.
    """
    ends = blocks.first.kept + blocks.last.kept
    layers = sum(piece.kept for piece in blocks.sequence())
    cast = sum(piece.cast for piece in (blocks.first, *blocks.sequence(), blocks.last))
    cast = 0.0 if gathers else cast
    dropped = (1 - share) * (ends + layers + cast) - cast  # weights first: they cost least
    part = min(1.0, max(0.0, dropped / max(1.0, layers)))
    made = [
        (tuple(_without(p, part * p.kept, d) for p, d in zip(pieces, drops, strict=True)), n)
        for (pieces, n), drops in zip(blocks.layers, blocks.drops, strict=True)
    ]
    return replace(blocks, layers=tuple(made))


def _without(piece: Piece, nbytes: float, drops: Sequence[Drop]) -> Piece:
    """A layer that drops so many bytes of its values, or all that it can."""
    for done, drop in zip(accumulate(d.nbytes for d in drops), drops, strict=True):
        part = min(1.0, max(0.0, (nbytes - done + drop.nbytes) / max(1.0, drop.nbytes)))
        again = piece.backward + part * drop.seconds
        gone = part * drop.nbytes
        within, passing = piece.within + gone, piece.passing + gone
        piece = replace(
            piece, kept=piece.kept - gone, backward=again, within=within, passing=passing
        )
    return piece
