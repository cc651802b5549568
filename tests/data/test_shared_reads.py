"""Ranks that share a read get the batches that each would read for itself, for a part of the reads."""

from __future__ import annotations

import multiprocessing
import random
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tutti
from ranks import Ranks
from tutti.data.rank_rows import num_shares
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
    given |= {"num_workers": num_workers, "share_reads": share}
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


def may_start_workers() -> None:
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # the ranks of tests are daemons, which may not start workers


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


def epoch(kind: str, share: bool | None, num_workers: int) -> tuple[Any, int]:
    """The batches of one epoch, and the reads."""
    may_start_workers()
    loader, data = made(kind, "tensor=2", num_workers, share)
    loader.state_dict()
    before = reads_of(data)
    return [plain(x) for x in loader], reads_of(data) - before


@pytest.mark.parametrize("kind", ["rows", "whole"])
def test_workers_read_each_sample_once(ranks: Ranks, kind: str) -> None:
    expected = ranks.run(epoch, kind, False, 0, n=2)
    found = ranks.run(epoch, kind, True, 2, n=2)
    assert [batches for batches, _ in found] == [batches for batches, _ in expected]
    # Of 7 batches, rank 0 reads four, with the last of 5 samples.
    assert [reads for _, reads in found] == [3 * BATCH + SIZE % BATCH, 3 * BATCH]
