"""Replicas that agree now and then against one program on the whole batch, for the same number of tokens.

    python -m benchmarks.convergence                       # 4 replicas in one process, examples/gpt.py
    python -m benchmarks.convergence --steps 600 --strategies "average(every=16)" "diloco(every=50)"
    python -m benchmarks.convergence --batch 18 --strategies async    # 3 workers of a parameter server

Each replica trains a model of its own on its rows of the same batches, with an AdamW of its own and the
learning rate of the example; what they exchange is played by `tutti.replicas.virtual`. The validation loss is
that of the mean of the replicas' weights after the last step. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.asynchronous import Asynchronous
from tutti.layout.layout import WITH_SERVERS
from tutti.replicas import parts
from tutti.replicas.mean import mean_of
from tutti.replicas.strategies import parse
from tutti.replicas.strategy import Weights
from tutti.replicas.virtual import Replicas

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
STRATEGIES = ("average(every=1)", "average(every=16)", "diloco(every=50)", "gossip(every=4)")


@dataclass(frozen=True)
class Sizes:
    """Of the run: as in the example, unless said otherwise."""

    steps: int = 600
    batch: int = 16
    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.1
    lr: float = 6e-3
    seed: int = 0
    replicas: int = 4
    workers: int = 3


def example() -> ModuleType:
    """`examples/gpt.py` as a module."""
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trainer:
    """One replica: a model, its optimizer and its learning rates."""

    def __init__(self, gpt: ModuleType, model: torch.nn.Module, sizes: Sizes) -> None:
        self.gpt, self.model = gpt, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), sizes.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda i: min((i + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * i / sizes.steps)),
        )

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """One local step."""
        self.gpt.train_step(self.model, self.optimizer, tokens, targets)
        self.schedule.step()

    def weights(self) -> Weights:
        """Parameters by name."""
        return {n: p.detach() for n, p in self.model.named_parameters()}


def served(gpt: ModuleType, text: Tensor, sizes: Sizes, sync: str) -> torch.nn.Module:
    """The model after a run of workers with a server, in one process: their order is drawn at random."""
    torch.manual_seed(sizes.seed)
    trainer = Trainer(gpt, gpt.GPT(sizes.width, sizes.depth, sizes.heads, sizes.dropout), sizes)
    first = gpt.batch_at(text, 0, sizes.batch, sizes.seed)
    run = Asynchronous(
        gpt.train_step,
        trainer.model,
        trainer.optimizer,
        first,
        sync,
        num_workers=sizes.workers,
        seed=sizes.seed,
    )
    for step in range(sizes.steps):
        run.step(step, gpt.batch_at(text, step, sizes.batch, sizes.seed))
        trainer.schedule.step()
    run.finish()
    mean = sum(t * n for t, n in run.staleness.items()) / run.staleness.total()
    print(f"{sync}: gradients {mean:.1f} updates old on average", file=sys.stderr)
    return trainer.model


def trained(gpt: ModuleType, text: Tensor, sizes: Sizes, sync: str) -> torch.nn.Module:
    """The model after the run; without `sync` that of one program."""
    if sync.startswith(WITH_SERVERS):
        return served(gpt, text, sizes, sync)
    torch.manual_seed(sizes.seed)
    model = gpt.GPT(sizes.width, sizes.depth, sizes.heads, sizes.dropout)
    count = sizes.replicas if sync else 1
    trainers = [Trainer(gpt, copy.deepcopy(model), sizes) for _ in range(count)]
    names = list(trainers[0].weights())
    replicas = Replicas(parse(sync), names, [t.weights() for t in trainers]) if sync else None
    for step in range(sizes.steps):
        batch = list(gpt.batch_at(text, step, sizes.batch, sizes.seed))
        for r, trainer in enumerate(trainers):
            trainer.step(*parts.rows(batch, r, count))
        if replicas is not None:
            changed = replicas.after(step + 1, [t.weights() for t in trainers])
            for trainer, new in zip(trainers, changed, strict=True):
                for name, x in trainer.weights().items():
                    x.copy_(new.get(name, x))
    mean = mean_of([t.weights() for t in trainers])
    with torch.no_grad():
        for name, p in trainers[0].model.named_parameters():
            p.copy_(mean[name])
    return trainers[0].model


def table(sizes: Sizes, strategies: list[str]) -> str:
    """One line a strategy, the whole batch first."""
    gpt = example()
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    lines = ["| sync | validation loss | to one program | rounds |", "| --- | --- | --- | --- |"]
    first = 0.0
    for sync in ("", *strategies):
        began = time.perf_counter()
        model = trained(gpt, train_text, sizes, sync)
        loss = gpt.validation_loss(
            lambda tokens, model=model: gpt.eval_step(model, tokens), valid_text, sizes.batch, 20
        )
        first = first or loss
        rounds = 0
        if sync and not sync.startswith(WITH_SERVERS):
            due = parse(sync)
            rounds = sum(len(due.rounds(k, sizes.replicas)) for k in range(1, sizes.steps + 1))
        name = f"`{sync}`" if sync else "one program, the whole batch"
        lines.append(f"| {name} | {loss:.4f} | {loss / first - 1:+.1%} | {rounds or '-'} |")
        print(f"{name}: {loss:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    args = vars(parser.parse_args())
    strategies = args.pop("strategies")
    print(table(Sizes(**args), strategies))


if __name__ == "__main__":
    main()
