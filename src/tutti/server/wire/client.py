"""A worker's end: `join`, then `pull`, compute, `push`, again and again, then `leave`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from tutti.comm.collectives.group import collective_timeout
from tutti.environment import LEASE
from tutti.errors import CommError, ServerError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.feedback import Feedback
from tutti.server.protocol.keys import BLOCK_NBYTES, VariableBlock, blocks
from tutti.server.protocol.machine import OBSERVER
from tutti.server.protocol.messages import TensorPart
from tutti.server.protocol.session import Answer, Asking, Fenced, Pushed, Session
from tutti.server.protocol.table_rows import Rows, inside, own_rows, rows_of, whole
from tutti.server.protocol.update import WEIGHT, Updater
from tutti.server.wire.connections.inbox import Limits
from tutti.server.wire.connections.links import Links, Room
from tutti.server.wire.connections.run_over import RunOverError, ended
from tutti.server.wire.connections.secret import checked_secret
from tutti.server.wire.connections.shortage import ShortError
from tutti.server.wire.connections.tls import Tls
from tutti.server.wire.frames.codec import REPLIES
from tutti.server.wire.frames.frames import Header
from tutti.server.wire.heartbeats import Heartbeats

Tensors = Mapping[str, Tensor]
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Pulled:
    """The result of a pull: the number of updates on each server, and the numbers of the last one."""

    versions: Mapping[int, int]
    numbers: Mapping[str, float]


class Client:
    """One worker of a run with parameter servers.

    Args:
        addresses: "host:port" of each server, in their order.
        updater: as the servers have it.
        worker: this worker's number, or -1 for an observer: then only `pull_state` and `status` work.
        consistency: as the servers have it.
        secret, tls: as the servers require.
        timeout_seconds: how long an answer may take; `TUTTI_TIMEOUT` by default.
        traffic: the format of gradients: `fp32`, `bf16` or `int8`, with error feedback.
        has_ended: whether a server has ended for good, if that is known.

    Raises:
        ServerError: there is neither a secret nor certificates.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        updater: Updater,
        *,
        worker: int,
        consistency: Consistency,
        secret: bytes | str = b"",
        tls: Tls | None = None,
        timeout_seconds: float | None = None,
        traffic: str = "fp32",
        block_nbytes: int = BLOCK_NBYTES,
        has_ended: Callable[[int], bool] = lambda server: False,
    ) -> None:
        self.blocks = blocks(updater.variables, len(addresses), nbytes=block_nbytes)
        self._by_variable: dict[str, list[VariableBlock]] = {v.name: [] for v in updater.variables}
        for block in self.blocks:
            self._by_variable[block.variable.name].append(block)
        self.session = Session(
            worker,
            len(addresses),
            self.blocks,
            updater.fingerprint,
            consistency,
            updater.coupled,
            time.time_ns(),
        )
        patience = timeout_seconds or collective_timeout().total_seconds()
        context = tls.context(server_side=False) if tls else None
        ends = (list(addresses), checked_secret(secret, tls), context, _limits(self.blocks))
        self._has_ended = has_ended
        self._links = Links(*ends, patience, share=True, over=self._over)
        self._beats = Heartbeats(
            self.session, Links(*ends, LEASE.read(), over=self._over), self._links
        )
        self._feedback = Feedback(traffic)
        self._lock = threading.Lock()
        self._versions: Mapping[int, int] = {}
        self._sums = (0, 0)
        self._refused = False  # whether a server without resources refused the last request
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Future[Pulled] | None = None
        self._spare: dict[str, Tensor] = {}

    @property
    def clock(self) -> int:
        """This worker's clock: the number of pushes under its number."""
        return self.session.clock

    @property
    def alone(self) -> bool:
        """Whether this worker's next push is a separate update."""
        return self.session.alone

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def join(self) -> int:
        """Join the servers; the first clock.

        Raises:
            ServerError: the servers refuse, or run another script.
            CommError: a server is unreachable.
        """
        self._run(self.session.join())
        self._beats.start()
        return self.clock

    def pull(self, into: Tensors, rows: Mapping[str, Rows] | None = None) -> Pulled:
        """Pull the weights for this worker's clock; waits for the permit.

        Args:
            into: whole variables by name, which this fills in place; all but those that travel by rows.
            rows: for those, the wanted rows and their destinations.
        """
        coming, self._coming = self._coming, None
        if coming is None or rows:
            if coming is not None:
                coming.result()
            pulled = self._pull(into, rows or {})
        else:
            pulled = coming.result()
            for name, x in into.items():
                x.detach().copy_(self._spare[name])
        self._versions = pulled.versions
        return pulled

    def prefetch(self, like: Tensors) -> None:
        """Begin the next `pull` while this worker computes.

        The weights then lack the updates until that pull. Under common updates there are no new weights
        before this worker's push: the call does nothing.
        """
        if self._coming is not None or not self.session.alone:
            return
        for name, x in like.items():
            if name not in self._spare:
                self._spare[name] = torch.empty_like(x, memory_format=torch.contiguous_format)
        wanted = {name: self._spare[name] for name in like}
        self._pool = self._pool or ThreadPoolExecutor(1, "tutti-prefetch")
        self._coming = self._pool.submit(self._pull, wanted, {}, ahead=1)

    def push(self, gradients: Mapping[str, Tensor | Rows], numbers: Mapping[str, float]) -> Pushed:
        """Push a gradient of each variable, and the numbers of the step.

        When this returns, the push is durable. If `taken` is false, the worker's lease had ended and it has
        joined anew: pull, and continue from `clock`.
        """
        parts: dict[int, TensorPart] = {}
        for name, x in gradients.items():
            for block in self._by_variable[name]:
                part = self._part(block, x)
                if part is not None:
                    parts[block.key] = part
        return self._run(self.session.push(parts, numbers, self._versions))

    def _part(self, block: VariableBlock, x: Tensor | Rows) -> TensorPart | None:
        if isinstance(x, Rows):
            return rows_of(block, x)
        return self._feedback.part(block.key, block.of(whole(x)))

    def sum(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum of `x` (1-D, exact in float64) over the workers, or their `max` or `min`.

        Only under common updates. All workers call this equally often in a clock, and wait for each other;
        all get the same bits.
        """
        clock, count = self._sums
        count = count + 1 if clock == self.clock else 0
        self._sums = (self.clock, count)
        total = self._run(self.session.add(f"sum {count}", x.detach().double().cpu(), op))
        return total.to(x.dtype)

    def all_do(self, num_workers: int) -> bool:
        """Whether all remaining ones of `num_workers` call this in their common clock; waits for them.

        Raises `ServerError` if another is at a sum of its step: such a sum is none of maxima.
        """
        mine = torch.zeros(num_workers)
        mine[self.session.worker] = 1
        found = self.sum(mine, "max")
        return all(found[worker] > 0 for worker in self.status()[0].workers)

    def meet(self) -> None:
        """Wait until all remaining workers call this."""
        if not self.alone:
            self.sum(torch.zeros(1), "max")
            return
        self._run(self.session.meet(self.status()[0].meetings))

    def leave(self) -> None:
        """End in good order: the others stop waiting for this worker.

        It does not ask a server again that has refused it for lack of a resource.
        """
        self._beats.stop()
        if not self._links.failed and not self._refused:
            with suppress(RunOverError):  # nobody is there to be left
                self._run(self.session.leave())
        self.close()

    def pull_state(self) -> dict[str, dict[str, Tensor]]:
        """All current variables with their slots, whole; each block is consistent in itself."""
        found: dict[str, dict[str, Tensor]] = {}
        for variable in {b.variable.name: b.variable for b in self.blocks}.values():
            own = {WEIGHT: (variable.shape, variable.dtype), **variable.slots}
            for slot, (shape, dtype) in own.items():
                found.setdefault(variable.name, {})[slot] = torch.empty(shape, dtype=dtype)
        for slot in sorted({slot for slots in found.values() for slot in slots}):
            into = {name: slots[slot] for name, slots in found.items() if slot in slots}
            self._observe(into, slot)
        return found

    def look(self, into: Tensors) -> None:
        """Pull the current weights: not for a gradient, without a permit, and not predicted."""
        self._observe(into, WEIGHT)

    def push_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace variables and slots, whole. One worker does it, while the others wait.

        Raises:
            ServerError: this worker's lease has ended meanwhile, and it must begin again.
        """
        for slot in sorted({slot for slots in state.values() for slot in slots}):
            parts = {
                block.key: TensorPart(block.of(whole(slots[slot])))
                for name, slots in state.items()
                if slot in slots
                for block in self._by_variable[name]
            }
            if not self._run(self.session.load(slot, parts)).taken:
                raise ServerError("the state was not taken: this worker had been given up")

    def status(self) -> list[m.Figures]:
        """Each server's figures: version, staleness, workers."""
        servers = range(self.session.num_servers)
        ask = m.Status(worker=OBSERVER, incarnation=0)
        with self._lock:
            replies = self._links.ask(dict.fromkeys(servers, ask))
        return [r for r in replies.values() if isinstance(r, m.Figures)]

    def is_first(self) -> bool:
        """Whether no worker with a smaller number is left, by the first server's records.

        Waits for such a worker as long as the servers do: until it has come, or nobody waits for it. Where
        the others go on without a lost worker, it waits for a sign of life, or the end of the lease.
        """
        earlier, before = range(self.session.worker), self.status()[0]
        found = before
        while not {*earlier} <= {*found.gone}:
            here = [w for w in earlier if w in found.workers]
            if any(
                not self.session.consistency.apart or found.heard.get(w) != before.heard.get(w)
                for w in here
            ):
                return False
            time.sleep(_LOOK_SECONDS)
            found = self.status()[0]
        return True

    def close(self) -> None:
        """Close the connections without a message to the servers; after `leave`, or to give up."""
        self._beats.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._links.close()

    def _pull(self, into: Tensors, rows: Mapping[str, Rows], ahead: int = 0) -> Pulled:
        keys: dict[int, list[int]] = {s: [] for s in range(self.session.num_servers)}
        wanted: dict[int, Tensor] = {}
        for name in (*into, *rows):
            for block in self._by_variable[name]:
                if name in rows:
                    own = own_rows(block, rows[name].rows)
                    if not len(own):
                        continue
                    wanted[block.key] = own
                keys[block.server].append(block.key)
        plan = {s: tuple(own) for s, own in keys.items()}
        asking = self.session.pull(plan, wanted, ahead=ahead)
        replies = self._run(asking, self._room(into))
        for reply in replies.values():
            for key, part in reply.parts.items():
                self._keep(self.blocks[key], part, into, rows)
        versions = {s: reply.version for s, reply in replies.items()}
        return Pulled(versions, dict(replies[0].numbers))

    def _observe(self, into: Tensors, slot: str) -> None:
        """Blocks of one slot, without regard to clocks."""
        asking = {
            s: m.Pull(
                worker=OBSERVER,
                incarnation=0,
                clock=0,
                keys=tuple(b.key for b in self.blocks if b.server == s and b.variable.name in into),
                slot=slot,
            )
            for s in range(self.session.num_servers)
        }
        asking = {s: pull for s, pull in asking.items() if pull.keys}
        with self._lock:
            replies = self._links.ask(asking, self._room(into))
        for reply in replies.values():
            if not isinstance(reply, m.Weights):
                raise ServerError(f"a server gives no state: {reply}")
            for key, part in reply.parts.items():
                self._keep(self.blocks[key], part, into, {})

    def _room(self, into: Tensors) -> Room:
        """The destinations of parts without a copy: the tensors themselves."""

        def room(part: Header) -> Tensor | None:
            block = self.blocks[part.key] if part.key < len(self.blocks) else None
            x = into.get(block.variable.name) if block else None
            if block is None or x is None or not x.is_contiguous() or x.device.type != "cpu":
                return None
            place = block.of(x.detach())
            same = place.dtype == part.dtype and tuple(place.shape) == part.shape
            return place.view(-1).view(torch.uint8) if same and place.dim() else None

        return room

    def _keep(
        self, block: VariableBlock, part: TensorPart, into: Tensors, rows: Mapping[str, Rows]
    ) -> None:
        """Copy the received parts to their destinations, unless they were received there."""
        if block.variable.name in rows:
            wanted = rows[block.variable.name]
            mine = inside(block, wanted.rows)
            wanted.values.detach()[mine] = part.values.to(wanted.values.dtype)
            return
        x = into[block.variable.name].detach()
        if x.is_contiguous():
            place = block.of(x)
            if place.data_ptr() != part.values.data_ptr():
                place.copy_(part.values)
            return
        whole = x.contiguous()
        block.of(whole).copy_(part.values)
        x.copy_(whole)

    def _run(self, asking: Asking[Answer], room: Room | None = None) -> Answer:
        """Run a session's requests to the end."""
        with self._lock:
            try:
                requests = next(asking)
                while True:
                    requests = asking.send(self._links.ask(requests, room))
            except StopIteration as end:
                self._refused = False
                return end.value
            except ShortError:
                self._refused = True
                raise
            except Fenced as error:
                raise self._missed() from error

    def _missed(self) -> CommError:
        """The error for a worker that comes back to updates that the others have made together without it."""
        silence = self._beats.silence() or "it was not heard of"
        return CommError(
            f"the others have gone on without worker {self.session.worker}: {silence}",
            why="while workers update together, each update is made of the rows of one whole batch",
            fix="start the run again from a checkpoint; if a process is stopped now and then, set "
            "TUTTI_LEASE to more seconds",
        )

    def _over(self, server: int) -> RunOverError | None:
        return ended(server, self._beats.silence()) if self._has_ended(server) else None


def _limits(all_blocks: Sequence[VariableBlock]) -> Limits:
    """Limits for the largest answer."""
    sizes = [
        b.nbytes
        // b.variable.dtype.itemsize
        * max(d.itemsize for d in (b.variable.dtype, *(x[1] for x in b.variable.slots.values())))
        + 8 * b.shape[0] * b.variable.rows
        if b.shape
        else 64
        for b in all_blocks
    ]
    return Limits(REPLIES, len(sizes), max([4096, *sizes]), sum(sizes) + 4096 * len(sizes))
