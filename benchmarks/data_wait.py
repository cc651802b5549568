"""How long a step waits for its batch: `tutti.loader` next to PyTorch's `DataLoader`, with as many workers.

    python -m benchmarks.data_wait                         # the GPT of 3.7 M parameters, one worker a rank
    python -m benchmarks.data_wait --models gpt-29.5M --layouts "data=2 zero=3" --rounds 12
    python -m benchmarks.data_wait --shared --layouts tensor=2 pipe=2    # ranks share reads, or do not

Both loaders take turns of 12 steps in one run, after a few that start the workers. A sample is a window of a
file with a tenth of its tokens replaced at random, by Python. On one device the `DataLoader` shuffles with a
sampler; on ranks each has a `DistributedSampler`, and its step gets the whole batch of another loader: only
the wait counts. Prints the seconds of a wait over those of a step, mean and median.

With `--shared` there is no step: loops over `tutti.loader` with `share_reads=True`, `False` and `None` take
turns of an epoch, in one run: of samples that cost a processor (768 x 768 pixels to decompress and scale),
and of cheap ones. Prints the milliseconds of a batch, the median of epochs.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import zlib
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

import tutti
from benchmarks.command_line import parser
from benchmarks.models import CASES, Case, optimizer, plain_step
from benchmarks.own_ranks import start_ranks
from tutti.launch.ranks import ensure_process_group

MODEL, LAYOUTS, NUM_ROUNDS, TURN = "gpt-3.7M", ("data=1", "data=2", "data=2 zero=3"), 12, 12
WORKERS = 1


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of bytes, some replaced at random."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.text = b"".join(path.read_bytes() for path in Path(torch.__file__).parent.glob("*.py"))

    def __len__(self) -> int:
        return len(self.text) - self.window - 1

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        found = list(self.text[k : k + self.window + 1])
        targets = torch.tensor(found[1:])
        for _ in range(self.window // 10):
            found[random.randrange(len(found))] = random.randrange(256)
        return torch.tensor(found[:-1]), targets


class Pictures(Dataset[Tensor]):
    """Compressed pixels, which a read decompresses and scales."""

    def __init__(self, count: int) -> None:
        made = np.random.default_rng(0).integers(0, 64, (16, 768, 768), dtype=np.uint8)
        self.found = [zlib.compress(np.cumsum(x, axis=1, dtype=np.uint8).tobytes()) for x in made]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Tensor:
        octets = zlib.decompress(self.found[k % len(self.found)])
        pixels = torch.frombuffer(bytearray(octets), dtype=torch.uint8).view(768, 768)
        return (pixels.float() / 255 - 0.5)[::4, ::4].contiguous()


def measure_sharing(layout: str, num_rounds: int) -> None:
    """On a rank: milliseconds of a batch with and without shared reads."""
    size, count = 16, 40
    generator = torch.Generator().manual_seed(0)
    kinds: dict[str, Any] = {
        "pictures": Pictures(count * size),
        "tensors": TensorDataset(torch.randn(count * size, 1024, generator=generator)),
    }
    workers: Any = {"num_workers": WORKERS, "persistent_workers": True}
    for kind, data in kinds.items():
        loaders = {
            share: tutti.loader(data, size, layout=layout, share_reads=share, **workers)
            for share in (False, True, None)
        }
        times: dict[Any, list[float]] = {share: [] for share in loaders}
        for k in range(num_rounds + 1):
            for share in list(loaders)[:: 1 if k % 2 else -1]:
                batches = iter(loaders[share])
                next(batches)  # after the start of workers
                dist.barrier()
                began = time.perf_counter()
                for _ in batches:
                    pass
                dist.barrier()
                if k:
                    times[share].append((time.perf_counter() - began) / (count - 1))
        if dist.get_rank() == 0:
            said = [
                f"share_reads={share} {statistics.median(found) * 1e3:.2f} ms"
                for share, found in times.items()
            ]
            print(f"{kind:8} {layout:8} a batch: {', '.join(said)}", flush=True)


def endless(loader: Any) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    return chain.from_iterable(repeat(loader))


def measure(case: Case, layout: str, num_rounds: int) -> None:
    """On a rank: waits and steps of both loaders."""

    model = case.model()
    step = tutti.distribute(plain_step(case), model, optimizer(model), layout)
    size = dist.get_world_size() if dist.is_initialized() else 1
    data: Any = Windows(case.units_per_sample)
    batch = case.batch(0, size)
    sampler = DistributedSampler(data) if size > 1 else RandomSampler(data)
    workers: Any = {"num_workers": WORKERS, "persistent_workers": True}
    ways = {
        "DataLoader": endless(DataLoader(data, case.per_rank, sampler=sampler, **workers)),
        "tutti.loader": endless(
            tutti.loader(data, size * case.per_rank, shuffle=True, layout=layout, **workers)
        ),
    }
    waits: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(num_rounds + 1):
        for name, batches in ways.items():
            for turn in range(TURN):
                began = time.perf_counter()
                found = next(batches)
                waited = time.perf_counter() - began
                began = time.perf_counter()
                step(*(found if name == "tutti.loader" else batch))
                if (
                    k and turn > 2
                ):  # what was read ahead while the other one had its turn does not count
                    waits[name].append(waited)
                    steps[name].append(time.perf_counter() - began)
    if not dist.is_initialized() or dist.get_rank() == 0:
        said, once = [], 0.0
        for name in ways:
            once = statistics.median(steps[name])
            mean, median = statistics.mean(waits[name]), statistics.median(waits[name])
            said.append(f"{name} waits {mean / once:.2%} of a step (median {median / once:.2%})")
        print(f"{case.name} {layout:14} step {once * 1e3:4.0f} ms: {', '.join(said)}", flush=True)


def main() -> None:
    """Start the ranks of each layout."""
    given = parser(__doc__, models=[MODEL], layouts=list(LAYOUTS), rounds=NUM_ROUNDS, shared=False)
    args = given.parse_args()
    if "RANK" in os.environ:
        ensure_process_group()
        if args.shared:
            measure_sharing(args.layouts[0], args.rounds)
            return
        measure(CASES[args.models[0]], args.layouts[0], args.rounds)
        return
    for model in args.models:
        for layout in args.layouts:
            words = ["--models", model, "--layouts", layout, "--rounds", str(args.rounds)]
            words += ["--shared"] if args.shared else []
            start_ranks(__file__, *words, layout=layout)


if __name__ == "__main__":
    main()
