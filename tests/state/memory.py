"""A script of `tutti run`: trains a plain MLP of 70 MB; rank 0 prints what this process holds, in bytes.

Printed as JSON: `before` the model is made, `steady` between two steps, `peak` within one, each the least of
three: on a busy machine one step was seen to hold what two or three gathered layers take, beyond the others.
`share` and `share_before` are data alone, with each page of shared memory divided by how many processes map
it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti

WIDTH, NUM_LAYERS = 1536, 7
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def status(name: str) -> int:
    """An entry of this process's status in bytes: VmRSS is what it holds now, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def share() -> int:
    """The bytes of data that this process holds, and its share of what it holds with others.

    The pages of its own count as a whole, also those that it has had since it was forked.
    """
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("Anonymous:", "Pss_Shmem:"))


def import_everything() -> None:
    """A step of one number: what any step imports is there after it."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    tutti.distribute(train_step, model, optimizer)(torch.ones(2, 1), torch.ones(2, 1))
    gc.collect()


def main() -> None:
    """Two steps to settle, then three measured ones."""
    # What the environment says is read when an interpreter starts, and this one is a copy.
    for option, value in ((M_MMAP_THRESHOLD, 65536), (M_TRIM_THRESHOLD, 128 * 1024)):
        assert ctypes.CDLL(None).mallopt(option, value)
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, WIDTH)
    import_everything()
    before, share_before = status("VmRSS"), share()
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.distribute(train_step, model, optimizer)
    step(x, y)
    step(x, y)
    steady, shares, peaks = list[int](), list[int](), list[int]()
    for _ in range(3):
        gc.collect()
        steady.append(status("VmRSS"))
        shares.append(share())
        Path("/proc/self/clear_refs").write_text("5")  # from here on, a new peak
        step(x, y)
        peaks.append(status("VmHWM"))
    if os.environ["RANK"] == "0":
        nbytes = sum(p.nbytes for p in model.parameters())
        found = {"before": before, "steady": min(steady), "peak": min(peaks), "nbytes": nbytes}
        found |= {"share_before": share_before, "share": min(shares)}
        print(json.dumps(found))


main()
