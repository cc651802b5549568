"""Ranks that share a read get the batches that each would read for itself, for a part of the reads."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

import tutti
from ranks import RankFailed, Ranks
from tutti.comm.host import publications
from tutti.comm.host.segment import map_file
from tutti.data import shared_reads
from tutti.data.rank_rows import num_shares
from tutti.launch.thread_stacks import frames_of
from tutti.launch.whereabouts import wait
from tutti.layout import Layout

SIZE, BATCH = 53, 8  # the last batch of an epoch has 5 samples


class Counted:
    """Samples with random numbers, of which it counts the reads in all processes of a rank."""

    def __init__(self, size: int = SIZE) -> None:
        self.reads = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, i: int) -> Any:
        self.reads[i] += 1
        drawn = random.random(), np.random.rand(), torch.rand(3)
        return {"i": i, "drawn": torch.stack([torch.tensor(drawn[:2]).sum(), *drawn[2]])}


class Padded(NamedTuple):
    tokens: Tensor
    texts: list[str]
    halves: tuple[Tensor, Tensor]


def pad(samples: list[Any]) -> Padded:
    """A batch whose shapes depend on all samples, with views, texts and a draw."""
    longest = 1 + max(int(x["i"]) % 7 for x in samples)
    tokens = torch.stack([x["drawn"].repeat(longest)[: 2 * longest] for x in samples])
    whole = torch.arange(12.0).view(3, 4).t() * random.random()
    return Padded(tokens[:, 1:], [str(x["i"]) for x in samples], (whole[:2], whole[1:]))


def bounded(samples: list[Any], length: int) -> Tensor:
    return torch.stack([x["drawn"].repeat(16)[:length] for x in samples])


def made(kind: str, layout: str, num_workers: int, share: bool | None) -> tuple[Any, list[Counted]]:
    """A loader of one kind, and its datasets."""
    data = [Counted(), Counted(31)] if kind == "mixture" else [Counted()]
    given: dict[str, Any] = {"shuffle": True, "seed": 4, "layout": layout}
    given |= workers(num_workers) | {"share_reads": share}
    if kind == "mixture":
        given |= {"weights": [2, 1], "drop_last": True}
    if kind == "whole":
        given |= {"collate_fn": pad}
    if kind == "buckets":
        lengths = [1 + k % 20 for k in range(SIZE)]
        given |= {"bucket_by_length": [8, 16, 24], "length": lengths, "collate_rows": True}
        given |= {"collate_fn": bounded}
    loader = tutti.loader(data if kind == "mixture" else data[0], BATCH, **given)
    return loader, data


def workers(count: int) -> dict[str, Any]:
    """Arguments of a loader on the ranks of tests, which are daemons, and fork their workers here."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    return {"num_workers": count} | ({"multiprocessing_context": "fork"} if count else {})


def plain(x: Any) -> Any:
    """A batch as numbers, with the kind, dtype and strides of each tensor."""
    if isinstance(x, DTensor):
        return ["rows", tuple(x.shape), plain(x.to_local())]
    if isinstance(x, Tensor):
        return [str(x.dtype), tuple(x.shape), x.stride(), x.tolist()]
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [type(x).__name__, *map(plain, x)]
    return x


def three_epochs(kind: str, layout: str, share: bool) -> tuple[Any, int]:
    """Batches of an epoch, of one left early, of its rest from a state, and of the next; the reads of all."""
    loader, data = made(kind, layout, 0, share)
    state = loader.state_dict()
    before = reads_of(data)
    found = [plain(x) for x in loader]
    reads = reads_of(data) - before
    found += [plain(x) for x in islice(loader, 3)]
    state = loader.state_dict()
    found += [plain(x) for x in loader]
    resumed, _ = made(kind, layout, 0, share)
    resumed.load_state_dict(state)
    return found + [plain(x) for _ in range(2) for x in resumed], reads


def reads_of(data: list[Counted]) -> int:
    return sum(int(x.reads.sum()) for x in data)


