"""Runs the update part of a captured step on servers: on blocks, in place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, fx

from tutti.errors import ServerError
from tutti.graph.ops.fused_updates import BY_OP
from tutti.graph.text import text
from tutti.server.protocol.update import WEIGHT, ServedVariable, Updater
from tutti.server.split.piece import GraphPiece, names_of_numbers, numbers_of
from tutti.server.split.three_parts import GIVEN, GRADIENT, Owned, Split


class GraphUpdater:
    """`server.protocol.update.Updater` from a split.

    Args:
        split: of the captured step.
        wide: compute in float64 throughout, for comparisons.
    """

    def __init__(self, split: Split, *, wide: bool = False) -> None:
        self._owned = {o.variable.name: o for o in split.owned}
        self._wide, self._split = wide, split
        variables = (o.variable for o in split.owned)
        self.variables: tuple[ServedVariable, ...] = tuple(
            map(_wide, variables) if wide else variables
        )
        self.coupled = any(o.sums is not None for o in split.owned)
        self.given = tuple(split.numbers)
        values = ((name, node.meta["val"]) for name, node in split.scalars.items())
        scalars = [n for name, val in values for n in names_of_numbers(name, val)]
        self.numbers = (*self.given, *scalars)
        self.rates = tuple(n for n in self.given if n.endswith(".lr"))
        self._updates: dict[str, GraphPiece] = {}
        self._sums: dict[str, GraphPiece] = {}

    @property
    def fingerprint(self) -> str:
        """A hash of the text of all pieces, equal in every process that captures the same step."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        pieces = [p for o in self._owned.values() for p in (o.sums, o.update) if p is not None]
        pieces += [self._split.coupling] if self._split.coupling is not None else []
        told = [f"{v.name} {v.shape} {v.dtype} {sorted(v.slots.items())}" for v in self.variables]
        told += [f"{p.inputs} {p.outputs}\n{_without_lines(p.graph)}" for p in pieces]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    def texts(self) -> dict[str, str]:
        """By variable, the text of its update."""
        return {n: _without_lines(o.update.graph) for n, o in self._owned.items()}

    @cached_property
    def _coupling(self) -> GraphPiece | None:
        return self._ready(self._split.coupling)

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        """A block's contribution to the sums of its variable: 1-D, float64."""
        owned = self._owned[variable]
        if owned.sums is None:
            return gradient.new_empty(0, dtype=torch.float64)
        if variable not in self._sums:
            self._sums[variable] = self._ready(owned.sums)  # type: ignore[assignment]
        return torch.stack(list(self._sums[variable]({GRADIENT: gradient}).values()))

    def scalars(self, sums: Mapping[str, Tensor], given: Mapping[str, float]) -> dict[str, float]:
        """`given`, and the scalars of the coupling from it and the sums of all variables."""
        given = {n: given[n] for n in self.given}
        if self._coupling is None:
            return given
        known: dict[str, object] = dict(given)
        for name, values in sums.items():
            piece = self._owned[name].sums
            known |= zip(piece.outputs, values, strict=True) if piece is not None else ()
        made = self._coupling(known)
        for name, x in made.items():
            given |= numbers_of(name, x)
        return given

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        """One step of one block, in place."""
        if variable not in self._updates:
            self._updates[variable] = self._ready(overwriting(self._owned[variable]))  # type: ignore[assignment]
        made = self._updates[variable]({**scalars, **state, GRADIENT: gradient})
        for name, new in made.items():
            if new is not state[name]:
                state[name].copy_(new)

    def _ready(self, piece: GraphPiece | None) -> GraphPiece | None:
        return piece.promoted() if piece is not None and self._wide else piece


def check_same(now: Updater, known: Updater) -> None:
    """Raise `ServerError` unless servers that run `known` can take the gradients of a step with `now`."""
    if now.fingerprint != known.fingerprint:
        why, fix = _difference(now, known)
        raise ServerError(
            "the step has another update than the one that the servers run", why=why, fix=fix
        )


def _difference(now: Updater, known: Updater) -> tuple[str, str]:
    """Why two updates differ, and what helps."""
    numbers = "change only what the graph takes as a number: lr, weight_decay, momentum, betas"
    ours, theirs = ({v.name: v for v in one.variables} for one in (now, known))
    for name in (*theirs, *ours):
        if name not in ours:
            why = f'"{name}" is trained no longer: it is frozen, or no optimizer has it'
            return why, "lr=0 in a group of its own instead; or freeze it before the first call"
        if name not in theirs:
            why = f'"{name}" is trained now, and was not when the servers captured the step'
            return why, "train it from the first call, with lr=0 in a group of its own until then"
    new = [n for n in now.given if n not in known.given and not n.startswith(GIVEN)]
    if new:
        return f"it reads {new[0]}, which was a constant when the servers captured it", numbers
    both = (now, known) if isinstance(now, GraphUpdater) and isinstance(known, GraphUpdater) else ()
    texts = [one.texts() for one in both]
    for name in texts[0] if texts else ():
        if texts[0][name] != texts[1].get(name):
            why = f'the update of "{name}" has other ops or constants than when the servers captured it: '
            return (
                why
                + "by an option of the optimizer, or a number that follows from the batch's size",
                numbers,
            )
    return (
        "the numbers that couple weights (a limit of clipping) have other ops or constants",
        numbers,
    )


def overwriting(owned: Owned) -> GraphPiece:
    """The update of a variable; its fused kernel overwrites the state if nothing else reads it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(owned.update.graph, {}))
    own = {WEIGHT, *owned.variable.slots}
    inputs = zip(owned.update.inputs, graph.nodes, strict=False)
    state = {node for name, node in inputs if name in own}
    for node in graph.nodes:
        kernel = BY_OP.get(node.target)
        if kernel is None:
            continue
        lists = node.args
        written = [x for k in kernel.written for x in lists[k]]
        if all(x in state and list(x.users) == [node] for x in written):
            node.target = kernel.overwriting
    return GraphPiece(graph, owned.update.owner, owned.update.inputs, owned.update.outputs)


def _without_lines(graph: fx.Graph) -> str:
    """The text of a graph without its nodes' lines in the user's script."""
    return "\n".join(line.partition("  # ")[0].rstrip() for line in text(graph).splitlines())


def _wide(variable: ServedVariable) -> ServedVariable:
    """The same in float64."""
    slots = {n: (shape, _double(dtype)) for n, (shape, dtype) in variable.slots.items()}
    return replace(variable, dtype=_double(variable.dtype), slots=slots)


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
