"""Which rank of a group reads which batch, and when it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tutti.comm.host.publications import Publications
from tutti.data.sample_order import BatchSpan


@dataclass(eq=False)
class Turn:
    """One batch of a loop: this rank reads it if it has no group, or else its owner there.

    `reads` are the turns whose batches this rank reads when it comes to this one: at the first turn of a
    round that of its own in the round, so that all ranks of the group read at the same time.
    """

    span: BatchSpan
    group: Publications | None = None
    number: int = 0
    reads: tuple[Turn, ...] = ()

    @property
    def own(self) -> bool:
        """Whether this rank reads the batch."""
        return self.group is None or self.group.owner(self.number) == self.group.position


def turns(
    spans: Iterable[BatchSpan], group_of: Callable[[BatchSpan], Publications | None]
) -> Iterator[Turn]:
    """The turns of a loop; `group_of` gives the ranks that share the read of a batch."""
    source, ahead = _numbered(spans, group_of), deque[Turn]()

    def find(group: Publications, number: int) -> Turn | None:
        """A later turn; None if the loop ends before."""
        for turn in ahead:
            if turn.group is group and turn.number == number:
                return turn
        for turn in source:
            ahead.append(turn)
            if turn.group is group and turn.number == number:
                return turn
        return None

    while True:
        turn = ahead.popleft() if ahead else next(source, None)
        if turn is None:
            return
        if turn.group is None:
            turn.reads = (turn,)
        elif turn.number % turn.group.size == 0:
            position = turn.group.position
            own = find(turn.group, turn.number + position) if position else turn
            turn.reads = () if own is None else (own,)
        yield turn


def _numbered(
    spans: Iterable[BatchSpan], group_of: Callable[[BatchSpan], Publications | None]
) -> Iterator[Turn]:
    counts: dict[int, int] = {}
    for span in spans:
        group = group_of(span)
        number = 0
        if group is not None:
            number = counts.get(id(group), 0)
            counts[id(group)] = number + 1
        yield Turn(span, group, number)