@pytest.mark.parametrize("kind", ["rows", "whole", "mixture", "buckets"])
@pytest.mark.parametrize("layout", ["tensor=2", "pipe=2", "data=2 tensor=2", "data=2"])
def test_batches_are_the_same_for_a_part_of_the_reads(ranks: Ranks, layout: str, kind: str) -> None:
    found = Layout.parse(layout)
    n, split = found.num_ranks, num_shares(found)
    apart = ranks.run(three_epochs, kind, layout, False, n=n)
    shared = ranks.run(three_epochs, kind, layout, True, n=n)
    for one, other in zip(apart, shared, strict=True):
        assert one[0] == other[0] and len(one[0]) > 3
    size = SIZE if kind != "mixture" else (SIZE + 31) // BATCH * BATCH
    # On one host each sample is read once; alone, by each rank that needs it.
    assert sum(reads for _, reads in shared) == size
    whole = kind == "whole" or split == 1
    assert whole == (sum(reads for _, reads in apart) == n * size)


class Costly(Counted):
    """Samples that take two milliseconds of a processor."""

    def __getitem__(self, i: int) -> Any:
        ends = time.thread_time() + 2e-3
        while time.thread_time() < ends:
            pass
        return super().__getitem__(i)


def epoch(share: bool | None, num_workers: int) -> tuple[Any, int]:
    """The batches of one epoch of costly samples, and the reads."""
    data = Costly()
    loader = tutti.loader(
        data,
        BATCH,
        shuffle=True,
        layout="tensor=2",
        share_reads=share,
        collate_fn=pad,
        **workers(num_workers),
    )
    loader.state_dict()
    before = reads_of([data])
    return [plain(x) for x in loader], reads_of([data]) - before


def test_workers_share_costly_reads(ranks: Ranks) -> None:
    expected = ranks.run(epoch, False, 0, n=2)
    found = ranks.run(epoch, None, 1, n=2)
    assert [batches for batches, _ in found] == [batches for batches, _ in expected]
    # Of 7 batches, rank 0 reads four, with the last of 5 samples.
    assert [reads for _, reads in found] == [3 * BATCH + SIZE % BATCH, 3 * BATCH]


def test_without_workers_ranks_share_when_told_to(ranks: Ranks) -> None:
    assert [reads for _, reads in ranks.run(epoch, None, 0, n=2)] == [SIZE, SIZE]


def on_hosts(layout: str) -> int:
    """The reads of an epoch of ranks of which each two are on one host."""
    with mock.patch.object(shared_reads, "memory_host", lambda rank: f"host {rank // 2}"):
        loader, data = made("whole", layout, 0, True)
        before = reads_of(data)
        assert len(list(loader)) == 7
        return reads_of(data) - before - 4  # the first two samples, each twice


def test_ranks_of_each_host_share(ranks: Ranks) -> None:
    assert sum(ranks.run(on_hosts, "tensor=4", n=4)) == 2 * SIZE


def test_replicas_do_not_wait_for_each_other(ranks: Ranks) -> None:
    assert sum(ranks.run(replicas, "replica=2 tensor=2 sync=average(every=1)", n=4)) == 2 * 48


def replicas(layout: str) -> int:
    """The reads of an epoch, which one replica begins after the other has ended it."""
    data = Counted(48)
    loader = tutti.loader(data, BATCH, layout=layout, collate_fn=pad, share_reads=True)
    list(loader)
    before = reads_of([data])
    if dist.get_rank() < 2:
        time.sleep(1.0)
    began = time.monotonic()
    list(loader)
    assert time.monotonic() - began < 0.9, "waits for the other replica"
    return reads_of([data]) - before


# Errors


class Broken(Counted):
    """Samples 9 and 30 raise."""

    def __getitem__(self, i: int) -> Any:
        if i in (9, 30):
            raise OSError(f"no picture {i}")
        return super().__getitem__(i)


