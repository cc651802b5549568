"""Virtual ranks: the program of all ranks of a mesh in one process, node by node."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from tutti.graph.analysis.liveness import last_uses
from tutti.graph.ops import collectives, memory_order
from tutti.graph.ops.boundary import IDENTITIES
from tutti.graph.ops.loop import SEND, Body, Do, LoopPart, loop
from tutti.graph.players.dim_segments import join, split
from tutti.graph.players.move import Move
from tutti.graph.players.playing import ADD, Row, play
from tutti.graph.randomness import random
from tutti.graph.randomness.draw import draw, drawn
from tutti.layout import Mesh, Sharding

See = Callable[[fx.Node, list[Any]], None]
Change = Callable[[fx.Node, list[Any]], list[Any]]
# A message between virtual ranks that takes longer will never arrive.
TIMEOUT_SECONDS = 120
_CLOSED: list[Any] = []


def _reduce(parts: Sequence[Tensor], op: str) -> Tensor:
    pairwise = {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "prod": torch.mul,
    }[op]
    return functools.reduce(pairwise, parts)


def _each(x: Tensor, n: int) -> list[Tensor]:
    """A copy for each rank: one may overwrite its own."""
    return [x, *(x.clone() for _ in range(n - 1))]


class VirtualPost:
    """Messages between virtual ranks of different pipeline ranks; each pipeline rank runs in one thread."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[list[Any]]] = {}
        self._lock = threading.Lock()

    def box(self, source: int, to: int) -> queue.SimpleQueue[list[Any]]:
        """The queue from one pipeline rank to another."""
        with self._lock:
            return self._boxes.setdefault((source, to), queue.SimpleQueue())

    def take(self, source: int, to: int) -> list[Any]:
        """The next message on an edge."""
        found = self.box(source, to).get(timeout=TIMEOUT_SECONDS)
        if found is _CLOSED:
            raise RuntimeError(f"the message from {source} to {to} will not come")
        return found

    def close(self) -> None:
        """Wake every thread that waits for a message."""
        with self._lock:
            for box in self._boxes.values():
                box.put(_CLOSED)


