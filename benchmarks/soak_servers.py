"""Parameter servers and workers that are killed again and again: nothing is lost, nothing counts twice.

    python -m benchmarks.soak_servers --minutes 10

Real processes, kill -9 at random moments, each started again at once; a server where it was.
Each push adds one to every number on every server, and one more to the number of its worker. A worker
notes each push before and after it is acknowledged. In the end every number says how many pushes counted:

    acknowledged <= counted <= acknowledged + in flight when their worker was killed

on every server alike, since a push goes to all. Then the servers' journals are replayed: they must give the
same state, to the bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.command_line import parser
from tutti.errors import ServerError
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.update import WEIGHT, ServedVariable
from tutti.server.wire.client import Client
from tutti.server.wire.service import Service

SECRET = "for one run on one machine"
BLOCK_NBYTES = 2**16
LOG_NBYTES = 2**23
# How long after a kill the next one comes.
PAUSE_SECONDS = (0.2, 2.0)


class Adder:
    """w <- w + g."""

    def __init__(self, size: int) -> None:
        self.variables = (
            ServedVariable(name="all", shape=(size,), dtype=torch.float64, divisible=True),
            ServedVariable(name="each", shape=(64,), dtype=torch.float64),
        )
        self.fingerprint = f"adder of {size}"
        self.coupled = False
        self.given: tuple[str, ...] = ()
        self.numbers: tuple[str, ...] = ()
        self.rates: tuple[str, ...] = ()

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        """It is not coupled."""
        raise AssertionError

    def scalars(self, sums: Mapping[str, Tensor], given: Mapping[str, float]) -> dict[str, float]:
        """None."""
        return {}

    def update(
        self, variable: str, state: Mapping[str, Tensor], gradient: Tensor, scalars: object
    ) -> None:
        """One block."""
        state[WEIGHT].add_(gradient)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All zero."""
        return {v.name: {WEIGHT: torch.zeros(v.shape, dtype=v.dtype)} for v in self.variables}


@dataclass(frozen=True)
class Run:
    """One soak run."""

    directory: str
    ports: tuple[int, ...]
    sync: str
    num_workers: int
    size: int
    log_nbytes: int = LOG_NBYTES

    @property
    def addresses(self) -> list[str]:
        """Of the servers."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    def updater(self) -> Adder:
        """What servers and workers run."""
        return Adder(self.size)

    def service(self, server: int, address: str = "") -> Service:
        """One server, from its directory."""
        updater = self.updater()
        return Service(
            updater,
            updater.state(),
            address or self.addresses[server],
            consistency=parse(self.sync),
            num_workers=self.num_workers,
            server=server,
            num_servers=len(self.ports),
            secret=SECRET,
            directory=Path(self.directory) / f"server-{server}",
            block_nbytes=BLOCK_NBYTES,
            log_nbytes=self.log_nbytes,
        )

    def client(self, worker: int) -> Client:
        """One worker, or an observer."""
        return Client(
            self.addresses,
            self.updater(),
            worker=worker,
            consistency=parse(self.sync),
            secret=SECRET,
            timeout_seconds=60.0,
            block_nbytes=BLOCK_NBYTES,
        )


def serve(run: Run, server: int) -> None:
    """A server process."""
    torch.set_num_threads(1)
    run.service(server).run()


def work(run: Run, worker: int, name: str) -> None:
    """A worker process: pushes until it is killed, or a file says that it is enough."""
    torch.set_num_threads(1)
    weights = {n: slots[WEIGHT] for n, slots in Adder(run.size).state().items()}
    made = {n: torch.ones_like(x) for n, x in weights.items()}
    made["each"] = torch.zeros_like(weights["each"])
    made["each"][worker] = 1.0
    with run.client(worker) as one:
        one.join()
        notes = os.open(Path(run.directory) / name, os.O_WRONLY | os.O_CREAT, 0o600)
        while not (Path(run.directory) / "enough").exists():
            one.pull(weights)
            one.prefetch(weights)
            os.write(notes, b"p")
            os.write(notes, b"a" if one.push(made, {}).taken else b"?")
        one.leave()


class Crew:
    """The processes of a run, by kind and number; who is killed is started again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.soak_servers"])
        self._lives = dict.fromkeys(range(run.num_workers), 0)
        self.kills = {"server": 0, "worker": 0}
        self.processes: dict[tuple[str, int], BaseProcess] = {}
        for server in range(len(run.ports)):
            self.start("server", server)
        for worker in range(run.num_workers):
            self.start("worker", worker)

    def start(self, kind: str, number: int) -> None:
        """One process; each life of a worker notes its pushes in a file of its own."""
        if kind == "server":
            process = self._context.Process(target=serve, args=(self.run, number))
        else:
            name = f"worker-{number}.{self._lives[number]}"
            self._lives[number] += 1
            process = self._context.Process(target=work, args=(self.run, number, name))
        process.start()
        self.processes[kind, number] = process

    def kill_one(self, chance: random.Random) -> None:
        """Any of them."""
        victim = chance.choice(list(self.processes))
        _kill(self.processes[victim])
        self.kills[victim[0]] += 1
        self.start(*victim)

    def finish(self) -> None:
        """Let the workers end by themselves."""
        (Path(self.run.directory) / "enough").touch()
        for (kind, _), process in self.processes.items():
            if kind == "worker":
                process.join(120)
                assert process.exitcode == 0, "a worker did not end"

    def close(self) -> None:
        """The end of all."""
        for process in self.processes.values():
            _kill(process)


