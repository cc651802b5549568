"""Workers that push to servers as they come, in one process.

A worker pulls as soon as it has pushed. Workers are equally fast, but for each gradient one takes up to a
fifth more or less: so gradients are about as many updates old as there are other workers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.capture.state.lift import numbers
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.replicas import replica_rows
from tutti.server.protocol import consistency
from tutti.server.protocol.keys import blocks
from tutti.server.protocol.ledger import Ledger
from tutti.server.protocol.update import WEIGHT
from tutti.server.protocol.virtual_servers import VirtualServers
from tutti.server.split.program import worker_program
from tutti.server.split.three_parts import split
from tutti.server.split.updater import GraphUpdater
from tutti.server.split.worker_part import alone
from tutti.serving.server_side import whole_state
from tutti.serving.worked import Worked

# By how much the time for a gradient differs.
JITTER = 0.2


class Asynchronous:
    """A training step run by workers and servers.

    Args:
        train_step, model, optimizer: of the script; the model holds the weights when `finish` returns.
        batch: one like those to come.
        sync: such as "async" or "bounded(1, ahead)". While workers are together, gradients are means over
            their rows; the step must be a mean over rows, without random numbers.
        staleness: counts how many updates old gradients were, of those that are updates of their own.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Sequence[Tensor],
        sync: str,
        *,
        num_workers: int,
        seed: int = 0,
    ) -> None:
        self.ahead = consistency.parse(sync).ahead
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.num_workers = num_workers
        captured = capture(train_step, model, optimizer, self._rows(batch, 0))
        made = split(captured)
        self.part, self.updater = alone(made), GraphUpdater(made)
        program = worker_program(self.part, Layout())
        self.worked = Worked(made, self.part, program, self.updater, None, None, {}, apart=True)
        names = {v.name for v in self.updater.variables}
        self.servers = VirtualServers(
            self.updater,
            blocks(self.updater.variables, 1),
            whole_state(model, optimizer, names),
            consistency.parse(sync),
            num_workers=num_workers,
            num_servers=1,
        )
        self.staleness: Counter[int] = Counter()
        self._chance = random.Random(seed)
        self._done_at = [self._chance.random() for _ in range(num_workers)]
        self._weights: list[list[tuple[dict[str, Tensor], int]]] = [[] for _ in range(num_workers)]
        self._todo: list[list[tuple[int, Sequence[Tensor], float]]] = [
            [] for _ in range(num_workers)
        ]

    def step(self, k: int, batch: Sequence[Tensor]) -> None:
        """Give every worker its rows of a batch; they take them as they come to it."""
        lr = numbers(self.optimizer, [])["optim.0.lr"]
        if not self._ledger.alone:
            self._together(k, batch, lr)
            return
        for w, todo in enumerate(self._todo):
            todo.append((k, self._rows(batch, w), lr))
            self._pull(w)
        while max(map(len, self._todo)) > 2:  # nobody is more than two batches behind the others
            self._push()

    def finish(self) -> None:
        """Let all workers end."""
        while any(self._todo):
            self._push()

    def weights(self) -> dict[str, Tensor]:
        """The variables as the servers have them now."""
        return {name: slots[WEIGHT] for name, slots in self.servers.state().items()}

    @property
    def _ledger(self) -> Ledger:
        return self.servers.machines[0].ledger

    def _together(self, k: int, batch: Sequence[Tensor], lr: float) -> None:
        """One update from all workers' gradients."""
        pushes = {}
        for w, weights in enumerate(self.servers.pull(range(self.num_workers))):
            gradients, given = self._gradients(weights, w, k, self._rows(batch, w))
            given = {**given, "optim.0.lr": lr}
            mean = {n: g / self.num_workers for n, g in gradients.items()}
            pushes[w] = mean, {n: given[n] for n in self.updater.given}
        self.servers.push(pushes)

    def _pull(self, w: int) -> None:
        """A worker that has work brings weights for it; with `ahead` also for the gradient after it."""
        wanted = 2 if self.ahead else 1
        while len(self._weights[w]) < wanted and self.servers.permitted(w):
            version = self._ledger.version
            self._weights[w].append((self.servers.pull([w])[0], version))

    def _push(self) -> None:
        """One worker has computed its gradient, and goes on with the next."""
        ready = [w for w, todo in enumerate(self._todo) if todo and self._weights[w]]
        w = min(ready, key=self._done_at.__getitem__)
        self._done_at[w] += self._chance.uniform(1 - JITTER, 1 + JITTER)
        k, rows, lr = self._todo[w].pop(0)
        weights, version = self._weights[w].pop(0)
        gradients, given = self._gradients(weights, w, k, rows)
        given = {**given, "optim.0.lr": lr}
        self.staleness[self._ledger.version - version] += 1
        self.servers.push({w: (gradients, {n: given[n] for n in self.updater.numbers})})
        for other in range(self.num_workers):  # one that waited for its permit may go on
            self._pull(other)

    def _gradients(
        self, weights: dict[str, Tensor], w: int, k: int, rows: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        captured, given = self.worked.program.captured, numbers(self.optimizer, [])
        held = dict(self.model.named_buffers()) | weights
        inputs: list[Any] = [held[s.name] for s in captured.state] + [*given.values(), *rows]
        returned, _ = self.worked.run(inputs, replica_rows.seed_of(self.seed, w), k)
        _, gradients, extra = self.part.parts(returned)
        return gradients, given | extra

    def _rows(self, batch: Sequence[Tensor], worker: int) -> list[Tensor]:
        return replica_rows.rows(list(batch), worker, self.num_workers)
