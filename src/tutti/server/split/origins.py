"""Traces the values of an update to their sources: gradients, state, numbers, reductions of gradients."""

from __future__ import annotations

from torch import fx

from tutti.capture.captured import Captured
from tutti.errors import CaptureError
from tutti.graph.edits.edit import source_of
from tutti.graph.randomness.draw import draw
from tutti.graph.text import op_name
from tutti.server.split.halved_reductions import Reduction, reduction_of
from tutti.user_lines import quoted

NUMBERS = frozenset({"hyper", "number"})
_STATE = frozenset({"parameter", "slot", "buffer"})


class Origins:
    """The nodes of a captured step's update, and their sources.

    update: the nodes that depend on a gradient after the last backward, and all of the optimizer's.
    reductions: the nodes that reduce one gradient, and nothing else, to one number.
    reads: for each node of the update its inputs from outside of the update (state and numbers among them)
        and its reductions.

    Raises `CaptureError` if the update cannot run apart from the rest.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.inputs = {node: name for name, node in captured.placeholders.items()}
        self.nodes = list(captured.graph.nodes)
        self.update = {n for n in self.nodes if _is_update(n)}
        self.backward = self._backward()
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self.reductions: dict[fx.Node, Reduction] = {}
        self._refuse()
        for node in self.nodes:
            if node in self.update:
                self._look_at(node)

    def is_gradient(self, node: fx.Node) -> bool:
        """Whether a value from before the update is a gradient."""
        return node not in self.update and node in self.backward

    def is_scalar(self, node: fx.Node) -> bool:
        """Whether a value of the update depends on reductions and numbers only."""
        if node in self.reductions:
            return True
        reads = self.reads.get(node, frozenset())
        return any(x in self.reductions for x in reads) and not any(
            self.is_gradient(x) or self._is_state(x) for x in reads
        )

    def _backward(self) -> set[fx.Node]:
        """All nodes that depend on the results of a backward."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            first = node.op == "call_function" and node.meta.get("region") == "backward"
            if first or any(x in found for x in node.all_input_nodes):
                found.add(node)
        return found

    def _refuse(self) -> None:
        for node in self.nodes:
            late = next((x for x in node.all_input_nodes if x in self.update), None)
            if node in self.update and node.target is draw:
                raise refused(
                    node, "draws random numbers in the update", "servers update block by block"
                )
            if late is not None and node not in self.update and node.op != "output":
                raise refused(
                    node,
                    "uses the result of an update",
                    "workers know new weights only with their next pull",
                )

    def _look_at(self, node: fx.Node) -> None:
        atoms: set[fx.Node] = set()
        for x in node.all_input_nodes:
            if x in self.reductions or x not in self.update:
                atoms |= {x} if x.op != "get_attr" else set()
            else:
                atoms |= self.reads[x]
        self.reads[node] = frozenset(atoms)
        reduction = reduction_of(node)
        if reduction is None or any(x in self.reductions or self._is_state(x) for x in atoms):
            return
        if sum(self.is_gradient(x) for x in atoms) == 1:
            self.reductions[node] = reduction

    def _is_state(self, node: fx.Node) -> bool:
        return self.captured.kinds.get(self.inputs.get(node, ""), "") in _STATE


def _is_update(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("region") == "update"


def refused(node: fx.Node, what: str, why: str) -> CaptureError:
    """The error for a step whose update servers cannot run, with the line of `node`."""
    return CaptureError(
        f"servers cannot run this step: {op_name(node)} {what}",
        at=quoted(source_of(node)),
        why=why,
        fix="a layout without server, where the whole step runs on each rank",
    )