def soak(seconds: float, run: Run, chance: random.Random) -> dict[str, object]:
    """Run, kill, and look: what was counted.

    Raises:
        AssertionError: a push was lost, or counted twice.
    """
    crew, end = Crew(run), time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(chance.uniform(*PAUSE_SECONDS))
            crew.kill_one(chance)
        crew.finish()
        with run.client(-1) as observer:
            state, figures = observer.pull_state(), observer.status()
    finally:
        crew.close()
    staleness: Counter[int] = Counter()
    for figure in figures:
        staleness.update(figure.staleness)
    return _checked(run, state) | {
        "kills": crew.kills,
        "staleness": dict(sorted(staleness.items())),
    }


def _kill(process: BaseProcess) -> None:
    if process.is_alive() and process.pid:
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def _checked(run: Run, state: dict[str, dict[str, Tensor]]) -> dict[str, object]:
    acknowledged, unknown = [0] * run.num_workers, [0] * run.num_workers
    for path in Path(run.directory).glob("worker-*"):
        notes, worker = path.read_bytes(), int(path.name.partition("-")[2].partition(".")[0])
        acknowledged[worker] += notes.count(b"a")
        unknown[worker] += notes.count(b"p") - notes.count(b"a")
    counted = state["each"][WEIGHT][: run.num_workers].long().tolist()
    for worker, count in enumerate(counted):
        least, most = acknowledged[worker], acknowledged[worker] + unknown[worker]
        assert least <= count <= most, f"worker {worker}: {least} <= {count} <= {most}"
    everywhere = state["all"][WEIGHT]
    # a push in flight when its worker was killed may have reached one server and not another
    assert sum(acknowledged) <= everywhere.min() <= everywhere.max()
    assert everywhere.max() <= sum(acknowledged) + sum(unknown)
    _replayed(run, state)
    return {
        "acknowledged": sum(acknowledged),
        "in flight at a kill": sum(unknown),
        "counted": sum(counted),
    }


def _replayed(run: Run, state: dict[str, dict[str, Tensor]]) -> None:
    """What the directories give, without the processes that wrote them, is what these served."""
    for server in range(len(run.ports)):
        service = run.service(server, "127.0.0.1:0")
        for key, slots in service.machine.ledger.state.items():
            block = service.machine.ledger.blocks[key]
            assert torch.equal(slots[WEIGHT], block.of(state[block.variable.name][WEIGHT]))
        service.stop()
        service.run()


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens at, below those that the system gives to connections."""
    found = []
    for port in random.sample(range(20_000, 30_000), 1000):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise ServerError("no free port")


def main() -> None:
    """The command."""
    sizes = {"minutes": 10.0, "workers": 3, "servers": 2, "size": 2**17}
    options = parser(__doc__, **sizes, sync="async", seed=0).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ports = free_ports(options.servers)
        run = Run(directory, ports, options.sync, options.workers, options.size)
        found = soak(60 * options.minutes, run, random.Random(options.seed))
    print(json.dumps({"minutes": options.minutes, "sync": options.sync} | found, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