class VirtualRanks:
    """Runs a graph for every rank of `mesh` at once; it computes collectives directly.

    On a mesh of one rank it runs a plain graph.

    Args:
        mesh: the ranks. An axis `micro` counts as ranks, too, unless the argument `micro` is given.
        seed, step: of random ops.
        micro: the micro-batch to run, and their number.
        post: carries messages between pipeline ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        seed: int = 0,
        step: int = 0,
        micro: tuple[int, int] | None = None,
        post: VirtualPost | None = None,
    ) -> None:
        self.mesh, self.wide, self.seed, self.step, self.post = mesh, mesh, seed, step, post
        self.coordinates = [mesh.coordinates(r) for r in range(mesh.num_ranks)]
        if micro is not None:
            k, count = micro
            self.wide = Mesh((*mesh.axes, ("micro", count)))
            self.coordinates = [{**own, "micro": k} for own in self.coordinates]

    def at(self, micro: int, count: int) -> VirtualRanks:
        """The same ranks at one of `count` micro-batches."""
        return VirtualRanks(
            self.mesh, seed=self.seed, step=self.step, micro=(micro, count), post=self.post
        )

    def run(
        self,
        graph: fx.Graph,
        owner: nn.Module,
        inputs: Sequence[Sequence[Any]],
        watch: See | None = None,
        change: Change | None = None,
    ) -> list[Any]:
        """The output of every rank, from the inputs of every rank; `watch` receives each node's values,
        `change` replaces them for the rest of the program."""
        values: dict[fx.Node, list[Any]] = {}
        feeds = iter(range(len(inputs[0])))
        last = last_uses(graph)
        ranks = range(self.mesh.num_ranks)
        with torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    k = next(feeds)
                    values[node] = [inputs[r][k] for r in ranks]
                elif node.op == "get_attr":
                    values[node] = [getattr(owner, node.target)] * len(ranks)  # type: ignore[arg-type]
                elif node.op == "output":
                    return [map_arg(node.args[0], lambda n, r=r: values[n][r]) for r in ranks]
                else:
                    values[node] = self._call(node, values, owner)
                if change is not None:
                    values[node] = change(node, values[node])
                if watch is not None:
                    watch(node, values[node])
                for dead in last.get(node, ()):
                    del values[dead]
        raise AssertionError("a graph without output")

    def _call(self, node: fx.Node, values: dict[fx.Node, list[Any]], owner: nn.Module) -> list[Any]:
        ranks = range(self.mesh.num_ranks)
        args = [map_arg(node.args, lambda n, r=r: values[n][r]) for r in ranks]
        if node.target is loop:
            return self._loop(node, values, owner)
        if node.target in collectives.PLAYED:
            return getattr(self, f"_{node.target.__name__}")(args)  # type: ignore[union-attr]
        if node.target in IDENTITIES:
            return [a[0] for a in args]
        if node.target is draw:
            return [self._draw([a])[0] for a in args]
        kwargs = [map_arg(node.kwargs, lambda n, r=r: values[n][r]) for r in ranks]
        return [memory_order.call(node.target, *given) for given in zip(args, kwargs, strict=True)]

    def _loop(self, node: fx.Node, values: dict[fx.Node, list[Any]], owner: nn.Module) -> list[Any]:
        body: Body = node.args[0]  # type: ignore[assignment]
        given = [values[x] for x in node.args[1]]  # type: ignore[union-attr, index]
        results = play(Row(body), given, _VirtualEngine(self, body, owner))
        return [list(of_rank) for of_rank in zip(*results, strict=True)]

    def _send(self, args: list[Any]) -> list[None]:
        _, source, to = args[0]
        assert self.post is not None
        self.post.box(source, to).put([[x.clone() for x in a[0]] for a in args])
        return [None] * len(args)

    def _receive(self, args: list[Any]) -> list[Any]:
        source, to, _ = args[0]
        assert self.post is not None
        return self.post.take(source, to)

    def _grouped(
        self, args: list[Any], make: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        out: list[Any] = [None] * self.mesh.num_ranks
        for group in self.mesh.groups(args[0][1]):
            for rank, value in zip(group, make([args[r][0] for r in group]), strict=True):
                out[rank] = value
        return out

    def _all_reduce(self, args: list[Any]) -> list[Tensor]:
        op = args[0][2]
        return self._grouped(args, lambda xs: _each(_reduce(xs, op), len(xs)))

    def _all_gather(self, args: list[Any]) -> list[Tensor]:
        dim, outer = args[0][2:]
        return self._grouped(args, lambda xs: _each(join(torch.stack(xs), dim, outer), len(xs)))

    def _reduce_scatter(self, args: list[Any]) -> list[Tensor]:
        dim, outer, op = args[0][2:]
        return self._grouped(args, lambda xs: list(split(_reduce(xs, op), dim, outer, len(xs))))

    def _all_to_all(self, args: list[Any]) -> list[Tensor]:
        split_dim, split_outer, cat_dim, cat_outer = args[0][2:]

        def exchange(xs: list[Tensor]) -> list[Tensor]:
            rows = [split(x, split_dim, split_outer, len(xs)) for x in xs]
            return [
                join(torch.stack([row[i] for row in rows]), cat_dim, cat_outer)
                for i in range(len(xs))
            ]

        return self._grouped(args, exchange)

    def _together(self, args: list[Any]) -> list[list[Tensor]]:
        kind, xs, axes, wheres, op = args[0]
        move, play = Move(kind, axes, tuple(map(tuple, wheres)), op), getattr(self, f"_{kind}")
        results: list[list[Tensor]] = [[] for _ in args]
        for i in range(len(xs)):
            single = [(a[1][i], axes, *move.rest(i)) for a in args]
            for mine, value in zip(results, play(single), strict=True):
                mine.append(value)
        return results

    _together_ = _start = _together

    def _reduce_part(self, args: list[Any]) -> list[Tensor]:
        return self._all_reduce(args)  # more than a rank's part; the program cuts its part out

    def _finish(self, args: list[Any]) -> list[Any]:
        return [a[0] for a in args]

    def _gather_into(self, args: list[Any]) -> list[list[Tensor]]:
        return self._together(
            [("all_gather", xs, axes, wheres, "") for _, xs, axes, wheres in args]
        )

    def _buffer(self, args: list[Any]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype) for _, _, shape, dtype in args]

    def _meet(self, args: list[Any]) -> list[None]:
        return [None] * len(args)

    def _part(self, args: list[Any]) -> list[Tensor]:
        return self._shard(args)

    def _shard(self, args: list[Any]) -> list[Tensor]:
        axes, dim, outer = args[0][1:]
        n = self.wide.size(axes)
        return [
            split(a[0], dim, outer, n)[self.wide.index(axes, own)].clone()
            for a, own in zip(args, self.coordinates, strict=True)
        ]

    def _partialize(self, args: list[Any]) -> list[Tensor]:
        axes, op = args[0][1:]
        if op in ("max", "min"):
            return [a[0] for a in args]
        empty = torch.ones_like if op == "prod" else torch.zeros_like
        return [
            a[0] if self.wide.index(axes, own) == 0 else empty(a[0])
            for a, own in zip(args, self.coordinates, strict=True)
        ]

    def _positions(self, args: list[Any]) -> list[Tensor]:
        text, dim, device = args[0]
        sharding = Sharding.parse(text)
        return [sharding.index(dim, self.wide, own).to(device) for own in self.coordinates]

    def _draw(self, args: list[Any]) -> list[Tensor]:
        out = []
        for a, own in zip(args, self.coordinates, strict=False):
            kind, shape, params, dtype, device, stream = a[:6]
            sharding = Sharding.parse(a[6]) if len(a) > 6 else Sharding.whole(shape)
            index = [sharding.index(d, self.wide, own) for d in range(len(shape))]
            key = random.key(self.seed, stream, self.step)
            out.append(drawn(kind, params, dtype, device, key, index, shape))
        return out


class _VirtualEngine:
    """Runs the parts of a loop on virtual ranks: every value is a list, one entry a rank."""

    def __init__(self, ranks: VirtualRanks, body: Body, owner: nn.Module) -> None:
        self.ranks, self.body, self.owner = ranks, body, owner

    def call(
        self, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        ranks = self.ranks.at(micro, self.body.num_micro)
        feeds = [[x[r] for x in inputs] for r in range(self.ranks.mesh.num_ranks)]
        graph = part.adding if adding else part.graph
        assert graph is not None
        outs = ranks.run(graph, self.owner, feeds)
        return _by_value([o[0] for o in outs]), _by_value([o[1] for o in outs])

    def add(self, total: list[Tensor], value: list[Tensor], op: str) -> list[Tensor]:
        return [ADD[op](t, v) for t, v in zip(total, value, strict=True)]

    def join(self, values: list[list[Tensor]], dim: int, outer: int) -> list[Tensor]:
        return [join(torch.stack(of), dim, outer) for of in zip(*values, strict=True)]

    def send(self, do: Do, values: list[Any]) -> None:
        assert self.ranks.post is not None
        self.ranks.post.box(*self._stages(do)).put(values)

    def receive(self, do: Do, likes: list[Tensor]) -> list[Any]:
        assert self.ranks.post is not None
        return self.ranks.post.take(*self._stages(do))

    def _stages(self, do: Do) -> tuple[int, int]:
        """The edge of a loop's message: numbers below zero, since stages are not pipeline ranks."""
        source, to = (do.stage, do.other) if do.way == SEND else (do.other, do.stage)
        return -1 - source, -1 - to


def _by_value(of_ranks: list[list[Any]]) -> list[Any]:
    return [list(of) for of in zip(*of_ranks, strict=True)]
