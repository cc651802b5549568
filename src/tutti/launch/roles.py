"""The role of this process in a run with servers: a worker or a server, its number, the servers' addresses.

Environment variables define it (`environment.py`). Without TUTTI_SERVERS the servers of one host write their
addresses, and their ends, to the run's directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tutti.comm.collectives.group import collective_timeout
from tutti.comm.host.awake import AwakeClock
from tutti.environment import ROLE, RUN_DIR, SECRET, SERVERS, TLS
from tutti.errors import LayoutError, ServerError
from tutti.layout import Layout
from tutti.server.wire.connections.tls import Tls

WORKER, SERVER = "worker", "server"
_POLL_SECONDS = 0.05
_ENDED = ".ended"


@dataclass(frozen=True)
class Role:
    """`kind` is "worker" or "server"; numbers of both, and of a worker's ranks, begin at 0."""

    kind: str
    number: int
    rank_in_worker: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (
            f".{self.rank_in_worker}" if self.rank_in_worker else ""
        )

    @classmethod
    def parse(cls, text: str) -> Role:
        """The role that prints as `text`."""
        kind, _, numbers = text.partition(" ")
        number, _, rank_in_worker = numbers.partition(".")
        return cls(kind, int(number), int(rank_in_worker or 0))

    def rank(self, layout: Layout) -> int:
        """The number among all processes of a run: workers first, each with consecutive ranks."""
        if self.kind == WORKER:
            return self.number * layout.worker_size + self.rank_in_worker
        return layout.num_ranks + self.number


def worker_roles(layout: Layout, workers: Iterable[int]) -> list[Role]:
    """Every process of some workers."""
    return [Role(WORKER, w, k) for w in workers for k in range(layout.worker_size)]


def roles_of(layout: Layout) -> list[Role]:
    """Every process of a run, by rank."""
    workers = worker_roles(layout, range(layout.num_replicas))
    return workers + [Role(SERVER, s) for s in range(layout.server)]


def role_now(layout: Layout) -> Role:
    """The role of this process.

    Raises:
        LayoutError: it is not part of a run with servers.
    """
    text = ROLE.read()
    if not text:
        raise LayoutError(
            f'layout "{layout}" has servers, but this process is neither a worker nor a server',
            why="workers and servers are started by tutti run, servers of other hosts by tutti serve",
            fix=f'tutti run --layout "{layout}" SCRIPT',
        )
    return Role.parse(text)


def is_first_worker() -> bool:
    """Whether this process is of worker 0, as is each process of a run without servers."""
    role = Role.parse(ROLE.read() or f"{WORKER} 0")
    return (role.kind, role.number) == (WORKER, 0)


def secret() -> str:
    """The common secret of workers and servers; "" if there is none."""
    return SECRET.read()


def checked_secret() -> None:
    """Raise `ServerError` if this process of several hosts has neither a secret nor certificates."""
    if not secret() and not TLS.read():
        raise ServerError(
            f"{SECRET.name} is not set",
            why="servers and workers of several hosts must share a secret, or have certificates",
            fix=f"{SECRET.name}=$(openssl rand -hex 32), the same everywhere; "
            f"or {TLS.name}=certificate,key,authority",
        )


def tls() -> Tls | None:
    """The certificates of this process, if it has some."""
    given = TLS.read()
    if not given:
        return None
    files = [Path(x) for x in given.split(",")]
    if len(files) != 3:
        raise ServerError(
            f'{TLS.name}="{given}" names {len(files)} files', fix="certificate,key,authority"
        )
    return Tls(certificate=files[0], key=files[1], authority=files[2])


def publish(role: Role, address: str) -> None:
    """Tell the workers of this host a server's address."""
    path = _address_file(role.number)
    if path is not None:
        draft = path.with_suffix(".draft")
        draft.write_text(address)
        draft.rename(path)


def published(role: Role) -> str:
    """The earlier address of a server of this host; "" if it has none."""
    path = _address_file(role.number)
    return path.read_text() if path is not None and path.exists() else ""


def publish_end(role: Role) -> None:
    """Tell the workers of this host that a server has ended in good order: it does not come back."""
    path = _address_file(role.number)
    if path is not None:
        path.with_suffix(_ENDED).touch()


def has_ended(server: int) -> bool:
    """Whether a server of this host has ended in good order."""
    path = _address_file(server)
    return path is not None and path.with_suffix(_ENDED).exists()


def addresses(layout: Layout) -> list[str]:
    """The servers' addresses; waits for those of this host.

    Raises:
        ServerError: there are too few addresses, or they do not come in time.
    """
    given = [x.strip() for x in SERVERS.read().split(",") if x.strip()]
    if given:
        if len(given) != layout.server:
            raise ServerError(
                f'layout "{layout}" has {layout.server} servers, {len(given)} addresses are given',
                fix="one host:port for each server, in the order of their numbers",
            )
        return given
    awake, most_seconds = AwakeClock(), collective_timeout().total_seconds()
    every = [Role(SERVER, s) for s in range(layout.server)]
    while not all(found := [published(one) for one in every]):
        if awake.look() > most_seconds:
            late = next(one for one, at in zip(every, found, strict=True) if not at)
            raise ServerError(
                f"{late} has not begun to serve",
                why="a server begins at its first training step; its script may not reach it",
            )
        time.sleep(_POLL_SECONDS)
    return found


def _address_file(server: int) -> Path | None:
    directory = RUN_DIR.read()
    return Path(directory) / f"server{server}.address" if directory else None
