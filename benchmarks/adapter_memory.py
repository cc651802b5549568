"""The memory of ranks that train an adapter on a frozen base, next to the size of the base.

    python -m benchmarks.adapter_memory                          # 403 MB over the ranks of data=4 zero=3
    TUTTI_SHARED_MEMORY=off python -m benchmarks.adapter_memory  # as between hosts

Linear layers of 16 MB each on the meta device, loaded from files, with LoRA of rank 8 and AdamW. Prints the
growth of rank 0's memory over three steps, as a share of the base. A page of several ranks counts by its
share.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import tutti
from benchmarks.command_line import parser
from benchmarks.memory import data_nbytes
from benchmarks.own_ranks import start_ranks
from tutti.launch.ranks import ensure_process_group
from tutti.saving.weight_files import INDEX_FILE

WIDTH, RANK, NUM_ROWS, NUM_STEPS = 2048, 8, 8, 3


class Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.01 * torch.randn(RANK, WIDTH))
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, width) to the same shape."""
        return self.base(x) + x @ self.down.t() @ self.up.t()


def layers(depth: int) -> nn.Sequential:
    """The base."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """A step that updates nothing."""
    with torch.no_grad():
        return model(x).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step of the adapter."""
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_on(base: nn.Sequential) -> tutti.Step:
    """The adapter's step on a base."""
    model = nn.Sequential(*(Lora(x) for x in base if isinstance(x, nn.Linear)))
    trained = [p for p in model.parameters() if p.requires_grad]
    return tutti.distribute(train, model, torch.optim.AdamW(trained, lr=1e-4))


def measure(folder: str, depth: int) -> None:
    """On one rank."""
    ensure_process_group()
    x = torch.linspace(-1, 1, NUM_ROWS * WIDTH).view(NUM_ROWS, WIDTH)
    step_on(layers(1))(x)  # what the interpreter needs to capture and run at all
    before = data_nbytes(os.getpid())
    with torch.device("meta"):
        base = layers(depth)
    tutti.distribute(evaluate, base, None).load(folder)
    step = step_on(base)
    for _ in range(NUM_STEPS):
        step(x)
    grown = data_nbytes(os.getpid()) - before
    share = grown / (4 * WIDTH * WIDTH * depth)
    print(f"{share:.2f} of the base", flush=True)


def main() -> None:
    """Write the base, start the ranks."""
    made = parser(__doc__, layout="data=4 zero=3", depth=24)
    made.add_argument("--folder", help=argparse.SUPPRESS)  # of the base, for the ranks
    args = made.parse_args()
    if args.folder:
        return measure(args.folder, args.depth)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        step = tutti.distribute(evaluate, layers(args.depth), None, "")
        step.save(Path(folder) / INDEX_FILE)
        print(
            f"base of {4 * WIDTH * WIDTH * args.depth / 1e6:.0f} MB, {args.layout}", file=sys.stderr
        )
        words = ["--depth", str(args.depth), "--folder", folder]
        start_ranks(__file__, *words, layout=args.layout)


if __name__ == "__main__":
    main()
