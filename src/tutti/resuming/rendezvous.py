"""Where the processes that write a run's saves meet: they are in none of its process groups."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from tutti.checkpoint.unanimous import Unanimous
from tutti.comm.collectives.group import collective_timeout
from tutti.comm.host.hosts import host_name
from tutti.comm.posts.lines import own_address
from tutti.environment import RUN_DIR


@dataclass(frozen=True)
class Rendezvous:
    """A place to meet, with what a process needs to come.

    size: the number of processes.  seconds: for which one waits for another.  file: the first part of the
    names of files, in the directory of `tutti run`.  host, port: without it, of the first rank's TCP store.
    """

    size: int
    seconds: float
    file: str = ""
    host: str = ""
    port: int = 0

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Rendezvous:
        """Parse a text."""
        return cls(**json.loads(text))

    def store(self, number: int) -> Store | None:
        """The store of save `number`, for one of the processes; None for a single one."""
        timeout = timedelta(seconds=self.seconds)
        if self.size == 1:
            return None
        if self.file:  # the last one to leave removes the file
            found: Store = FileStore(f"{self.file}.{number}", self.size)
            found.set_timeout(timeout)
            return found
        return TCPStore(self.host, self.port, timeout=timeout, wait_for_workers=False)


def arrange(ranks: Unanimous) -> tuple[Rendezvous, TCPStore | None]:
    """A place for the processes of all ranks, which call this together; the first rank keeps its store."""
    seconds = collective_timeout().total_seconds()
    what, run_dir, kept = "cannot prepare saves", RUN_DIR.read(), None
    if ranks.size == 1:
        return Rendezvous(1, seconds), None
    if run_dir:
        name = ranks.lead(what, lambda: f"saves-{secrets.token_hex(8)}")
        return Rendezvous(ranks.size, seconds, str(Path(run_dir) / name)), None
    near = len(set(ranks.each(what, host_name))) == 1
    made: list[TCPStore] = []

    def make() -> str:
        host = "127.0.0.1" if near else own_address()
        made.append(_listening(host))
        return Rendezvous(ranks.size, seconds, host=host, port=made[0].port).text()

    found = Rendezvous.of(ranks.lead(what, make))
    kept = made[0] if made else None
    return found, kept


def _listening(host: str) -> TCPStore:
    """A store of this process that listens at one address only."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind((host, 0))
        one.listen(64)
        port = one.getsockname()[1]
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=one.detach()
        )