class Fatal(Counted):
    """Sample 9 ends its process."""

    def __getitem__(self, i: int) -> Any:
        if i == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def failing(
    data: Any, num_workers: int, share: bool, init: Any = None, loops: int = 2
) -> list[Any]:
    """The errors of loops, with the number of batches before each."""
    given = workers(num_workers) | {"worker_init_fn": init}
    loader = tutti.loader(data, 4, layout="tensor=2", share_reads=share, **given)
    ARMED.clear()
    loader.state_dict()
    ARMED.append(True)
    found = []
    for _ in range(loops):
        count = 0
        try:
            for _ in loader:
                count += 1
        except tutti.TuttiError as error:
            found.append((count, type(error).__name__, str(error), str(error.__cause__)))
    return found


def broken(share: bool) -> list[Any]:
    return failing(Broken(), 0, share)


def fatal() -> list[Any]:
    return failing(Fatal(), 1, True)


def test_every_rank_raises_the_error_of_the_sample(ranks: Ranks) -> None:
    apart = ranks.run(broken, False, n=2)
    shared = ranks.run(broken, True, n=2)
    assert [x[:3] for x in shared[0]] == [x[:3] for x in shared[1]] == [x[:3] for x in apart[0]]
    (count, _, text, _), (again, *_) = shared[0]
    assert (count, again) == (2, 0) and text.startswith("cannot read sample 9 of Broken: OSError")
    assert all("no picture 9" in cause for found in shared for *_, cause in found)


def test_every_rank_raises_the_error_of_a_lost_worker(ranks: Ranks) -> None:
    for found in ranks.run(fatal, n=2):
        assert len(found) == 2 and found[0][0] <= 2 and found[1][0] <= 2  # it reads ahead
        for _, kind, text, _ in found:
            assert kind == "TuttiError"
            assert text.startswith("a worker of the loader died while it read sample 9 of Fatal")


ARMED: list[bool] = []  # not yet while a worker reads the first samples


def refuse(rank: int) -> Any:
    def init(_number: int) -> None:
        if ARMED and dist.get_rank() == rank:
            raise ValueError("no licence")

    return init


def without_a_worker() -> list[str]:
    """The errors of ranks of which rank 1 cannot start a worker."""
    try:
        return [x[2] for x in failing(Counted(), 1, True, refuse(1), loops=1)]
    except ValueError as error:
        return [str(error)]


def test_an_error_of_one_ranks_worker_ends_all_loops(ranks: Ranks) -> None:
    other, own = ranks.run(without_a_worker, n=2)
    assert other[0].startswith("rank 1 cannot read a batch: ValueError") and "no licence" in own[0]


def dies(moment: str) -> str:
    """The error of rank 0 when rank 1 ends."""
    loader, _ = made("rows", "tensor=2", 0, True)
    for k, _ in enumerate(loader):
        if dist.get_rank() == 1 and k == 2:
            os._exit(3)
    if moment == "loop":
        return "no error"
    return ""


