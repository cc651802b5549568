"""Runs a program node by node: finds the first NaN or infinity from finite values, and what came in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tutti.errors import TuttiError
from tutti.execution.came_in import ELSEWHERE, Origins, came_in, is_finite, of_all_ranks
from tutti.execution.generate import generate
from tutti.execution.loops import Loops
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives, memory_order
from tutti.graph.ops.loop import Body, loop
from tutti.graph.players.player import Player
from tutti.graph.players.playing import Row
from tutti.graph.randomness import random
from tutti.graph.text import op_name
from tutti.partition.partition import Program


class Checked:
    """One step of `program` on the rank at `coordinates`, checked; its graph is that before the passes.

    `came_in` is the error of a NaN or infinity that an input brought into the results of the last run, or
    None: the caller raises it if the run counts.

    Args:
        loops: plays the rows of its loops.
        seed, step: of random ops.
    """

    def __init__(
        self,
        program: Program,
        player: Player | None,
        coordinates: Mapping[str, int],
        loops: Loops | None,
        seed: int,
        step: int,
    ) -> None:
        self.program, self.player, self.coordinates = program, player, coordinates
        self.loops, self.seed, self.step = loops, seed, step
        self.came_in: TuttiError | None = None
        self._of_loop: set[str] = set()

    def key(self, stream: int) -> int:
        """The key of this step's random numbers."""
        return random.key(self.seed, stream, self.step)

    def run(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """(returned leaves, new local state values). Raises `TuttiError` that names the node."""
        graph, names = self.program.graph, self.program.captured.inputs
        read = {
            n.name: name for n, name in zip(graph.find_nodes(op="placeholder"), names, strict=True)
        }
        with torch.no_grad():
            nodes = _Nodes(self, graph, lambda name: self._of_input(read[name]))
            found = nodes.run(*inputs, enable_io_processing=False)
            values = dict(zip(names, inputs, strict=True))
            self.came_in = came_in(self.program, nodes.origins, values, found[1], self.step)
        return found

    def _of_input(self, name: str) -> Origins:
        """The origin of a value that is not finite at the start of the step: the input `name` itself."""
        return frozenset({name if self.player is None else f"{name} (rank {dist.get_rank()})"})

    def loop(self, body: Body, given: list[Any], origins: Origins) -> tuple[list[Any], Origins]:
        """The results of a loop, its parts checked; and the `origins` of what is not finite in it."""
        assert self.loops is not None
        functions = {(id(p), False): self._part(key, body) for key, p in body.parts.items()}
        self._of_loop = set(origins)
        return self.loops.play(Row(body), functions, given, self.key), frozenset(self._of_loop)

    def note_in_loop(self, origins: Origins) -> None:
        """Values of a part are not finite, with these origins: so may be those that other parts read."""
        self._of_loop |= origins

    def _of_read(self, _name: str) -> Origins:
        """The origins of a value that is not finite and that a part reads."""
        if not self._of_loop:
            self._of_loop = {ELSEWHERE}
        return frozenset(self._of_loop)

    def _part(self, key: tuple[int, str], body: Body) -> Callable[..., Any]:
        graph, (stage, kind) = body.parts[key].graph, key
        piped = "pipe" in self.coordinates

        def run(inputs: list[Any], _key: Callable[[int], int], micro: int, _post: Any) -> Any:
            where = f", micro-batch {micro} of {body.num_micro}"
            where += f", {kind} of stage {stage}" if piped else ""
            nodes = _Nodes(self, graph, self._of_read, micro, where)
            found = nodes.run(*inputs, enable_io_processing=False)
            self.note_in_loop(frozenset().union(*nodes.origins.values()))
            return found

        return run


class _Nodes(fx.Interpreter):
    """The nodes of the program, or of a part of it at one micro-batch.

    `origins` gives, by node, the inputs of the step from which a value that is not finite comes.

    Args:
        of_read: the origins of a placeholder that is not finite, by its name.
    """

    def __init__(
        self,
        step: Checked,
        graph: fx.Graph,
        of_read: Callable[[str], Origins],
        micro: int = 0,
        where: str = "",
    ) -> None:
        super().__init__(step.program.captured.owner, graph=graph)
        self.extra_traceback = False
        self.step, self.micro, self.where = step, micro, where
        self.origins: dict[fx.Node, Origins] = {}
        self._of_read = of_read

    def run_node(self, n: fx.Node) -> Any:
        origins = frozenset().union(*(self.origins.get(x, ()) for x in n.all_input_nodes))
        if n.target is loop:
            body, given = n.args
            values = [self.env[x] for x in given]  # type: ignore[union-attr]
            value, found = self.step.loop(body, values, origins)  # type: ignore[arg-type]
            self.origins[n] = found
            return value
        if n.target in collectives.COLLECTIVES:
            origins = of_all_ranks(origins, n, self.env, self.step.player)
        if n.target in collectives.PLAYED or n.target is torch.ops.tutti.draw.default:
            value = self._played(n)
        else:
            value = super().run_node(n)
        if n.op == "output" or is_finite(value):
            return value
        if n.op == "placeholder":
            origins = self._of_read(n.name)
        elif n.target is collectives.receive:
            origins = frozenset({ELSEWHERE})
        if n.op == "call_function" and not origins:
            raise self._error(n)
        self.origins[n] = origins
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return memory_order.call(target, args, kwargs)

    def _error(self, n: fx.Node) -> TuttiError:
        summed = n.target is operator.getitem and n.all_input_nodes[0].target is loop
        what = "the sum over the micro-batches" if summed else op_name(n)
        return TuttiError(
            f"{what} made NaN or infinity of finite values at step {self.step.step}",
            at=source_of(n),
            why=f"the first such node of the step ({n.meta.get('region', '')}, "
            f"module {n.meta.get('module') or 'none'}{self.where}); the state is as before this step",
        )

    def _played(self, n: fx.Node) -> Any:
        graph = fx.Graph()
        feeds = {x: graph.placeholder(x.name) for x in n.all_input_nodes}
        graph.output(((graph.node_copy(n, feeds.__getitem__),), ()))
        step = self.step
        one = generate(graph, self.module, step.player, step.program.mesh, step.coordinates)  # type: ignore[arg-type]
        return one.function([self.env[x] for x in feeds], step.key, self.micro)[0][0]
