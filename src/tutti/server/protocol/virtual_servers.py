"""Workers and servers in one process: the same sessions and machines as in a run, no clock and no network."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.feedback import Feedback
from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.ledger import Ledger, initial
from tutti.server.protocol.machine import Answers, Machine
from tutti.server.protocol.messages import TensorPart
from tutti.server.protocol.session import Asking, Pushed, Session
from tutti.server.protocol.update import WEIGHT, Updater

State = Mapping[str, Mapping[str, Tensor]]
Gradients = Mapping[str, Tensor | tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Asked:
    """A session with open requests: its requests to each server, and the replies so far."""

    asking: Asking[Any]
    requests: dict[int, m.Request] = field(default_factory=dict)
    replies: dict[int, m.Reply] = field(default_factory=dict)
    done: bool = False
    result: Any = None

    def go_on(self, replies: dict[int, m.Reply] | None) -> Iterable[int]:
        """Take all replies and make the next requests; their servers."""
        try:
            self.requests, self.replies = self.asking.send(replies), {}  # type: ignore[arg-type]
        except StopIteration as end:
            self.done, self.result, self.requests = True, end.value, {}
        return list(self.requests)


class VirtualServers:
    """Servers that own the blocks of some variables, and a session for each worker.

    Args:
        updater: their update.
        blocks: all blocks, each with its server.
        state: the initial state of all variables, whole.
        consistency: the staleness bound of workers.
    """

    def __init__(
        self,
        updater: Updater,
        blocks: Sequence[VariableBlock],
        state: State,
        consistency: Consistency,
        *,
        num_workers: int,
        num_servers: int,
    ) -> None:
        self.blocks, self.updater = tuple(blocks), updater
        self.machines = [
            Machine(
                Ledger(updater, own, initial(own, state), consistency, num_workers),
                lambda record: None,
                num_servers=num_servers,
            )
            for server in range(num_servers)
            for own in [{b.key: b for b in blocks if b.server == server}]
        ]
        self.sessions = [
            Session(
                w,
                num_servers,
                self.blocks,
                updater.fingerprint,
                consistency,
                updater.coupled,
                incarnation=1,
            )
            for w in range(num_workers)
        ]
        self._feedback = [Feedback(consistency.traffic) for _ in self.sessions]
        self._versions: dict[int, dict[int, int]] = {}
        self.ask([session.join() for session in self.sessions])

    def ask(self, questions: Sequence[Asking[Any]]) -> list[Any]:
        """Play several sessions' requests concurrently, until all have their answers.

        Raises:
            RuntimeError: they wait for each other, or for workers without a request.
        """
        asked = [_Asked(question) for question in questions]
        todo = deque((one, server) for one in asked for server in one.go_on(None))
        while todo:
            one, server = todo.popleft()
            for (asker, by), reply in self._handle((one, server), one.requests[server]):
                asker.replies[by] = reply
                if len(asker.replies) == len(asker.requests):
                    todo += [(asker, s) for s in asker.go_on(asker.replies)]
        if not all(one.done for one in asked):
            raise RuntimeError("workers wait for messages that nobody sends")
        return [one.result for one in asked]

    def permitted(self, worker: int) -> bool:
        """Whether the servers would answer a worker's next pull at once."""
        ledgers = [machine.ledger for machine in self.machines]
        clock = self.sessions[worker].clock
        return all(x.consistency.permits(clock, x.floor) for x in ledgers)

    def pull(self, workers: Sequence[int]) -> list[dict[str, Tensor]]:
        """The variables of some workers' concurrent pulls."""
        found = self.ask([self.sessions[w].pull() for w in workers])
        for w, replies in zip(workers, found, strict=True):
            self._versions[w] = {s: reply.version for s, reply in replies.items()}
        return [self._pulled(replies) for replies in found]

    def push(self, pushes: Mapping[int, tuple[Gradients, Mapping[str, float]]]) -> list[Pushed]:
        """Push gradients and numbers of some workers concurrently."""
        asking = [
            self.sessions[w].push(self._cut(w, gradients), numbers, self._versions[w])
            for w, (gradients, numbers) in pushes.items()
        ]
        return self.ask(asking)

    def _pulled(self, replies: Mapping[int, m.Weights]) -> dict[str, Tensor]:
        """The whole variables from a pull's blocks."""
        parts = {k: p for r in replies.values() for k, p in r.parts.items()}
        return self._whole({k: p.values for k, p in parts.items()})

    def _cut(self, worker: int, gradients: Gradients) -> dict[int, TensorPart]:
        """The parts of a worker's push, from gradients by variable, or (rows, gradients of them)."""
        feedback = self._feedback[worker]
        found = {b.key: _part(b, gradients[b.variable.name], feedback) for b in self.blocks}
        return {key: part for key, part in found.items() if part is not None}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All current state, whole: by variable and slot."""
        held = {k: x for one in self.machines for k, x in one.ledger.state.items()}
        found: dict[str, dict[str, Tensor]] = {}
        for variable in self.updater.variables:
            own = [held[b.key] for b in self.blocks if b.variable.name == variable.name]
            slots = (WEIGHT, *variable.slots)
            found[variable.name] = {s: _joined([x[s] for x in own], variable.shape) for s in slots}
        return found

    def _handle(self, source: tuple[_Asked, int], request: m.Request) -> Answers:
        """A server's answer, with weights in separate memory."""
        machine = self.machines[source[1]]
        found: Answers = []
        for asker, reply in machine.handle(source, request, 0.0):
            if isinstance(reply, m.Weights):
                parts = {k: replace(p, values=p.values.clone()) for k, p in reply.parts.items()}
                machine.returned(reply)
                reply = replace(reply, parts=parts)
            found.append((asker, reply))
        return found

    def _whole(self, found: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Variables, or their slots, joined from blocks."""
        parts: dict[str, list[Tensor]] = {}
        for block in self.blocks:
            parts.setdefault(block.variable.name, []).append(found[block.key])
        shapes = {b.variable.name: b.variable.shape for b in self.blocks}
        return {n: _joined(xs, shapes[n]) for n, xs in parts.items()}


def _part(
    block: VariableBlock, gradient: Tensor | tuple[Tensor, Tensor], feedback: Feedback
) -> TensorPart | None:
    """A block's part of a gradient; None if there is none."""
    if isinstance(gradient, Tensor):
        return feedback.part(block.key, block.of(gradient.contiguous()))
    rows, values = gradient
    inside = (rows >= block.start) & (rows < block.stop)
    return TensorPart(values[inside], rows=rows[inside] - block.start) if inside.any() else None


def _joined(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The blocks of one variable as one tensor; a slot of another shape is equal in all blocks."""
    if sum(x.numel() for x in parts) == math.prod(shape):
        return torch.cat([x.reshape(-1) for x in parts]).view(shape)
    assert all(torch.equal(x, parts[0]) for x in parts), "copies of a slot have come apart"
    return parts[0]
