"""Workers that push to servers as they come, in one process.

A worker pulls as soon as it has pushed. Workers are equally fast, but for each gradient one takes up to a
fifth more or less: so gradients are about as many updates old as there are other workers.

    python -m benchmarks.asynchronous --sync async --lr 2e-3      # examples/gpt.py, 3 workers, batches of 18
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence import example
from tutti.capture.lift import numbers
from tutti.capture.step import capture
from tutti.layout import Layout
from tutti.replicas import parts
from tutti.runtime.server_side import whole_state
from tutti.runtime.worker_side import Worked
from tutti.server import consistency
from tutti.server.keys import blocks
from tutti.server.program import worker_program
from tutti.server.split import split
from tutti.server.updater import GraphUpdater
from tutti.server.virtual import VirtualServers
from tutti.server.worker import alone

# By how much the time for a gradient differs.
JITTER = 0.2


class Asynchronous:
    """A training step run by workers and servers.

    Args:
        train_step, model, optimizer: of the script; the model holds the weights when `finish` returns.
        batch: one like those to come.
        sync: such as "async" or "bounded(1, ahead)".
        staleness: counts how many updates old gradients were.
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
        self.worked = Worked(made, self.part, program, self.updater, None, {}, True)
        names = {v.name for v in self.updater.variables}
        holder: Any = self
        self.servers = VirtualServers(
            self.updater,
            blocks(self.updater.variables, 1),
            whole_state(holder, names),
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
        for w, todo in enumerate(self._todo):
            todo.append((k, self._rows(batch, w), lr))
            self._pull(w)
        while max(map(len, self._todo)) > 2:  # nobody is more than two batches behind the others
            self._push()

    def finish(self) -> None:
        """Let all workers end, and the model hold the weights."""
        while any(self._todo):
            self._push()
        state = self.servers.state()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(state[name]["weight"])

    def _pull(self, w: int) -> None:
        """A worker that has work brings weights for it; with `ahead` also for the gradient after it."""
        wanted = 2 if self.ahead else 1
        while len(self._weights[w]) < wanted and self.servers.permitted(w):
            version = self.servers.machines[0].ledger.version
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
        self.staleness[self.servers.machines[0].ledger.version - version] += 1
        self.servers.push({w: (gradients, {n: given[n] for n in self.updater.numbers})})
        for other in range(self.num_workers):  # one that waited for its permit may go on
            self._pull(other)

    def _gradients(
        self, weights: dict[str, Tensor], w: int, k: int, rows: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        captured, given = self.worked.program.captured, numbers(self.optimizer, [])
        held = dict(self.model.named_buffers()) | weights
        inputs: list[Any] = [held[s.name] for s in captured.state] + [*given.values(), *rows]
        returned, _ = self.worked.run(inputs, parts.seed_of(self.seed, w), k)
        _, gradients, extra = self.part.parts(returned)
        return gradients, given | extra

    def _rows(self, batch: Sequence[Tensor], worker: int) -> list[Tensor]:
        return parts.rows(list(batch), worker, self.num_workers)


def main() -> None:
    """Train the model of `examples/gpt.py`, and print its validation loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sync", default="async")
    for name, default in {"workers": 3, "steps": 600, "batch": 18, "lr": 2e-3, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    args = parser.parse_args()
    gpt = example()
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    torch.manual_seed(args.seed)
    model = gpt.GPT(128, 4, 4, 0.1)
    adamw = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda i: min((i + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * i / args.steps))
    )
    first = gpt.batch_at(train_text, 0, args.batch, args.seed)
    run = Asynchronous(
        gpt.train_step, model, adamw, first, args.sync, num_workers=args.workers, seed=args.seed
    )
    for k in range(args.steps):
        run.step(k, gpt.batch_at(train_text, k, args.batch, args.seed))
        schedule.step()
    run.finish()
    age = sum(t * n for t, n in run.staleness.items()) / run.staleness.total()
    loss = gpt.validation_loss(lambda x: gpt.eval_step(model, x), valid_text, args.batch, 20)
    print(f"{args.sync}, lr {args.lr}: {loss:.4f}, gradients {age:.1f} updates old on average")


if __name__ == "__main__":
    main()
