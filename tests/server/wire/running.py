"""Services in threads of this process, and workers that ask them over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from server.protocol.updaters import (
    BLOCK_NBYTES,
    LR,
    ClippedAdam,
    Sgd,
    gradient,
    own_numbers,
    whole_state,
)
from tutti.server.protocol.consistency import Consistency, parse
from tutti.server.wire.client import Client
from tutti.server.wire.service import Service

SECRET = "a secret for tests only"


@contextmanager
def services(
    updater: Sgd | ClippedAdam, sync: str, num_workers: int, num_servers: int = 1, **options: Any
) -> Iterator[list[Service]]:
    """Servers that run until the end of the block."""
    options = {"secret": SECRET, "block_nbytes": BLOCK_NBYTES} | options
    found = [
        Service(
            updater,
            whole_state(updater),
            consistency=parse(sync),
            num_workers=num_workers,
            server=server,
            num_servers=num_servers,
            **options,
        )
        for server in range(num_servers)
    ]
    threads = [threading.Thread(target=service.run, daemon=True) for service in found]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        for service in found:
            service.stop()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def client(
    updater: Sgd | ClippedAdam,
    sync: str | Consistency,
    addresses: list[str],
    worker: int,
    **options: Any,
) -> Client:
    consistency = parse(sync) if isinstance(sync, str) else sync
    options = {
        "secret": SECRET,
        "block_nbytes": BLOCK_NBYTES,
        "timeout_seconds": 30.0,
    } | options
    return Client(addresses, updater, worker=worker, consistency=consistency, **options)


def like(updater: Sgd | ClippedAdam) -> dict[str, Tensor]:
    """Memory to pull into, of no numbers."""
    return {v.name: torch.full(v.shape, float("nan"), dtype=v.dtype) for v in updater.variables}


def train(
    updater: Sgd | ClippedAdam,
    sync: str,
    addresses: list[str],
    worker: int,
    steps: int,
    **options: Any,
) -> dict[str, Tensor]:
    """One worker's life; the weights that it saw last."""
    weights = like(updater)
    with client(updater, sync, addresses, worker, **options) as one:
        one.join()
        for _ in range(steps if one.alone else steps - one.clock):
            one.pull(weights)
            made = gradient(weights, worker, one.clock)
            one.push(made, own_numbers(updater, made, LR) if one.alone else {"lr": LR})
        one.leave()
    return weights


def all_at_once(*actions: Callable[[], Any]) -> list[Any]:
    """What each gives, run in threads; the first error is raised."""
    results: list[Any] = [None] * len(actions)

    def run(position: int) -> None:
        try:
            results[position] = actions[position]()
        except BaseException as error:
            results[position] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
