"""A step with two of each kind of repeated layer, whose program stands for that of all layers.

    layers   0  1  2 ... 30  31          ->   0  31
    counts                                    1  31

A value of a layer that is left out is read from the nearest layer that stays. The update is left out: each
parameter is minus its gradient, so that gradients still enter the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured, copied
from tutti.graph.edits.edit import erase_dead
from tutti.planner.placement.op_runs import Stretch, doubled, runs_of, signatures

aten = torch.ops.aten
# The note of a node: how many nodes of the whole step it stands for.
TIMES = "times"
# The note of a node of a captured step, if its layers stand for more of a deeper model: how many.
STANDS_FOR = "stands_for"
# A class of equal nodes, or of parameters with equal first users.
Kind = tuple[object, ...]


@dataclass(frozen=True)
class ReducedStep:
    """A captured step without most of its repeated layers, and without its update.

    Args:
        captured: to plan and partition.
        kinds: by parameter of the reduced step its class.
        members: by parameter of it the parameters of the whole step for which it stands.
    """

    captured: Captured
    kinds: Mapping[str, Kind]
    members: Mapping[str, tuple[str, ...]]


class _Positions:
    """The class and the layer of each op of forward and backward, and of each parameter and buffer."""

    def __init__(self, captured: Captured, wide: bool) -> None:
        graph = captured.graph
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and _computes(n)]
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        runs = runs_of(signatures(self.nodes))
        self.runs = [(doubled(r) or r) if wide else r for r in runs]
        self.kind: dict[fx.Node, Kind] = {}
        self.layer: dict[fx.Node, int] = {}
        for number, run in enumerate(self.runs):
            for i, node in enumerate(self.nodes[run.start : run.stop]):
                self.kind[node] = (number, i % run.period)
                self.layer[node] = i // run.period
        for name, node in captured.placeholders.items():
            if captured.kinds[name] in ("parameter", "buffer"):
                self._of_state(name, node)

    def _of_state(self, name: str, node: fx.Node) -> None:
        """State has the class of its first user, if that is in a layer that it alone serves."""
        users = sorted((u for u in node.users if _computes(u)), key=self.order.__getitem__)
        layers = {
            self.layer[u] for u in users if u in self.layer and self.kind[u][0] == self._run(users)
        }
        if users and users[0] in self.kind and len(layers) == 1:
            self.kind[node] = ("state", *self.kind[users[0]], _argument(node, users[0]))
            self.layer[node] = self.layer[users[0]]
        else:
            self.kind[node] = ("state", name)

    def _run(self, users: list[fx.Node]) -> object:
        return self.kind[users[0]][0] if users and users[0] in self.kind else None

    def kept(self, node: fx.Node) -> bool:
        """Whether a node stays: those outside of runs, and in the first and the last layers."""
        if node not in self.layer:
            return True
        return self._keeps(self._of(node), self.layer[node])

    def _of(self, node: fx.Node) -> Stretch:
        kind = self.kind[node]
        return self.runs[kind[1] if kind[0] == "state" else kind[0]]  # type: ignore[index]

    @staticmethod
    def _keeps(run: Stretch, layer: int) -> bool:
        return layer == 0 or layer >= run.count - 1

    def times(self, node: fx.Node) -> int:
        """How many nodes a node that stays stands for."""
        own = stands_for(node)
        if node not in self.layer:
            return own
        count = self._of(node).count
        return own * max(1, count - 1) if self.layer[node] == count - 1 else own


def mark_depth(captured: Captured, times: Callable[[str], int]) -> None:
    """Note for how many nodes of a deeper model each node stands, by its module or the name of a state."""
    for node in captured.graph.nodes:
        node.meta[STANDS_FOR] = times(node.meta.get("module") or "")
    for name, node in captured.placeholders.items():
        node.meta[STANDS_FOR] = times(name)


def stands_for(node: fx.Node) -> int:
    """How many nodes of a deeper model a node of a captured step stands for."""
    return int(node.meta.get(STANDS_FOR, 1))


def reduced(captured: Captured, *, wide: bool = False, keeps_all: bool = False) -> ReducedStep:
    """The reduced step; the whole one without its update, if its layers depend on each other otherwise; with
    its updates, if a forward reads one.

    Args:
        captured: a step, not yet planned.
        wide: take two layers for one, where neighbors need different shardings.
        keeps_all: leave no layer out.
    """
    at = _Positions(captured, wide)
    for keeps in (keeps_all, True):
        made = _Writer(captured, at, keeps).write()
        if made is not None:
            return made
    return _with_updates(captured, at)


def _with_updates(captured: Captured, at: _Positions) -> ReducedStep:
    """The whole step: a forward reads what an update has made, as the second epoch of PPO does."""
    whole = copied(captured)
    for node in whole.graph.nodes:
        node.meta[TIMES] = stands_for(node)
    names = [n for n, kind in captured.kinds.items() if kind == "parameter"]
    kinds = {n: at.kind[captured.placeholders[n]] for n in names}
    return ReducedStep(whole, kinds, {n: (n,) for n in names})


class _Writer:
    def __init__(self, captured: Captured, at: _Positions, keeps_all: bool) -> None:
        self.captured, self.at, self.keeps_all = captured, at, keeps_all
        self.graph = fx.Graph()
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.stays: dict[Kind, list[fx.Node]] = {}
        self.names = {node: name for name, node in captured.placeholders.items()}
        self.new = dict(zip(captured.output[1], captured.updated, strict=True))
        for node, kind in at.kind.items():
            if self._kept(node):
                self.stays.setdefault(kind, []).append(node)

    def _kept(self, node: fx.Node) -> bool:
        return self.keeps_all or self.at.kept(node)

    def write(self) -> ReducedStep | None:
        """The reduced step; None if a value that is left out has no likeness before its user."""
        for node in self.captured.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if self._kept(node):
                    self._copy(node)
            elif node.op == "call_function" and _computes(node) and self._kept(node):
                if not self._mappable(node):
                    return None
                self._copy(node)
        updated = self._updates()
        returned = [self.mapped[x] for x in self._returned()]
        self.graph.output((returned, [n for _, n in updated]))
        erase_dead(self.graph)
        for node in self.graph.nodes:
            if node.op == "placeholder" and not node.users:
                self.graph.erase_node(node)
        return self._made([name for name, _ in updated])

    def _copy(self, node: fx.Node) -> None:
        made = self.graph.node_copy(node, lambda x: self.mapped[self._likeness(x, node)])
        times = stands_for(node) if self.keeps_all else self.at.times(node)
        made.meta = {**node.meta, TIMES: times}
        self.mapped[node] = made

    def _mappable(self, node: fx.Node) -> bool:
        return all(self._likeness(x, node) in self.mapped for x in node.all_input_nodes)

    def _likeness(self, x: fx.Node, user: fx.Node | None) -> fx.Node:
        """The node that stands for `x`, before `user`: itself, or the one of the nearest layer."""
        if x in self.new and not _computes(x) and x.op == "call_function":
            x = self.captured.placeholders[self.new[x]]
        if x in self.mapped:
            return x
        layer = self.at.layer.get(x, 0)
        near = [n for n in self.stays.get(self.at.kind.get(x, ()), ()) if n in self.mapped]
        return min(near, key=lambda n: (abs(self.at.layer[n] - layer), self.at.layer[n]), default=x)

    def _returned(self) -> list[fx.Node]:
        given = self.captured.output[0]
        return [x for x in given if isinstance(x, fx.Node) and x in self.mapped and _computes(x)]

    def _updates(self) -> list[tuple[str, fx.Node]]:
        """Each parameter that stays and has a gradient, and its new value."""
        found = []
        for name, gradient in gradients_of(self.captured).items():
            weight = self.captured.placeholders[name]
            gradient = self._likeness(gradient, None)
            if weight not in self.mapped or gradient not in self.mapped:
                continue
            operands = (self.mapped[weight], self.mapped[gradient])
            made = self.graph.call_function(aten.sub.Tensor, operands)
            made.meta = {"val": weight.meta["val"], "region": "update", TIMES: 1}
            made.meta[TIMES] = self.mapped[weight].meta[TIMES]
            found.append((name, made))
        return found

    def _made(self, updated: list[str]) -> ReducedStep:
        live = set(self.graph.nodes)
        inputs = [n for n in self.captured.inputs if self._is_live(n, live)]
        members: dict[str, list[str]] = {}
        for name, kind in self.captured.kinds.items():
            node = self.captured.placeholders[name]
            if kind == "parameter" and (self._likeness(node, None)) in self.mapped:
                members.setdefault(self.names[self._likeness(node, None)], []).append(name)
        kept = replace(
            self.captured,
            graph=self.graph,
            inputs=inputs,
            kinds={n: self.captured.kinds[n] for n in inputs},
            state=[s for s in self.captured.state if s.name in inputs and s.kind != "slot"],
            updated=updated,
        )
        kinds = {n: self.at.kind[self.captured.placeholders[n]] for n in members if n in inputs}
        return ReducedStep(kept, kinds, {n: tuple(members[n]) for n in kinds})

    def _is_live(self, name: str, live: set[fx.Node]) -> bool:
        return self.mapped.get(self.captured.placeholders[name]) in live


def gradients_of(captured: Captured) -> dict[str, fx.Node]:
    """By parameter the last value of forward and backward that its update alone reads in its shape."""
    names = dict(zip(captured.output[1], captured.updated, strict=True))
    found: dict[str, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.op == "call_function" and _computes(node) and isinstance(node.meta["val"], Tensor):
            users = [u for u in node.users if u.meta.get("region") == "update"]
            name = _updated_by(node, users, names)
            if name in captured.kinds and captured.kinds[name] == "parameter":
                found[name] = node
    return found


def _updated_by(node: fx.Node, users: list[fx.Node], names: Mapping[fx.Node, str]) -> str:
    """The parameter whose value or slot is the first to follow from `node` by values of its shape."""
    shape, seen, queue = node.meta["val"].shape, set(users), list(users)
    while queue:
        at = queue.pop(0)
        if at in names:
            name = names[at]
            return (
                name.removeprefix("optim.").rpartition(".")[0]
                if name.startswith("optim.")
                else name
            )
        for user in at.users:
            if user not in seen and user.op == "call_function" and _alike(user, shape):
                seen.add(user)
                queue.append(user)
    return ""


def _alike(node: fx.Node, shape: torch.Size) -> bool:
    val = node.meta.get("val")
    values = val if isinstance(val, list | tuple) else [val]
    return any(isinstance(x, Tensor) and x.shape == shape for x in values)


def _computes(node: fx.Node) -> bool:
    return node.meta.get("region") in ("forward", "backward")


def _argument(node: fx.Node, user: fx.Node) -> int:
    """The position of an operand in a call."""
    return list(user.all_input_nodes).index(node)
