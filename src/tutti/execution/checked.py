"""Runs a program node by node and stops at the first NaN or infinity from finite values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from tutti.errors import TuttiError
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
from tutti.torch_private.pytrees import tree_leaves


class Checked:
    """One step of `program` on the rank at `coordinates`, checked; its graph is that before the passes.

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

    def key(self, stream: int) -> int:
        """The key of this step's random numbers."""
        return random.key(self.seed, stream, self.step)

    def run(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """(returned leaves, new local state values). Raises `TuttiError` that names the node."""
        with torch.no_grad():
            return _Nodes(self, self.program.graph).run(*inputs, enable_io_processing=False)

    def loop(self, body: Body, given: list[Any]) -> list[Any]:
        """The results of a loop, its parts checked."""
        assert self.loops is not None
        functions = {(id(p), False): self._part(key, body) for key, p in body.parts.items()}
        return self.loops.play(Row(body), functions, given, self.key)

    def _part(self, key: tuple[int, str], body: Body) -> Callable[..., Any]:
        graph, (stage, kind) = body.parts[key].graph, key
        piped = "pipe" in self.coordinates

        def run(inputs: list[Any], _key: Callable[[int], int], micro: int, _post: Any) -> Any:
            where = f", micro-batch {micro} of {body.num_micro}"
            where += f", {kind} of stage {stage}" if piped else ""
            return _Nodes(self, graph, micro, where).run(*inputs, enable_io_processing=False)

        return run


class _Nodes(fx.Interpreter):
    """The nodes of the program, or of a part of it at one micro-batch."""

    def __init__(self, step: Checked, graph: fx.Graph, micro: int = 0, where: str = "") -> None:
        super().__init__(step.program.captured.owner, graph=graph)
        self.extra_traceback = False
        self.step, self.micro, self.where = step, micro, where

    def run_node(self, n: fx.Node) -> Any:
        if n.target is loop:
            body, given = n.args
            return self.step.loop(body, [self.env[x] for x in given])  # type: ignore[arg-type, union-attr]
        if n.target in collectives.PLAYED or n.target is torch.ops.tutti.draw.default:
            value = self._played(n)
        else:
            value = super().run_node(n)
        if n.op == "call_function" and not _finite(value) and self._from_finite(n):
            raise self._error(n)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return memory_order.call(target, args, kwargs)

    def _from_finite(self, n: fx.Node) -> bool:
        """Whether all inputs of `n` are finite; the sum over a loop reads the loop's results."""
        read = [self.env[x] for x in n.all_input_nodes if x.target is not loop]
        return all(map(_finite, read))

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


def _finite(value: Any) -> bool:
    """Attention masks hold -inf on purpose: NaN counts, and infinities that are not negative."""
    found = map(_reals, (x for x in tree_leaves(value) if isinstance(x, Tensor)))
    found = (x for x in found if x.is_floating_point())
    return not any(bool((x.isnan() | (x == float("inf"))).any()) for x in found)


def _reals(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
