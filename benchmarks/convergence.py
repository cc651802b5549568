"""Replicas that agree now and then against one program on the whole batch, for the same number of tokens.

    python -m benchmarks.convergence                            # 4 replicas in one process
    python -m benchmarks.convergence --lrs 4e-3 8e-3 1.6e-2     # tune the learning rate of each

The model and the text of `examples/gpt.py`. Each replica trains a model of its own on its rows of the same
batches, with an AdamW of its own; what they exchange is played by `tutti.replicas.virtual`. The validation
loss is that of the mean of their weights. Writes a table, a plot, and every run to `benchmarks/results`; runs
that are there already are not repeated: give another --out to make them all.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from tutti.replicas import parts
from tutti.replicas.mean import mean_of
from tutti.replicas.strategies import parse
from tutti.replicas.strategy import Weights
from tutti.replicas.virtual import Replicas

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
OUT = Path(__file__).parent / "results" / "convergence"
# Each with the learning rate that was best for it of 4e-3, 8e-3 and 1.6e-2.
TUNED = {"": 8e-3, "average(every=16, after=300)": 1.6e-2, "diloco(every=50, after=300)": 1.6e-2}
LOOK = 100  # steps between two validation losses


@dataclass(frozen=True)
class Run:
    """One run: `sync` is "" for one program on the whole batch; `batch` is each replica's."""

    sync: str = ""
    lr: float = 8e-3
    steps: int = 1000
    batch: int = 16
    width: int = 64
    depth: int = 2
    heads: int = 2
    warm_up: int = 50
    end: float = 0.1
    seed: int = 0
    replicas: int = 4

    def rate(self, step: int) -> float:
        """Of the learning rate: a linear warm-up, and half a cosine down to `end`."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1)))
        return min((step + 1) / self.warm_up, 1) * (self.end + (1 - self.end) * cosine)


def example() -> ModuleType:
    """`examples/gpt.py` as a module."""
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trainer:
    """One replica: a model, its optimizer and its learning rates."""

    def __init__(self, gpt: ModuleType, model: torch.nn.Module, run: Run) -> None:
        self.gpt, self.model = gpt, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), run.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, run.rate)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """One local step."""
        self.gpt.train_step(self.model, self.optimizer, tokens, targets)
        self.schedule.step()

    def weights(self) -> Weights:
        """Parameters by name."""
        return {n: p.detach() for n, p in self.model.named_parameters()}


def losses(gpt: ModuleType, run: Run) -> list[float]:
    """The validation loss after every `LOOK` steps."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    torch.manual_seed(run.seed)
    model = gpt.GPT(run.width, run.depth, run.heads, 0.0)
    count = run.replicas if run.sync else 1
    trainers = [Trainer(gpt, copy.deepcopy(model), run) for _ in range(count)]
    names = list(trainers[0].weights())
    replicas = (
        Replicas(parse(run.sync), names, [t.weights() for t in trainers]) if run.sync else None
    )
    found = []
    for step in range(run.steps):
        batch = list(gpt.batch_at(train_text, step, run.batch * run.replicas, run.seed))
        for r, trainer in enumerate(trainers):
            trainer.step(*parts.rows(batch, r, count))
        if replicas is not None:
            changed = replicas.after(step + 1, [t.weights() for t in trainers])
            for trainer, new in zip(trainers, changed, strict=True):
                for name, x in trainer.weights().items():
                    x.copy_(new.get(name, x))
        if (step + 1) % LOOK == 0:
            found.append(_validation(gpt, copy.deepcopy(model), trainers, valid_text))
    return found


def _validation(
    gpt: ModuleType, model: torch.nn.Module, trainers: list[Trainer], text: Tensor
) -> float:
    mean = mean_of([t.weights() for t in trainers])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(mean[name])
    return gpt.validation_loss(lambda tokens: gpt.eval_step(model, tokens), text, 16, 20)


class Results:
    """The runs made so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def of(self, gpt: ModuleType, run: Run) -> list[float]:
        """The losses of a run, made now unless they are there."""
        for row in self.rows:
            if row["run"] == asdict(run):
                return row["losses"]
        began = time.process_time()
        found = losses(gpt, run)
        seconds = round(time.process_time() - began)
        self.rows.append({"run": asdict(run), "losses": found, "processor_seconds": seconds})
        self.path.write_text(json.dumps(self.rows) + "\n")
        print(f"{run.sync or 'one program'}, lr {run.lr}: {found[-1]:.4f}", file=sys.stderr)
        return found


def table(best: dict[str, tuple[Run, list[float]]]) -> str:
    """One line a strategy, the whole batch first."""
    first = best[""][1][-1]
    lines = [
        "| sync | lr | validation loss | to one program | rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for sync, (run, found) in best.items():
        due = parse(sync) if sync else None
        rounds = (
            sum(len(due.rounds(k, run.replicas)) for k in range(1, run.steps + 1)) if due else "-"
        )
        name = f"`{sync}`" if sync else "one program, the whole batch"
        ratio = f"{found[-1] / first - 1:+.1%}" if sync else "-"
        lines.append(f"| {name} | {run.lr:g} | {found[-1]:.4f} | {ratio} | {rounds} |")
    return "\n".join(lines)


def draw(path: Path, best: dict[str, tuple[Run, list[float]]]) -> None:
    """The validation losses over tokens."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for sync, (run, found) in best.items():
        step_tokens = run.batch * run.replicas * 128 / 1e6
        tokens = [LOOK * (i + 1) * step_tokens for i in range(len(found))]
        axes.plot(tokens, found, "o-", markersize=3, label=sync or "one program, the whole batch")
    axes.set(xlabel="million tokens", ylabel="validation loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Make what runs are missing; write the table and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in asdict(Run()).items():
        if name not in ("sync", "lr"):
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=type(default),
                default=default,
                help=f"({default})",
            )
    parser.add_argument("--strategies", nargs="+", default=[s for s in TUNED if s])
    parser.add_argument("--lrs", nargs="+", type=float, help="try each; by default what was best")
    parser.add_argument("--out", type=Path, default=OUT, help=f"without suffix ({OUT})")
    args = vars(parser.parse_args())
    strategies, lrs, out = args.pop("strategies"), args.pop("lrs"), args.pop("out")
    torch.set_num_threads(1)
    gpt, results = example(), Results(out.with_suffix(".json"))
    best: dict[str, tuple[Run, list[float]]] = {}
    for sync in ("", *strategies):
        run = Run(sync=sync, lr=TUNED.get(sync, TUNED[""]), **args)
        tried = [replace(run, lr=lr) for lr in lrs] if lrs else [run]
        each = [(one, results.of(gpt, one)) for one in tried]
        best[sync] = min(each, key=lambda pair: pair[1][-1])
    text = table(best)
    out.with_suffix(".md").write_text(text + "\n")
    draw(out.with_suffix(".png"), best)
    print(text)


if __name__ == "__main__":
    main()
