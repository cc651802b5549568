"""Measures several hosts: `torchrun --nnodes 2 --nproc-per-node 8 ... -m tutti calibrate` on each of them.

The first rank of each host measures its host alone, in processes of its own, while the others wait. Then
every rank exchanges values with its peers on the other hosts, all at the same time: the devices of a host
share its network adapters. The slowest host and the slowest rank count.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.calibration.measurement import SECONDS, measured, ring_rate
from tutti.calibration.rank_measurement import rank_device, wait_for
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.transport import Distributed
from tutti.errors import PlanError
from tutti.launch.ranks import ensure_process_group
from tutti.planning.hardware_files import Measured, MeasuredHosts, slowest

_LARGE_NBYTES, _SMALL_NBYTES = 1 << 24, 64
_FEWEST, _MOST = 3, 200
# Of a rank of torchrun; a run started within it has its own.
_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def is_one_of_several() -> bool:
    """Whether this process is a rank of torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def measured_together(seconds: float = SECONDS) -> tuple[Measured, MeasuredHosts | None]:
    """Measure the hosts and the links between them; every rank calls it, and gets the same.

    Args:
        seconds: of each measurement, about.

    Returns:
        The slowest host; the links between hosts, None if there is one host.

    Raises:
        PlanError: the hosts have different numbers of ranks, or the measurement of a host failed.
    """
    ensure_process_group()
    per_host = _per_host()
    hosts = _hosts(per_host, seconds)
    num_hosts = dist.get_world_size() // per_host
    between = _Between(num_hosts, per_host, seconds).found() if num_hosts > 1 else None
    return slowest(hosts), between


def leads_host() -> bool:
    """Whether this rank writes the files of its host."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _per_host() -> int:
    own = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    every = {int(text) for text in exchange_texts(str(own), Group.world())}
    if len(every) > 1:
        raise PlanError(
            f"the hosts have {', '.join(map(str, sorted(every)))} ranks",
            why="a hardware file describes equal hosts",
            fix="the same --nproc-per-node on each",
        )
    return own


def _hosts(per_host: int, seconds: float) -> list[Measured]:
    """Each host alone, all at the same time. Ranks that wait sleep: Gloo waits for a socket."""
    waiting = dist.new_group(backend="gloo")
    assert isinstance(waiting, dist.ProcessGroup)
    text = ""
    if leads_host():
        try:
            text = json.dumps(asdict(_alone(per_host, seconds)))
        except PlanError as error:
            text = json.dumps(str(error))
    with ThreadPoolExecutor(1) as pool:  # the watch of waits reports those of the main thread
        pool.submit(dist.barrier, waiting).result()
    found = [json.loads(x) for x in exchange_texts(text, Group.world()) if x]
    if failed := [x for x in found if isinstance(x, str)]:
        raise PlanError("a host could not be measured", why=failed[0])
    return [Measured(**values) for values in found]


def _alone(per_host: int, seconds: float) -> Measured:
    """This host, measured by a process that is no rank of torchrun."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_forget_ranks) as pool:
        return pool.submit(measured, per_host, seconds).result()


def _forget_ranks() -> None:
    for name in [name for name in os.environ if name.startswith(_OF_RANKS)]:
        del os.environ[name]


class _Between:
    """Collectives and messages between hosts: the ranks of one place on each host, all places at once."""

    def __init__(self, num_hosts: int, per_host: int, seconds: float) -> None:
        self.num_hosts, self.per_host, self.seconds = num_hosts, per_host, seconds
        axes = ("host",)
        groups = Groups({"host": num_hosts, "device": per_host}, [axes])
        self.group = groups[axes]
        self.device = rank_device()

    def found(self) -> MeasuredHosts:
        """The figures of the slowest rank."""
        small, large = self._all_reduce(_SMALL_NBYTES), self._all_reduce(_LARGE_NBYTES)
        own = {
            "start": small,
            "rate": ring_rate(self.num_hosts, _LARGE_NBYTES, small, large),
            "message": _LARGE_NBYTES / self._message(),
        }
        every = [json.loads(x) for x in exchange_texts(json.dumps(own), Group.world())]
        return MeasuredHosts(
            num_hosts=self.num_hosts,
            start=max(x["start"] for x in every),
            rate=min(x["rate"] for x in every),
            message=min(x["message"] for x in every),
        )

    def _values(self, nbytes: int) -> Tensor:
        return torch.ones(nbytes // 4, device=self.device)

    def _all_reduce(self, nbytes: int) -> float:
        x, group = self._values(nbytes), Distributed(self.group)
        return self._median(lambda: group.all_reduce(x, "sum"))

    def _message(self) -> float:
        """Seconds of a message to the next host, while one comes from the host before."""
        ranks, here = self.group.ranks, self.group.position
        after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
        sent, received = self._values(_LARGE_NBYTES), self._values(_LARGE_NBYTES)

        def exchange() -> None:
            ops = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return self._median(exchange)

    def _median(self, call: Callable[[], object]) -> float:
        """Median seconds; every rank makes the same number of calls, fewer of long ones."""
        self._timed(call)
        first = max(map(float, exchange_texts(repr(self._timed(call)), Group.world())))
        repeats = max(_FEWEST, min(_MOST, int(self.seconds / max(first, 1e-9))))
        return statistics.median(self._timed(call) for _ in range(repeats))

    def _timed(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        wait_for(self.device)
        return time.perf_counter() - begin
