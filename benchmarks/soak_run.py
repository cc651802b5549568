"""A run of many steps with many lengths, saves and evaluations: what it holds must not grow.

    python -m benchmarks.soak_run                          # 5,000 steps of 60 lengths on two ranks
    python -m benchmarks.soak_run --steps 1000 --layouts "data=2 zero=3" "tensor=2"

Sentences of 60 lengths, by workers of a loader; a save in the background every 50 steps, an evaluation every
25. Prints what each rank holds as it goes on: resident memory, descriptors, threads, shared memory, programs.
Ends with exit code 1 if, after the first third, any of them grows by more than its allowance.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from benchmarks.command_line import parser
from benchmarks.own_ranks import start_ranks

LAYOUTS, STEPS = ("data=2 zero=3",), 5000
NUM_LENGTHS, SHORTEST, VOCAB, WIDTH, BATCH = 60, 5, 256, 512, 8
# What a run may hold more in its last third than in the second; an open save has a descriptor or two.
ALLOWED_MIB, ALLOWED_DESCRIPTORS = 12.0, 2


@dataclass(frozen=True)
class Held:
    """What a process and its children hold.

    private_mib: resident memory of this process that no other has.  shared_mib: the rest of it, and files in
    memory.  descriptors, threads, children: counts.
    """

    private_mib: float
    shared_mib: float
    descriptors: int
    threads: int
    children: int


def held() -> Held:
    """Of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    shared = kib["Shared_Clean"] + kib["Shared_Dirty"] + kib.get("Pss_Shmem", 0)
    tasks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Held(
        private / 1024,
        shared / 1024,
        len(os.listdir("/proc/self/fd")),
        threading.active_count() + len(os.listdir("/proc/self/task")),
        len(tasks),
    )


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Bytes of a file that every installation has, cut into sentences of `NUM_LENGTHS` lengths."""

    def __init__(self, count: int) -> None:
        self.text = Path(torch.__file__).read_bytes()
        self.lengths = [SHORTEST + k * 37 % NUM_LENGTHS for k in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, k: int) -> Tensor:
        begin = k * 211 % (len(self.text) - 200)
        return torch.tensor(list(self.text[begin : begin + self.lengths[k]]))


def padded(samples: list[Tensor], length: int) -> Tensor:
    """Sentences of one length, as the buckets make them."""
    return torch.stack([F.pad(x, (0, length - len(x))) for x in samples])


class Model(nn.Module):
    """The next byte from the mean of those before; its state is large enough for background saves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Dropout(0.1)
        self.up, self.mid = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(self.drop(F.gelu(self.mid(F.gelu(self.up(x))))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One step."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def evaluate(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss without dropout."""
    with torch.no_grad():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(folder: Path, num_steps: int) -> bool:
    """On a rank: whether it holds no more at the end than after the first third."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = tutti.distribute(train_step, model, optimizer)
    score = tutti.distribute(evaluate, model, None)
    data = Sentences(60_000)
    loader = tutti.loader(
        data,
        BATCH,
        shuffle=True,
        num_workers=1,
        collate_fn=padded,
        bucket_by_length=[*range(SHORTEST, SHORTEST + NUM_LENGTHS)],
        length=data.lengths,
    )
    found: list[Held] = []
    with tutti.Checkpoints(folder, every=50, step=step, loader=loader, asynchronous=True) as run:
        while step.num_steps < num_steps:
            for tokens in loader:
                loss = step(tokens)
                if step.num_steps % 25 == 0:
                    model.eval()
                    loss = score(tokens)
                    model.train()
                run.tick(loss=loss)
                if step.num_steps % max(1, num_steps // 30) == 0:
                    found.append(held())
                    if not dist.is_initialized() or dist.get_rank() == 0:
                        said = ", ".join(f"{n} {x:.0f}" for n, x in vars(found[-1]).items())
                        print(f"step {step.num_steps}: loss {loss.item():.3f}, {said}", flush=True)
                if step.num_steps >= num_steps:
                    break
    third = len(found) // 3
    early, late = found[third : 2 * third], found[2 * third :]
    names = [f.name for f in fields(Held)]
    grown = [
        max(getattr(x, name) for x in late) - max(getattr(x, name) for x in early) for name in names
    ]
    limits = (ALLOWED_MIB, ALLOWED_MIB, ALLOWED_DESCRIPTORS, 0, 0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    said = ", ".join(f"{n} {x:.1f}" for n, x in zip(names, grown, strict=True))
    print(f"rank {rank} has grown by: {said}", file=sys.stderr if rank else sys.stdout, flush=True)
    return all(x <= limit for x, limit in zip(grown, limits, strict=True))


def main() -> None:
    """Start the ranks of each layout."""
    args = parser(__doc__, layouts=list(LAYOUTS), steps=STEPS, out=None).parse_args()
    if "RANK" in os.environ:
        sys.exit(not train(args.out, args.steps))
    for layout in args.layouts:
        print(layout, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            words = ["--steps", str(args.steps), "--out", f"{folder}/run"]
            start_ranks(__file__, *words, layout=layout)


if __name__ == "__main__":
    main()
