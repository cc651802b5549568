"""The collectives of a partitioned program, as graph node targets.

A partitioned graph holds calls to the functions below. They are names, not implementations: a
*player* answers them (`graph.players.player`). `comm` does so between real ranks,
`graph.players.virtual_ranks` between the virtual ranks of one process. Two move nothing and need no player:
`positions(sharding, dim, device)`, the global indices that a rank holds along a dim (int64, 1-D), and
`draw_part(..., sharding)`, its part of a random tensor (see `graph.randomness.draw`); the engine that runs
the graph computes both for its rank.

`axes` are mesh axes, major to minor; the group of a rank holds the ranks that differ from it in these
axes only, ordered by their coordinates along `axes`.

A dim can be a product of segments (see `layout.sharding`). `outer` is the local size of the segments
above the one that a collective splits or joins, so that dim `dim` of local size `outer * inner` is
seen as `(outer, inner)` and the collective acts on `inner`.

Passes join and move collectives. `together(kind, xs, axes, wheres, op)` carries out several at once:
`wheres[i]` is the `(dim, outer)` of `xs[i]`, `op` that of a reduction or ""; its value is the list of
results. `start(...)`, with the same arguments, begins them and `finish(handle, xs)` waits for them: until
then `xs` must not change.

Where the ranks of a group share memory:

- `buffer(axes, offset, shape, dtype)`: memory for a value that a later collective reads in place;
- `together_(kind, xs, axes, wheres, op)`: `together` on such values, or on state in shared
  memory: all-reduces in place, gathers as views. "reduce_part" is a reduce-scatter in place: its results
  are the operands, with only the part that `part` gives reduced;
- `gather_into(names, xs, axes, wheres)`: gathers the parts `xs` into the state `names`;
- `part(x, axes, dim, outer)`: `shard` as a view of `x`;
- `meet(axes)`: waits until every rank has reached it.

Between pipeline ranks: `send(xs, source, to)` and, on the other, `receive(source, to, likes)` with a
`(shape, dtype)` for each tensor. `source` and `to` are coordinates along `pipe`; the two ranks have the
same other coordinates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node


def _unplayed(name: str):
    def stand_in(*_args: object, **_kwargs: object) -> Tensor:
        raise AssertionError(f"{name} is a name in a graph; a Player runs it")

    stand_in.__name__ = stand_in.__qualname__ = name
    stand_in.__module__ = __name__
    return stand_in


all_reduce = _unplayed("all_reduce")
all_gather = _unplayed("all_gather")
reduce_scatter = _unplayed("reduce_scatter")
all_to_all = _unplayed("all_to_all")
shard = _unplayed("shard")
partialize = _unplayed("partialize")
positions = _unplayed("positions")
draw_part = _unplayed("draw")

together = _unplayed("together")
start = _unplayed("start")
finish = _unplayed("finish")
buffer = _unplayed("buffer")
together_ = _unplayed("together_")
gather_into = _unplayed("gather_into")
meet = _unplayed("meet")
part = _unplayed("part")

send = _unplayed("send")
receive = _unplayed("receive")

COLLECTIVES = (all_reduce, all_gather, reduce_scatter, all_to_all)
JOINED = (together, together_, start, gather_into, meet)
PLAYED = (
    *COLLECTIVES,
    *JOINED,
    finish,
    buffer,
    part,
    shard,
    partialize,
    positions,
    draw_part,
    send,
    receive,
)
REDUCTIONS = (all_reduce, reduce_scatter)


def axes_of(node: Node) -> tuple[str, ...]:
    """The mesh axes of a node that calls one of the functions above; () where it has none."""
    target: Any = node.target
    place = _AXES_AT.get(target, 1)
    return () if place is None else node.args[place]  # type: ignore[return-value]


_AXES_AT: dict[Any, int | None] = {
    together: 2,
    together_: 2,
    start: 2,
    gather_into: 2,
    finish: None,
    buffer: 0,
    meet: 0,
    positions: None,
    draw_part: None,
    send: None,
    receive: None,
}
