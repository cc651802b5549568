"""The worker's part of a captured step: a captured step without an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.captured import Captured
from tutti.graph.edits.edit import erase_dead
from tutti.server.split.piece import numbers_of, of_numbers
from tutti.server.split.sparse_tables import TableLookup, by_rows
from tutti.server.split.three_parts import Split


@dataclass(frozen=True)
class WorkerPart:
    """A worker's program: `captured`, whose leaves are the step's own leaves, then the rest.

    leaves: the source of each leaf of the step: its position among the worker's own leaves, or the name of a
        scalar from the servers.
    variables: the variables whose gradients follow, in order.
    numbers: names of the numbers to push that follow the gradients: values of the forward, scalars.
    lookups: of the tables of which it takes rows.
    coupled: a fake of each leaf from the servers, by name.
    """

    captured: Captured
    leaves: tuple[int | str, ...]
    variables: tuple[str, ...]
    numbers: tuple[str, ...]
    coupled: Mapping[str, Any]
    lookups: tuple[TableLookup, ...] = ()

    def sections(self, returned: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """(own leaves, gradients, numbers) of a run's results."""
        first = len(returned) - len(self.variables) - len(self.numbers)
        last = first + len(self.variables)
        return returned[:first], returned[first:last], returned[last:]

    def parts(self, returned: list[Any]) -> tuple[list[Any], dict[str, Tensor], dict[str, float]]:
        """The same with gradients by variable and numbers by name."""
        own, gradients, numbers = self.sections(returned)
        named = dict(zip(self.variables, gradients, strict=True))
        made: dict[str, float] = {}
        for name, x in zip(self.numbers, numbers, strict=True):
            made |= numbers_of(name, x)
        return own, named, made

    def result(
        self, own: Sequence[Any], scalars: Mapping[str, float], *, wide: bool = False
    ) -> list[Any]:
        """The leaves of the step: the worker's own, and those of the coupling, from `scalars`.

        With `wide` floating ones are float64.
        """
        found = []
        for at in self.leaves:
            if isinstance(at, int):
                found.append(own[at])
                continue
            like = self.coupled[at]
            floating = isinstance(like, Tensor) and like.is_floating_point()
            dtype = torch.float64 if wide and floating else None
            found.append(of_numbers(at, scalars, like, dtype))
        return found


def alone(split: Split) -> WorkerPart:
    """A worker whose pushes are separate updates: it computes the coupling on its own gradients."""
    return _part(split, list(split.captured.output[0]), split.scalars | split.given, {})


def together(split: Split) -> WorkerPart:
    """A worker whose gradients go unchanged into the sum over all workers."""
    returned = split.captured.output[0]
    kept = [x for i, x in enumerate(returned) if i not in split.returned]
    return _part(split, kept, split.given, split.returned)


def _part(
    split: Split, kept: list[Any], numbers: dict[str, fx.Node], elsewhere: dict[int, str]
) -> WorkerPart:
    whole = split.captured
    new = zip(whole.updated, whole.output[1], strict=True)
    slots = {s.name for s in whole.state if s.kind == "slot"}
    buffers = {n: x for n, x in new if x.meta.get("region") != "update"}
    leaves = [*kept, *(o.gradient for o in split.owned), *numbers.values()]
    graph, mapped = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(whole.graph, mapped)
    for old, copy in mapped.items():
        copy.meta = dict(old.meta)
    graph.output(
        fx.node.map_arg((leaves, list(buffers.values())), mapped.__getitem__)  # type: ignore[arg-type]
    )
    erase_dead(graph)
    for name in slots:
        graph.erase_node(mapped[whole.placeholder(name)])
    own = iter(range(len(kept)))
    places = [elsewhere[i] if i in elsewhere else next(own) for i in range(len(whole.output[0]))]
    made = replace(
        whole,
        graph=graph,
        inputs=[n for n in whole.inputs if n not in slots],
        kinds={n: k for n, k in whole.kinds.items() if n not in slots},
        state=[s for s in whole.state if s.name not in slots],
        updated=list(buffers),
    )
    lookups = tuple(o.lookup for o in split.owned if o.lookup is not None)
    for lookup in lookups:
        made = by_rows(made, lookup)
    return WorkerPart(
        captured=made,
        leaves=tuple(places),
        variables=tuple(o.variable.name for o in split.owned),
        numbers=tuple(numbers),
        lookups=lookups,
        coupled={n: whole.output[0][i].meta["val"] for i, n in elsewhere.items()},
    )
