"""A captured step: one functional graph, and the places of its inputs and results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.capture.handed import (
    Changes,
)
from tutti.capture.python.drawn_numbers import Drawn
from tutti.capture.python.effects import Effect
from tutti.capture.python.findings import Number
from tutti.capture.python.held_values import TableEntry
from tutti.capture.python.not_kept import NotKept
from tutti.capture.python.read_values import (
    Reads,
)
from tutti.capture.state.kept_gradients import KeptGradients
from tutti.capture.state.lift import (
    StateTensor,
)
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.pytrees import TreeSpec


@dataclass
class Captured:
    """A training step as one functional graph.

    The graph's placeholders are `inputs`, in order: state by name, hyper-parameters by name, then the
    batch's floats and free integers as `number.0`, ... and its tensors as `batch.0`, ... Other leaves of the
    batch are constants. Its output is `(returned leaves, new state values)`,
    the latter in the order of `updated`.

    The hyper-parameters include the step's own `numbers`. The leaves of its `effects` follow the
    `num_returned` leaves that the step returns. `outside` gives, by name, the places of state that is
    neither the model's nor an optimizer's. `trained` gives, by name, the `requires_grad` of parameters that
    the step changes. With `other_modes` it leaves modules in other modes than those that it depends on.
    `not_kept` are the values in modules that it leaves there on one device only. `changes` are
    those in the containers of its batch. `gradients` are those that its calls find and leave. `drawn` are
    the random numbers of the host: `draw.0`, ... come behind the batch's numbers.
    """

    graph: fx.Graph
    owner: nn.Module
    inputs: list[str]
    kinds: dict[str, str]
    state: list[StateTensor]
    updated: list[str]
    returned: TreeSpec
    mode: FakeTensorMode
    guards: list[Any] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    num_returned: int = 0
    outside: dict[str, TableEntry] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)
    trained: dict[str, bool] = field(default_factory=dict)
    other_modes: bool = False
    not_kept: list[NotKept] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    gradients: KeptGradients = field(default_factory=KeptGradients)
    drawn: Drawn = field(default_factory=Drawn)

    @property
    def num_results(self) -> int:
        """The number of results of the step and of its effects; the values that it reads follow."""
        return self.num_returned + sum(e.num_leaves for e in self.effects)

    @property
    def inspects(self) -> bool:
        """Whether some of its results are values that no call reads."""
        return any(effect.inspected for effect in self.effects)

    def passing(self) -> list[Tensor]:
        """The tensors outside the state that are now where each call puts others, each once."""
        entries = [entry for effect in self.effects for entry in effect.entries]
        entries += [one.entry for one in self.not_kept]
        found = {id(x): x for x in (entry.get() for entry in entries) if isinstance(x, Tensor)}
        state = {id(s.tensor) for s in self.state}
        return [x for i, x in found.items() if i not in state and x.layout == torch.strided]

    def without_inspected(self) -> Captured:
        """The same step without these results."""
        made = copied(self)
        leaves, updates = made.output
        at, kept = self.num_returned, leaves[: self.num_returned]
        for effect in self.effects:
            if not effect.inspected:
                kept = [*kept, *leaves[at : at + effect.num_leaves]]
            at += effect.num_leaves
        made.graph.output_node().args = (([*kept, *leaves[at:]], updates),)
        made.graph.eliminate_dead_code()
        gone = [NotKept.coupled(e.entries[0]) for e in self.effects if e.inspected]
        effects = [effect for effect in self.effects if not effect.inspected]
        return replace(made, effects=effects, not_kept=[*self.not_kept, *gone])

    def placeholder(self, name: str) -> fx.Node:
        """The placeholder of input `name`."""
        return self.placeholders[name]

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """Placeholders by input name."""
        found = (n for n in self.graph.nodes if n.op == "placeholder")
        return dict(zip(self.inputs, islice(found, len(self.inputs)), strict=True))

    @property
    def output(self) -> tuple[list[Any], list[fx.Node]]:
        """The returned leaves and the new state values."""
        node = self.graph.output_node()
        return node.args[0]  # type: ignore[return-value]


def copied(captured: Captured) -> Captured:
    """The same capture with a graph of its own, to rewrite for one layout."""
    graph, mapped = fx.Graph(), {}
    result = graph.graph_copy(captured.graph, mapped)
    graph.output(result)
    for old, new in mapped.items():
        new.meta = dict(old.meta)
    return replace(captured, graph=graph)
