"""Push and pull of 64 MiB on loopback: a parameter server against sockets, Gloo and torch RPC.

    python -m benchmarks.servers

Each way has two processes of its own, one thread each, that wait for their turn; the ways alternate, in
another order each round, and medians are compared. A turn is one push and one pull of the whole variable,
from memory to memory. `plain` and `tls` are what the standard library does with ready buffers from socket to
socket, and nothing else: no update, no checksum, no exactly once. The server applies an SGD step to what
it gets. `kept`: it keeps records, in a file system in memory. `shared`: payloads lie in shared memory.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from benchmarks.command_line import parser
from tutti.environment import SHARED_MEMORY
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.update import WEIGHT, ServedVariable
from tutti.server.wire.client import Client
from tutti.server.wire.connections.tls import Tls
from tutti.server.wire.service import Service

NBYTES = 64 * 2**20
# Enough for a server that keeps records to have had each of its slabs once.
WARM_TURNS = 20
SECRET = "for one benchmark on one machine"
Turn = Callable[[], None]


class Sgd:
    """w <- w - lr g."""

    variables = (ServedVariable(name="w", shape=(NBYTES // 4,), divisible=True),)
    fingerprint, coupled = "sgd", False
    given: tuple[str, ...] = ("lr",)
    numbers: tuple[str, ...] = ("lr",)
    rates: tuple[str, ...] = ("lr",)

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        """It is not coupled."""
        raise AssertionError

    def scalars(
        self, sums: Mapping[str, Tensor], given: Mapping[str, float]
    ) -> Mapping[str, float]:
        """As they came."""
        return given

    def update(
        self,
        variable: str,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        scalars: Mapping[str, float],
    ) -> None:
        """One block."""
        state[WEIGHT].sub_(gradient, alpha=scalars["lr"])


def certificate(directory: Path) -> Tls:
    """One that signs itself, for 127.0.0.1."""
    path, key = directory / "cert.pem", directory / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    words += f" -subj /CN=bench -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {path}"
    subprocess.run(words.split(), check=True, capture_output=True)
    return Tls(certificate=path, key=key, authority=path)


# The ends of each way: `there` answers in a process of its own, `here` gives the turn to measure.


def socket_there(pipe: Connection, directory: Path, tls: bool) -> None:
    """Receives all, sends all, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        sock = _tls(directory).context(server_side=True).wrap_socket(sock, server_side=True)
    view = memoryview(bytearray(NBYTES))
    while True:
        _receive(sock, view)
        sock.sendall(view)


def socket_here(pipe: Connection, directory: Path, tls: bool) -> Turn:
    """The other end."""
    sock = socket.create_connection(pipe.recv())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        context = _tls(directory).context(server_side=False)
        sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
    out, back = memoryview(bytearray(NBYTES)), memoryview(bytearray(NBYTES))

    def turn() -> None:
        sock.sendall(out)
        _receive(sock, back)

    return turn


