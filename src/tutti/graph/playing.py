"""Plays the row of a loop's body, for whatever runs its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.graph.loop import RECEIVE, REDUCE, SEND, Body, Do, Part


class Engine(Protocol):
    """What runs the parts of a body: for one rank, or for several virtual ones at once."""

    def call(
        self, part: Part, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        """The part's outputs and what it gives to sums, by its graph `adding` if that is so.

        `inputs` may be emptied.
        """
        ...

    def add(self, total: Any, value: Any, op: str) -> Any:
        """`total` and one value more; `total` may be overwritten."""
        ...

    def join(self, values: list[Any], dim: int, outer: int) -> Any:
        """The values of all micro-batches as one."""
        ...

    def send(self, do: Do, values: list[Any]) -> None:
        """Send what `do` says."""
        ...

    def receive(self, do: Do, likes: list[Tensor]) -> list[Any]:
        """The tensors that `do` waits for, like `likes`."""
        ...


def play(body: Body, given: Sequence[Any], engine: Engine) -> list[Any]:
    """Go through the row of `body`; returns its results in order."""
    return _Playing(body, given, engine).play()


class _Playing:
    """One pass through a row.

    No name of a method may keep a value alive while the next part runs.
    """

    def __init__(self, body: Body, given: Sequence[Any], engine: Engine) -> None:
        self.body, self.engine = body, engine
        self.common = dict(zip(body.given, given, strict=True))
        self.live: defaultdict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        self.totals: dict[str, Any] = {}
        self.sums = {s.name: s for s in body.sums}

    def play(self) -> list[Any]:
        for do, dying in zip(self.body.row, self.body.last_reads, strict=True):
            if do.way == RECEIVE:
                self._receive(do)
            elif do.way == SEND:
                self._send(do, dying)
            elif do.kind == REDUCE:
                self._reduce(do)
            else:
                self._part(do, dying)
        return [self._result(name) for name in self.body.results]

    def _receive(self, do: Do) -> None:
        names = self.body.messages.get((do.other, do.kind, do.stage), ())
        likes = [self.body.vals[n] for n in names]
        values = self.live[do.stage, do.micro]
        values.update(zip(names, self.engine.receive(do, likes), strict=True))

    def _send(self, do: Do, dying: frozenset[str]) -> None:
        names = self.body.messages.get((do.stage, do.kind, do.other), ())
        self.engine.send(do, [self._take(do, n, n in dying) for n in names])

    def _reduce(self, do: Do) -> None:
        part = self.body.parts[do.stage, do.kind]
        inputs = [self.totals.pop(n) for n in part.inputs]
        outputs, _ = self.engine.call(part, inputs, 0, adding=False)
        self.totals.update(zip(part.outputs, outputs, strict=True))

    def _part(self, do: Do, dying: frozenset[str]) -> None:
        part = self.body.parts[do.stage, do.kind]
        if not part.outputs and not part.summed:
            return
        near = self.body.near[do.stage, do.kind]
        handed = {n for _, names in near for n in names}
        inputs = [
            self.common[n]
            if n in self.common
            else self._take(do, n, n in dying and n not in handed)
            for n in part.inputs
        ]
        self._call(do, part, inputs)
        for other, names in near:
            self.live[other, do.micro].update((n, self._take(do, n, False)) for n in names)
        for name in handed & dying:
            self._take(do, name, True)
        if not self.live[do.stage, do.micro]:
            self.live.pop((do.stage, do.micro))

    def _call(self, do: Do, part: Part, inputs: list[Any]) -> None:
        added = part.summed[: part.num_added]
        adding = part.adding is not None and all(n in self.totals for n in added)
        if adding:
            inputs += [self.totals[n] for n in added]
        outputs, summed = self.engine.call(part, inputs, do.micro, adding=adding)
        for name, value in zip(part.outputs, outputs, strict=True):
            self.live[self.body.scope_of(do, name)][name] = value
        self._gather(part.summed[part.num_added :] if adding else part.summed, summed)

    def _take(self, do: Do, name: str, last: bool) -> Any:
        values = self.live[self.body.scope_of(do, name)]
        return values.pop(name) if last else values[name]

    def _gather(self, names: Sequence[str], values: list[Any]) -> None:
        """Add to the totals."""
        for name, value in zip(names, values, strict=True):
            op = self.sums[name].op
            if op == "join":
                self.totals.setdefault(name, []).append(value)
            elif name in self.totals:
                self.totals[name] = self.engine.add(self.totals[name], value, op)
            else:
                self.totals[name] = value

    def _result(self, name: str) -> Any:
        total, how = self.totals.pop(name), self.sums.get(name)
        if how is None or how.op != "join":
            return total
        return self.engine.join(total, how.dim, how.outer)


ADD: dict[str, Callable[..., Tensor]] = {
    "sum": torch.Tensor.add_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "prod": torch.Tensor.mul_,
}
