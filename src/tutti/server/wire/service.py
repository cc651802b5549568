"""A server on the network: one loop over all connections, one machine, one store.

Invalid input closes its connection and has no other effect: the server checks all bytes before it uses them,
and closes a connection that has not finished the handshake within 5 seconds.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.comm.host.awake import AwakeClock
from tutti.comm.posts.handshake import RefusedError
from tutti.errors import TuttiError
from tutti.server.protocol import messages as m
from tutti.server.protocol.consistency import Consistency
from tutti.server.protocol.keys import BLOCK_NBYTES, VariableBlock, blocks
from tutti.server.protocol.ledger import Ledger, initial
from tutti.server.protocol.machine import LEASE_SECONDS, OBSERVER, Machine
from tutti.server.protocol.update import Updater
from tutti.server.wire.connections.connection import ClosedError, Connection
from tutti.server.wire.connections.door import Door
from tutti.server.wire.connections.inbox import Limits
from tutti.server.wire.connections.region import RegionOffer, wanted
from tutti.server.wire.connections.run_over import RunOverError, lost
from tutti.server.wire.connections.secret import checked_secret
from tutti.server.wire.connections.shortage import ShortError, lack, of_peer
from tutti.server.wire.connections.tls import Tls
from tutti.server.wire.frames.codec import NUMBERS, REQUESTS, MalformedError
from tutti.server.wire.frames.frames import Header
from tutti.server.wire.records.push_segments import Slab
from tutti.server.wire.records.store import Store, room

_HANDSHAKE_SECONDS = 5.0
_TICK_SECONDS = 0.25
# A server that cannot go on refuses for so long, or until it has told every worker, then it ends.
_TELLING_SECONDS = (2.0, 30.0)
# While a server is gone another process may take its port, mostly for a short connection.
_ADDRESS_SECONDS = 15.0
_MOST_STRANGERS = 64  # connections before the end of their handshake
_MOST_OUTSTANDING = 8  # requests of one connection
_STORED = (NUMBERS[m.Push], NUMBERS[m.Load])
_LOG = logging.getLogger("tutti.server")


class _Peer:
    """A connection and its state on the server.

    short: the resource that the server lacks for it.  worker: whose it is, once it has asked something.
    """

    def __init__(self, name: str, connection: Connection, now: float, short: str) -> None:
        self.name, self.connection, self.since, self.short = name, connection, now, short
        self.slab: Slab | None = None
        self.offer: RegionOffer | None = None
        self.outstanding = 0
        self.worker: int | None = None


class Service:
    """One server. `run` it in a separate thread or process; it listens at `address`.

    Args:
        updater: the update part of the step.
        state: the first weights and slots of all variables, whole; after a restart the directory's count.
        address: "host:port"; port 0 takes a free one. Loopback unless told otherwise.
        consistency: the staleness bound of workers.
        num_workers: how many must have joined before the first clock ends.
        server, num_servers: this server's index, and the number of servers.
        secret: of the workers. Optional only with `tls`.
        tls: certificates of this server, and of the authority of its workers' certificates.
        directory: for records, from which a killed server recovers; None: no records.
        fsync: answer a push only after the disk has it.
        repair: continue from the records before damaged ones; otherwise damage is an error.
        version: the number of updates in `state`; workers begin at this clock.

    Raises:
        ServerError: neither secret nor certificates, an unusable address, a directory with other or
            damaged records, or one without room.
    """

    def __init__(
        self,
        updater: Updater,
        state: Mapping[str, Mapping[str, Tensor]],
        address: str = "127.0.0.1:0",
        *,
        consistency: Consistency,
        num_workers: int,
        server: int = 0,
        num_servers: int = 1,
        secret: bytes | str = b"",
        tls: Tls | None = None,
        directory: Path | str | None = None,
        fsync: bool = False,
        repair: bool = False,
        version: int = 0,
        lease_seconds: float = LEASE_SECONDS,
        block_nbytes: int = BLOCK_NBYTES,
        log_nbytes: int = 2**30,
    ) -> None:
        self._secret = checked_secret(secret, tls)
        self._tls = tls.context(server_side=True) if tls else None
        every = blocks(updater.variables, num_servers, nbytes=block_nbytes)
        own = {block.key: block for block in every if block.server == server}
        ledger = Ledger(updater, own, initial(own, state), consistency, num_workers, version)
        self._limits = _limits(ledger)
        identity = {
            "server": server,
            "num_servers": num_servers,
            "fingerprint": updater.fingerprint,
            "sync": str(consistency),
            "blocks": len(every),
        }
        self._store = Store(
            Path(directory) if directory is not None else None,
            room(self._limits.parts_nbytes, 2 * self._limits.num_parts),
            fsync=fsync,
            identity=identity,
            log_nbytes=log_nbytes,
            repair=repair,
        )
        self.machine = Machine(
            ledger, self._store.write, num_servers=num_servers, lease_seconds=lease_seconds
        )
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        try:
            self._recover(ledger)
            patience = _ADDRESS_SECONDS if self._store.goes_on else 0.0
            self._door = Door(address, self._selector, self._accept, patience=patience)
        except BaseException:
            self._store.close()
            raise
        self.address = self._door.address
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        # Leases use the clock without suspensions: this process may have been stopped, or busy.
        self._awake, self._now = AwakeClock(2 * _TICK_SECONDS), 0.0
        self._running = True
        self._failure: TuttiError | None = None
        self._failed_at, self._told = 0.0, set[int]()
        self._met, self._lost = dict[int, str](), list[int]()  # workers, with their last address

    def _recover(self, ledger: Ledger) -> None:
        """Continue from an earlier process's records."""
        for record in self._store.begin(ledger):
            ledger.take(record)
        self._store.start(ledger)
        self.machine.recover()

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            ShortError: the server can no longer keep its records, and has told the workers.
            RunOverError: a worker is lost under `step`; the others have been told.
        """
        due = self._now
        try:
            while self._running:
                self._turn()
                self._now = self._awake.look()
                if self._now >= due:
                    due = self._now + _TICK_SECONDS
                    self._tick()
        finally:
            self._close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let `run` return; any thread may call this."""
        self._waker.send(b"x")

    def _stop(self) -> None:
        self._running = False

    def lapsed(self) -> dict[int, tuple[str, float]]:
        """The workers without which the others went on since their lease had ended; any thread may call this.

        Each with its last address, "" if this process knows none, and the seconds of its silence up to then.
        """
        silent = dict(self.machine.lapsed)
        return {worker: (self._met.get(worker, ""), seconds) for worker, seconds in silent.items()}

    def _turn(self) -> None:
        """Handle all network events once."""
        busy = any(peer.connection.more for peer in self._peers.values())
        for key, events in self._selector.select(0 if busy else _TICK_SECONDS):
            if isinstance(key.data, _Peer):
                self._serve(key.data, events)
            else:
                key.data()
        for peer in [p for p in self._peers.values() if p.connection.more] if busy else ():
            self._serve(peer, selectors.EVENT_READ)

    def _tick(self) -> None:
        if self._failure is None:
            with self._failing():
                self._answer(self.machine.tick(self._now))
            self._find_lost()
        elif self._now - self._failed_at >= self._telling_seconds():
            self._running = False
        for peer in list(self._peers.values()):
            late = self._now - peer.since > _HANDSHAKE_SECONDS
            if late and (peer.short or not peer.connection.opened):
                self._drop(peer, "" if peer.short else "it did not finish the handshake")
        self._admit()

    def _find_lost(self) -> None:
        """Under `step`, whose updates need every worker, end once one has closed its connections and has not
        come back within its lease. A suspended process keeps its connections: the others wait for it."""
        if self.machine.ledger.consistency.apart:
            return
        here = {peer.worker for peer in self._peers.values()}
        silent = self.machine.silent(self._now)
        self._lost = [w for w in silent if w in self._met and w not in here]
        if self._lost:
            self._fail(lost(self._lost, silent, self.machine.lease_seconds))

    def _telling_seconds(self) -> float:
        untold = self.machine.ledger.active().keys() - self._told - {*self._lost}
        return _TELLING_SECONDS[bool(untold)]

    def _admit(self) -> None:
        """Accept connections only while there is room for strangers, and no refusal is pending."""
        strangers = sum(not p.connection.opened for p in self._peers.values())
        short = any(p.short for p in self._peers.values())
        if short or strangers >= _MOST_STRANGERS:
            self._door.shut()
        else:
            self._door.open()

    def _accept(self) -> None:
        arrival = self._door.accept(len(self._peers))
        if arrival is None:
            return
        sock = arrival.sock
        try:
            if self._tls:
                sock.setblocking(False)
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = Connection(sock, self._secret, self._limits, server_side=True)
        except OSError as error:  # the peer has gone already
            _LOG.info("closed %s: %s", arrival.name, error)
            sock.close()
            return
        peer = _Peer(arrival.name, connection, self._now, arrival.short)
        connection.place = lambda message, part: self._place(peer, message, part)
        if self._store.directory is not None:
            connection.noted = lambda body, check: peer.slab and peer.slab.note(body, check)
        self._peers[sock.fileno()] = peer
        self._selector.register(sock, connection.events, peer)
        self._admit()
        self._serve(peer, selectors.EVENT_WRITE)

    def _serve(self, peer: _Peer, events: int) -> None:
        """Read and write; end the connection at an error."""
        try:
            if events & selectors.EVENT_READ or not peer.connection.opened:
                found = peer.connection.read()
                if found:
                    self._handle(peer, *found)
            if peer.connection.fileno() >= 0:
                peer.connection.write()
                self._selector.modify(peer.connection.sock, peer.connection.events, peer)
        except (MalformedError, RefusedError) as error:
            self._drop(peer, str(error))
        except ssl.SSLError as error:
            self._drop(peer, f"TLS: {error.reason or error}")
        except ClosedError:
            self._drop(peer, "" if peer.connection.opened else "it left during the handshake")
        except OSError as error:
            self._drop(peer, str(error) if of_peer(error) else f"this server: {lack(error)}")

    def _handle(self, peer: _Peer, number: int, request: m.Request) -> None:
        peer.outstanding += 1
        peer.worker = request.worker if peer.worker in (None, OBSERVER) else peer.worker
        self._met[request.worker] = peer.name
        if peer.outstanding > _MOST_OUTSTANDING:
            raise MalformedError("too many requests at once")
        if peer.short or self._failure is not None:
            self._refuse(peer, number, request)
            return
        if isinstance(request, m.Share):
            self._answer([((peer, number), self._share(peer, request))])
            return
        with self._failing((peer, number), request):
            self._answer(self.machine.handle((peer, number), request, self._now))
        if peer.slab is not None:
            self._store.release(peer.slab, self.machine.ledger)
            peer.slab = None
        if self._failure is None and self._store.due():
            with self._failing():
                self._store.snapshot(self.machine.ledger)

    @contextlib.contextmanager
    def _failing(self, source: Any = None, request: m.Request | None = None) -> Iterator[None]:
        """Context of record writes, of which one may fail."""
        try:
            yield
        except ShortError as error:
            self._fail(error, [(source, request)] if request else [])

    def _fail(self, error: TuttiError, asked: Sequence[tuple[Any, m.Request]] = ()) -> None:
        """The server decides nothing more: it refuses all waiting requests, and ends once it has told all
        workers."""
        _LOG.error("%s", error)
        self._failure, self._failed_at = error, self._now
        for (peer, number), request in [*self.machine.dismiss(), *asked]:
            if peer.connection.fileno() >= 0:
                self._refuse(peer, number, request)

    def _refuse(self, peer: _Peer, number: int, request: m.Request) -> None:
        """Refuse, with the lacking resource, or the lost worker."""
        failure, reason = self._failure, m.SHORT
        text = f"{failure.what} ({failure.at})" if failure is not None else peer.short
        if isinstance(failure, RunOverError):
            reason, text = m.OVER, failure.what

        def told() -> None:
            self._told.add(request.worker)

        peer.outstanding -= 1
        peer.connection.send(number, m.Refused(reason=reason, text=text), done=told)
        self._selector.modify(peer.connection.sock, peer.connection.events, peer)

    def _answer(self, answers: list[tuple[Any, m.Reply]]) -> None:
        for (peer, number), reply in answers:
            if peer.connection.fileno() < 0:
                self.machine.returned(reply)
                continue
            peer.outstanding -= 1
            peer.connection.send(number, reply, done=lambda r=reply: self.machine.returned(r))
            self._selector.modify(peer.connection.sock, peer.connection.events, peer)

    def _share(self, peer: _Peer, request: m.Share) -> m.Shared:
        """Offer a connection shared memory; answers use it once the worker has mapped it."""
        if peer.offer is not None and request.mapped:
            peer.connection.share(outgoing=peer.offer.outgoing)
        elif peer.offer is None and peer.connection.within_host and wanted():
            try:
                peer.offer = RegionOffer(
                    room(self._limits.parts_nbytes, 2 * self._limits.num_parts)
                )
            except OSError as error:
                _LOG.warning("no memory is shared with %s: %s", peer.name, lack(error))
            else:
                peer.connection.share(incoming=peer.offer.incoming)
                return peer.offer.message
        return m.Shared(pid=0, descriptor=-1, nbytes=0, word="")

    def _place(self, peer: _Peer, message: Header, part: Header) -> Tensor:
        """Receive pushes into slabs, where the store keeps them without a copy."""
        if message.kind in _STORED and not peer.short and self._failure is None:
            with self._failing():
                peer.slab = peer.slab or self._store.slab()
                return peer.slab.place(part.nbytes)
        return torch.empty(part.nbytes, dtype=torch.uint8)

    def _drop(self, peer: _Peer, why: str) -> None:
        """End a connection, and nothing else."""
        if why:
            level = logging.INFO if peer.connection.opened else logging.WARNING
            _LOG.log(level, "closed %s: %s", peer.name, why)
        fileno = peer.connection.fileno()
        if fileno >= 0:
            self._selector.unregister(peer.connection.sock)
            del self._peers[fileno]
        peer.connection.close()
        if peer.offer is not None:
            peer.offer.close()
        self._forget(peer)
        if peer.slab is not None:
            self._store.release(peer.slab, self.machine.ledger)
            peer.slab = None
        self._admit()

    def _forget(self, peer: _Peer) -> None:
        self.machine.forget(lambda source: source[0] is peer)

    def _close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer, "")
        self._door.close()
        for sock in (self._waker, self._woken):
            sock.close()
        self._selector.close()
        self._store.close()


def _limits(ledger: Ledger) -> Limits:
    """Limits for the largest push of these blocks."""
    sizes = [_most(block, ledger.state[key]) for key, block in ledger.blocks.items()]
    return Limits(REQUESTS, len(sizes), max(sizes, default=0), sum(sizes))


def _most(block: VariableBlock, slots: Mapping[str, Tensor]) -> int:
    rows = 8 * block.shape[0] if block.variable.rows else 0
    return max(x.nbytes for x in slots.values()) + rows