def _receive(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise SystemExit
        view = view[count:]


def _tls(directory: Path) -> Tls:
    path = directory / "cert.pem"
    return Tls(certificate=path, key=directory / "key.pem", authority=path)


def server_there(
    pipe: Connection, directory: Path, tls: bool, kept: bool, shared: bool = False
) -> None:
    """A parameter server."""
    service = Service(
        Sgd(),
        {"w": {WEIGHT: torch.randn(NBYTES // 4)}},
        consistency=parse("async"),
        num_workers=1,
        secret=SECRET,
        tls=_tls(directory) if tls else None,
        directory=directory / "records" if kept else None,
    )
    pipe.send(service.address)
    service.run()


def server_here(
    pipe: Connection, directory: Path, tls: bool, kept: bool, shared: bool = False
) -> Turn:
    """Its worker."""
    os.environ[SHARED_MEMORY.name] = "" if shared else "off"
    one = Client(
        [pipe.recv()],
        Sgd(),
        worker=0,
        consistency=parse("async"),
        secret=SECRET,
        tls=_tls(directory) if tls else None,
    )
    one.join()
    weights, made = {"w": torch.empty(NBYTES // 4)}, {"w": torch.randn(NBYTES // 4)}

    def turn() -> None:
        one.push(made, {"lr": 1e-3})
        one.pull(weights)

    return turn


def gloo_there(pipe: Connection, directory: Path) -> None:
    """Receives into a tensor, sends another."""
    _group(directory, 1)
    x = torch.empty(NBYTES // 4)
    pipe.send(None)
    while True:
        dist.recv(x, 0)
        dist.send(x, 0)


def gloo_here(pipe: Connection, directory: Path) -> Turn:
    """The other rank."""
    _group(directory, 0)
    pipe.recv()
    out, back = torch.randn(NBYTES // 4), torch.empty(NBYTES // 4)

    def turn() -> None:
        dist.send(out, 1)
        dist.recv(back, 1)

    return turn


def _group(directory: Path, rank: int) -> None:
    store = dist.FileStore(str(directory / "gloo"), 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


KEPT = torch.zeros(0)


def swapped(x: Tensor) -> Tensor:
    """What torch RPC calls on the server: applies, returns the weights."""
    global KEPT
    KEPT = torch.randn(NBYTES // 4) if not len(KEPT) else KEPT
    return KEPT.sub_(x, alpha=1e-3)


def rpc_there(pipe: Connection, directory: Path) -> None:
    """Waits for calls."""
    _rpc(directory, 1)
    pipe.send(None)
    threading.Event().wait()


def rpc_here(pipe: Connection, directory: Path) -> Turn:
    """Calls with a tensor, gets one."""
    _rpc(directory, 0)
    pipe.recv()
    out, back = torch.randn(NBYTES // 4), torch.empty(NBYTES // 4)

    def turn() -> None:
        back.copy_(rpc.rpc_sync("rank1", swapped, (out,)))

    return turn


def _rpc(directory: Path, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc")
    with contextlib.redirect_stderr(io.StringIO()):
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)


WAYS: dict[str, tuple[Callable[..., None], Callable[..., Turn], tuple[Any, ...]]] = {
    "plain": (socket_there, socket_here, (False,)),
    "tls": (socket_there, socket_here, (True,)),
    "tutti": (server_there, server_here, (False, False)),
    "tutti kept": (server_there, server_here, (False, True)),
    "tutti tls": (server_there, server_here, (True, False)),
    "tutti shared": (server_there, server_here, (False, False, True)),
    "tutti shared kept": (server_there, server_here, (False, True, True)),
    "gloo": (gloo_there, gloo_here, ()),
    "torch rpc": (rpc_there, rpc_here, ()),
}


def there(name: str, pipe: Connection, directory: str) -> None:
    """The process that answers."""
    _environment()
    WAYS[name][0](pipe, Path(directory), *WAYS[name][2])


def here(name: str, pipe: Connection, orders: Connection, directory: str) -> None:
    """The process that is measured: seconds of a turn for each order."""
    _environment()
    turn = WAYS[name][1](pipe, Path(directory), *WAYS[name][2])
    for _ in range(WARM_TURNS):
        turn()
    orders.send("ready")
    while True:
        orders.recv()
        begin = time.perf_counter()
        turn()
        orders.send(time.perf_counter() - begin)


def _environment() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"


def measured(names: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.servers"])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processes, orders = [], {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for name in names:
            own = Path(directory) / name.replace(" ", "-")
            own.mkdir()
            certificate(own)
            left, right = context.Pipe()
            orders[name], far = context.Pipe()
            for target, rest in ((there, (right,)), (here, (left, far))):
                process = context.Process(target=target, args=(name, *rest, str(own)), daemon=True)
                process.start()
                processes.append(process)
        for name in names:
            assert orders[name].recv() == "ready"
        chance = random.Random(0)
        for _ in range(num_rounds):
            for name in chance.sample(names, len(names)):
                orders[name].send("go")
                taken = orders[name].recv()
                seconds[name].append(taken)
        for process in processes:
            process.kill()
            process.join()
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """How fast `name` is for each part of `base`'s speed, within a round; the median of these."""
    pairs = zip(seconds[name], seconds[base], strict=True)
    return statistics.median(b / a for a, b in pairs)


def main() -> None:
    """The command."""
    options = parser(__doc__, rounds=25, ways=list(WAYS)).parse_args()
    seconds = measured(options.ways, options.rounds)
    bases = [name for name in ("plain", "tls") if name in seconds]
    print("| way | ms | GB/s " + "".join(f"| to {name} " for name in bases) + "|")
    print("| --- | --- | --- " + "| --- " * len(bases) + "|")
    for name, values in seconds.items():
        middle = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        print(
            f"| {name} | {middle * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) "
            f"| {2 * NBYTES / middle / 1e9:.2f} "
            + "".join(f"| {ratio(seconds, name, base):.2f} " for base in bases)
            + "|"
        )


if __name__ == "__main__":
    main()