def test_a_rank_that_ends_is_named_by_those_that_wait_for_its_batch(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.run(dies, "loop", n=2)
    assert "rank 1 is gone; it left rank 0 in the loader's shared read" in str(caught.value)
    assert time.monotonic() - began < 25.0


def late() -> tuple[str, set[str]]:
    """The error of rank 0 when rank 1 comes too late; the waits that a report would name."""
    main, seen = threading.main_thread().ident, set[str]()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            found = wait(frames_of(main or 0))
            seen.update([f"{found.what} of {found.ranks}"] if found else [])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with mock.patch.dict(os.environ, {"TUTTI_TIMEOUT": "1"}):
            loader, _ = made("rows", "tensor=2", 0, True)
            for k, _ in enumerate(loader):
                if dist.get_rank() == 1 and k == 3:
                    time.sleep(3.0)
                    return "", seen
    except tutti.CommError as error:
        return str(error), seen
    finally:
        ended.set()
        thread.join()
    return "no error", seen


def test_a_late_rank_is_named_after_the_timeout(ranks: Ranks) -> None:
    text, seen = ranks.run(late, n=2)[0]
    assert text.startswith("rank 1 did not join rank 0 in the loader's shared read within 1 s")
    assert "the loader's shared read of (1,)" in seen


# What cannot be shared


def sometimes_a_set(samples: list[Any]) -> Any:
    texts = [str(x["i"]) for x in samples]
    return pad(samples), sorted(texts) if "17" in texts else texts, {1} if "17" in texts else {}


def with_sets(share: bool) -> tuple[Any, list[str], int]:
    data = Counted()
    given: dict[str, Any] = {"layout": "tensor=2", "collate_fn": sometimes_a_set}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = tutti.loader(data, BATCH, share_reads=share, **given)
        loader.state_dict()
        before = reads_of([data])
        found = [plain(x) for _ in range(2) for x in loader]
    return found, [str(x.message) for x in told], reads_of([data]) - before


def test_a_batch_that_ranks_do_not_send_ends_sharing(ranks: Ranks) -> None:
    apart, shared = ranks.run(with_sets, False, n=2), ranks.run(with_sets, True, n=2)
    assert [x[0] for x in shared] == [x[0] for x in apart]
    assert any("do not send a set to each other" in text for text in shared[0][1])
    # Turns 0 to 3 are shared, and turn 2 is read again, like all that follow.
    assert [x[2] for x in shared] == [2 * BATCH + 2 * SIZE - 2 * BATCH] * 2
    assert [x[2] for x in apart] == [2 * SIZE] * 2


def short_of_memory(where: str, share: bool) -> Any:
    """Batches of ranks of which rank 1 gets no memory, for its own values or those of rank 0."""
    real = map_file

    def fails(*args: Any, **more: Any) -> Any:
        foreign = args[0] != os.getpid()
        if share and dist.get_rank() == 1 and foreign == (where == "others"):
            raise OSError(errno.ENOSPC, "no space")
        return real(*args, **more)

    with mock.patch.object(publications, "map_file", fails):
        loader, _ = made("rows", "tensor=2", 0, share)
        return [plain(x) for _ in range(2) for x in loader]


@pytest.mark.parametrize("where", ["own", "others"])
def test_without_memory_each_rank_reads(ranks: Ranks, where: str) -> None:
    expected = ranks.run(short_of_memory, where, False, n=2)
    assert ranks.run(short_of_memory, where, True, n=2) == expected


def mappings() -> tuple[int, int]:
    """The mappings of unnamed files, and the open descriptors, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    unnamed = sum("/dev/shm/#" in line and "(deleted)" in line for line in maps)
    return unnamed, len(os.listdir("/proc/self/fd"))


def memory_of_epochs() -> list[tuple[int, int]]:
    """Before a loader, after its epochs, and after its end."""
    loader, _ = made("rows", "tensor=2", 0, True)
    list(loader)  # process groups of the first loop
    del loader
    found = [mappings()]
    loader, _ = made("whole", "tensor=2", 0, True)
    for _ in range(3):
        list(loader)
        found.append(mappings())
    del loader
    return [*found, mappings()]


def test_memory_is_reused_and_given_back(ranks: Ranks) -> None:
    for before, *epochs, after in ranks.run(memory_of_epochs, n=2):
        assert after[0] == before[0] and after[1] <= before[1]
        assert epochs[0] == epochs[1] == epochs[2]
        # The counters; two boxes of each of two ranks.
        assert epochs[0][0] - before[0] == 5


def test_a_stream_is_not_shared() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)

    with pytest.raises(tutti.TuttiError, match="share_reads=True, but Stream is an iterable"):
        tutti.loader(Stream(), 2, share_reads=True)


def test_another_value_is_refused() -> None:
    with pytest.raises(tutti.TuttiError, match="share_reads='yes' is no truth value"):
        tutti.loader([1, 2], 2, share_reads="yes")  # type: ignore[arg-type]
