"""Generates one straight-line Python function from a local graph; it frees values at their last use."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.execution.direct import direct, shorter
from tutti.execution.fixed import Fixed
from tutti.execution.profiling import ProgramProfile, now
from tutti.graph.analysis.aliases import is_overwritten, itself
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.liveness import last_uses
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import Body, loop, post
from tutti.graph.ops.matmul import matmul, onednn_linear
from tutti.graph.ops.memory_order import order_for
from tutti.graph.players import dim_segments
from tutti.graph.players.move import Move
from tutti.graph.players.player import Player, SharedMemory
from tutti.graph.randomness import random
from tutti.graph.randomness.draw import drawn
from tutti.layout import Mesh, Sharding
from tutti.user_lines import LINES, LineTable

# The arguments of the generated function from the run: `key(stream)` for this step's random numbers, the
# index of the micro-batch, and the receiver of values before the function's end.
KEY, MICRO, POST = "key", "micro", "post"
MARK = "mark(now())"  # a line's end, for a profile
# The most bytes of zeros on this rank to keep from step to step.
MOST_ZEROS_NBYTES = 1 << 16
INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.pow: "**",
}


# The function `(values, key) -> results` for the body of a loop.
Loops = Callable[[Body], Callable[[list[Any], Callable[[int], int]], list[Any]]]


@dataclass
class Generated:
    """The function `(inputs, key, micro=0, post=None) -> (returned, updates)` and its text."""

    function: Callable[..., tuple[list[Any], list[Any]]]
    text: str


def generate(
    graph: fx.Graph,
    owner: nn.Module,
    player: Player | None,
    mesh: Mesh,
    coordinates: Mapping[str, int],
    *,
    name: str = "step",
    loops: Loops | None = None,
    lodged: Mapping[str, Tensor] | None = None,
    profile: ProgramProfile | None = None,
) -> Generated:
    """Write and compile the function of the rank at `coordinates`.

    If `mesh` has the axis `micro` and `coordinates` has not, this precomputes the values that differ between
    micro-batches for all of them. `loops` returns the function that plays a loop; `lodged` are inputs that
    are the same tensor at every call. The code tells `profile` when each op begins and ends.
    """
    memory = player.shared_memory if player is not None else None
    fixed = Fixed(memory, lodged or {})
    calls = _calls(player, memory)
    writer = _CodeWriter(owner, calls, mesh, dict(coordinates), loops, fixed, profile)
    return writer.write(graph, name)


def _calls(player: Player | None, memory: SharedMemory | None) -> dict[Any, Callable[..., Any]]:
    """The function that plays each node target; none on one device, none in memory without such memory."""
    calls: dict[Any, Callable[..., Any]] = {}
    if player is not None:
        calls |= dict.fromkeys((*collectives.COLLECTIVES, collectives.together), player.play)
        calls |= {
            collectives.start: player.start,
            collectives.finish: player.finish,
            collectives.shard: player.shard,
            collectives.partialize: player.partialize,
            collectives.send: player.send,
            collectives.receive: player.receive,
        }
    if memory is not None:
        calls |= {
            collectives.together_: memory.play,
            collectives.gather_into: memory.gather_into,
            collectives.part: memory.part,
            collectives.meet: memory.meet,
            collectives.buffer: memory.claimed,
        }
    return calls


class _CodeWriter:
    def __init__(
        self,
        owner: nn.Module,
        calls: dict[Any, Callable[..., Any]],
        mesh: Mesh,
        coordinates: dict[str, int],
        loops: Loops | None,
        fixed: Fixed,
        profile: ProgramProfile | None,
    ) -> None:
        self.owner, self.calls, self.mesh, self.loops = owner, calls, mesh, loops
        self.fixed, self.profile = fixed, profile
        in_time = MICRO in mesh and MICRO not in coordinates
        self.moments = (
            [{**coordinates, MICRO: k} for k in range(mesh.size(MICRO))] if in_time else []
        )
        self.coordinates = coordinates
        self.names: dict[fx.Node, str] = {}
        self.free: list[str] = []
        self.num_names = 0
        self.globals: dict[str, Any] = {}
        self.known: dict[Any, str] = {}
        self.moves: dict[Move, Move] = {}
        self.claimed: set[tuple[str, ...]] = set()
        self.zeros: dict[Any, Tensor] = {}
        self.body: list[str] = []
        self.lines: dict[int, str] = {}
        self.written: list[fx.Node] = []  # the node of each line

    def write(self, graph: fx.Graph, name: str) -> Generated:
        looks = {node for node in graph.nodes if self.fixed.is_look(node)}
        same = self._same(graph, looks)
        last = last_uses(graph, same)
        feeds = []
        for node in graph.nodes:
            if node in same:
                self.names[node] = self.names[same[node]]
                continue
            if node.op == "placeholder":
                feeds.append(self._new_name(node))
                continue
            if node in looks:
                self.names[node] = self._constant(self.fixed.of(node))
                continue
            if node.op == "output":
                self.body.append(f"return {self._text(node.args[0])}")
                continue
            dead = [d for d in last.get(node, ()) if d not in looks]
            value = self._value(node, unused=node in dead)
            line = value if node in dead else f"{self._new_name(node)} = {value}"
            dead = [self.names[d] for d in dead if d is not node]
            if dead:
                line += f"; del {', '.join(dead)}"
                self.free += dead
            self.body.append(line)
            self.written.append(node)
            self.lines[len(self.body) + 2] = node.meta.get("source", "")
        # Names of parameters come first among the locals: the first 256 take one instruction less.
        own = "".join(f", v{k}=None" for k in range(len(feeds), self.num_names))
        head = [f"def {name}(inputs, {KEY}, {MICRO}=0, {POST}=None{own}):"]
        head += [f"    [{', '.join(feeds)}] = inputs; inputs.clear()" if feeds else "    pass"]
        if self.profile is not None:
            self.globals |= {"now": now, "mark": self.profile.function(name, self.written).append}
            head[1] += f"; {MARK}"
            timed = len(self.written)
            self.body = [f"{line}; {MARK}" for line in self.body[:timed]] + self.body[timed:]
        text = "\n".join(head + [f"    {line}" for line in self.body])
        table = self.globals[LINES] = LineTable(name, self.lines)
        exec(compile(text, table.file, "exec"), self.globals)  # noqa: S102  # our own text, of the user's own graph
        return Generated(self.globals[name], text)

    def _same(self, graph: fx.Graph, looks: set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The nodes without code: the value of each has a name already."""
        same: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            operand: Any = node.args[0] if self._is_first(node) else itself(node)
            if operand is not None and node not in looks:
                same[node] = same.get(operand, operand)
        return same

    def _new_name(self, node: fx.Node) -> str:
        """A name that no live value has.

        Few names make a small frame: if the interpreter's stack has no room for another frame, each call of a
        Python function maps memory for its frame and unmaps it again.
        """
        if not self.free:
            self.free.append(f"v{self.num_names}")
            self.num_names += 1
        self.names[node] = self.free.pop()
        return self.names[node]

    def _value(self, node: fx.Node, *, unused: bool = False) -> str:
        if node.op == "get_attr":
            return self._constant(getattr(self.owner, str(node.target)))
        if node.target is collectives.positions:
            text, dim, device = node.args
            sharding = Sharding.parse(str(text))
            index = self._at_each(
                sharding.axes,
                lambda at: sharding.index(int(dim), self.mesh, at).to(str(device)),  # type: ignore[arg-type]
            )
            return index
        if is_draw(node):
            return f"{self._drawing(node)}({KEY}({node.args[5]}))"
        if node.target is post:
            return f"{POST}({self._text(node.args[0])}, {node.args[1]!r})"
        if node.target in (loop, *collectives.COLLECTIVES, *collectives.JOINED):
            self.claimed.clear()
        if node.target is loop:
            body: Any = node.args[0]
            assert self.loops is not None
            return f"{self._constant(self.loops(body))}({self._text(node.args[1])}, {KEY})"
        in_time = (collectives.shard, collectives.partialize)
        if self.moments and node.target in in_time and MICRO in collectives.axes_of(node):
            return self._in_time(node)
        if node.target is collectives.partialize and (text := self._partialized(node)):
            return text
        if node.target is collectives.buffer:
            return self._buffer(self.fixed.of(node), node.args[0])
        if node.target in collectives.PLAYED:
            return self._played(node)
        function: Any = getattr(node.target, "silent", node.target) if unused else node.target
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{node.args[1]}]"
        if node.target is matmul and node.meta["val"].dtype == torch.float32:
            return self._matmul(*node.args)
        if (method := shorter(node)) is not None:
            return f"{self._text(node.args[0])}.{method}"
        if function in INFIX and len(node.args) == 2:
            a, b = node.args
            return f"{self._text(a)} {INFIX[function]} {self._text(b)}"
        arguments = [self._in_order(node.target, a) for a in node.args]
        arguments += [f"{k}={self._in_order(node.target, v)}" for k, v in node.kwargs.items()]
        return self._call(function, arguments)

    def _in_order(self, target: Any, x: Any) -> str:
        """An argument, in the order in memory that `target` reads."""
        order = order_for(target, x)
        return self._text(x) if order is None else f"{self._constant(order)}({self._text(x)})"

    def _matmul(self, x: Any, weight: Any, bias: Any = None) -> str:
        """The op's own computation, without a dispatcher and a Python function in between."""
        own = "None" if bias is None else f"{self._text(bias)}.contiguous()"
        given = [self._text(x), self._text(weight), own, "'none'", "()", "None"]
        return self._call(onednn_linear(), given)

    def _call(self, function: Any, arguments: list[str]) -> str:
        function, *first = map(self._constant, direct(function))
        return f"{function}({', '.join([*first, *arguments])})"

    def _partialized(self, node: fx.Node) -> str | None:
        """Permanent zeros, on ranks that are not the first of a group; None if they cannot be permanent."""
        val: Any = node.meta["val"]
        if (
            self._has_coordinates(node)
            and node.args[2] == "sum"
            and val.nbytes <= MOST_ZEROS_NBYTES
        ):
            return None if is_overwritten(node) else self._zeros(val)
        return None

    def _is_first(self, node: fx.Node) -> bool:
        """Whether `node` is the share of a value that this rank has whole."""
        if node.target is not collectives.partialize or not self._has_coordinates(node):
            return False
        return self.mesh.index(collectives.axes_of(node), self.coordinates) == 0

    def _has_coordinates(self, node: fx.Node) -> bool:
        """Whether this rank's coordinates over the axes of `node` are known and constant."""
        axes = collectives.axes_of(node)
        return "replica" not in axes and all(a in self.coordinates for a in axes)

    def _zeros(self, val: Any) -> str:
        key = (tuple(val.shape), val.dtype, val.device)
        if key not in self.zeros:
            self.zeros[key] = torch.zeros(val.shape, dtype=val.dtype, device=val.device)
        return self._constant(self.zeros[key])

    def _buffer(self, memory: Any, axes: Any) -> str:
        """Memory of the group's arena; claimed once between two collectives."""
        if axes in self.claimed:
            return self._constant(memory)
        self.claimed.add(axes)
        claimed = self._constant(self.calls[collectives.buffer])
        return f"{claimed}({self._constant(memory)}, {self._text(axes)})"

    def _played(self, node: fx.Node) -> str:
        """A call of the player. Code generation makes its move, which is the same at every step."""
        assert node.target in self.calls, f"nothing here plays {node.target}"
        function = self._constant(self.calls[node.target])
        if node.target in collectives.COLLECTIVES:
            return f"{function}({self._move(node)}, [{self._text(node.args[0])}])[0]"
        if node.target is collectives.gather_into:
            names, xs = map(self._text, node.args[:2])
            return f"{function}({self._move(node)}, {names}, {xs})"
        if node.target in (collectives.together, collectives.together_, collectives.start):
            return f"{function}({self._move(node)}, {self._text(node.args[1])})"
        return f"{function}({', '.join(map(self._text, node.args))})"

    def _move(self, node: fx.Node) -> str:
        """The move of a node; equal ones are the same object."""
        move = Move.of(node)
        return self._constant(self.moves.setdefault(move, move))

    def _in_time(self, node: fx.Node) -> str:
        """This micro-batch's part of a value; or the value at the first one, nothing at the others."""
        x, count = self._text(node.args[0]), len(self.moments)
        if node.target is collectives.shard:
            _, _, dim, outer = node.args

            def part(x: Tensor, k: int) -> Tensor:
                return dim_segments.part(x, dim, outer, count, k)  # type: ignore[arg-type]

            return f"{self._constant(part)}({x}, {MICRO})"
        assert node.target is collectives.partialize, node.target
        if node.args[2] in ("max", "min"):
            return x
        empty = torch.ones_like if node.args[2] == "prod" else torch.zeros_like
        return f"{x} if {MICRO} == 0 else {self._constant(empty)}({x})"

    def _at_each(self, axes: Iterable[str], make: Callable[[dict[str, int]], Any]) -> str:
        """The result of `make` for this rank, and for the current micro-batch if it depends on it."""
        if self.moments and MICRO in axes:
            return f"{self._constant([make(at) for at in self.moments])}[{MICRO}]"
        return self._constant(make(self.moments[0] if self.moments else self.coordinates))

    def _drawing(self, node: fx.Node) -> str:
        """A function of the key alone: code generation computes the offset of this rank's block once."""
        given: Any = node.args
        kind, shape, params, dtype, device = given[:5]
        sharding = Sharding.parse(given[6]) if len(given) > 6 else Sharding.whole(shape)

        def drawing(at: dict[str, int]) -> Callable[[int], Any]:
            index = [sharding.index(d, self.mesh, at) for d in range(len(sharding.dims))]
            block: Any = random.RandomBlock.of(index, sharding.shape, device)  # type: ignore[arg-type]

            def draw(key: int) -> Any:
                return drawn(kind, params, dtype, device, key, block, sharding.shape)  # type: ignore[arg-type]

            return draw

        return self._at_each(sharding.axes, drawing)

    def _text(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, tuple):
            inner = ", ".join(map(self._text, x))
            return f"({inner},)" if len(x) == 1 else f"({inner})"
        if isinstance(x, list):
            return f"[{', '.join(map(self._text, x))}]"
        if type(x) in (bool, int, str, type(None)) or (type(x) is float and math.isfinite(x)):
            return repr(x)  # of a subclass, as NumPy's and enums are, it is no literal
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        key = ("id", id(x))  # `globals` keeps it alive
        if key not in self.known:
            self.known[key] = f"c{len(self.known)}"
            self.globals[self.known[key]] = x
        return self.known[key]
