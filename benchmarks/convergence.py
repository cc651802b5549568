"""Replicas that agree now and then, and workers of servers, against one program on the same tokens.

    python -m benchmarks.convergence                            # 4 replicas, then 3 workers, in one process
    python -m benchmarks.convergence --lrs 4e-3 8e-3 1.6e-2     # tune the learning rate of each

The model and the text of `examples/gpt.py`. Each replica trains a model of its own on its rows of the same
batches, with an AdamW of its own; `virtual_replicas.py` plays what they exchange, and the loss is that of the
mean of their weights. Workers push gradients of their rows of the same batches to servers, which
`virtual_servers.py` plays; the loss is that of the servers' weights. Each is compared with one
program on batches as large as theirs together. Writes a table, a plot, and every run to
`benchmarks/results`; runs that are there already are not repeated: give another --out to make them all.
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
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.asynchronous import Asynchronous
from benchmarks.command_line import parser
from tutti.layout.layout import WITH_SERVERS
from tutti.replicas import replica_rows
from tutti.replicas.mean import mean_of
from tutti.replicas.strategies import parse
from tutti.replicas.strategy import Weights
from tutti.replicas.virtual_replicas import Replicas
from tutti.server.protocol import consistency

WINDOW = 128  # of the example
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
OUT = Path(__file__).parent / "results" / "convergence"
# Each with the learning rate that was best for it of those tried (docs/concepts/replicas.md, server.md).
OF_REPLICAS = {
    "": 8e-3,
    "average(every=16, after=300)": 1.6e-2,
    "diloco(every=50, after=300)": 1.6e-2,
}
OF_WORKERS = {"": 8e-3, "async(predict)": 4e-3, "async": 1e-3}
LOOK = 100  # steps between two validation losses


@dataclass(frozen=True)
class Run:
    """One run: `sync` is "" for one program on the whole batch; `batch` is each replica's or worker's."""

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

    @property
    def by_servers(self) -> bool:
        """Whether replicas are workers of servers."""
        return self.sync.partition("(")[0] in WITH_SERVERS

    @property
    def updates(self) -> int:
        """How many updates are made of a batch."""
        return self.replicas if self.by_servers and consistency.parse(self.sync).apart else 1

    def rate(self, step: int) -> float:
        """Of the learning rate: a linear warm-up, and half a cosine down to `end`."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1)))
        return min((step + 1) / self.warm_up, 1) * (self.end + (1 - self.end) * cosine)

    def optimizer(self, model: torch.nn.Module) -> tuple[AdamW, LambdaLR]:
        """AdamW, its momenta as long in batches whatever the updates of a batch, and its learning rates."""
        betas = (0.9 ** (1 / self.updates), 0.95 ** (1 / self.updates))
        adamw = AdamW(model.parameters(), self.lr, betas=betas, weight_decay=0.1)
        return adamw, LambdaLR(adamw, self.rate)


@dataclass(frozen=True)
class Outcome:
    """The validation loss after every `LOOK` steps; how many updates old gradients were on average."""

    losses: list[float]
    age: float = 0.0


def example() -> ModuleType:
    """`examples/gpt.py` as a module."""
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch_at(text: Tensor, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows at random places of the text, a function of seed and step, and those a byte later."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = torch.randint(len(text) - WINDOW, (size, 1), generator=generator)
    window = text[start + torch.arange(WINDOW + 1)]
    return window[:, :-1], window[:, 1:]


class Replicated:
    """Replicas, each a model with its optimizer; one program where `sync` is ""."""

    def __init__(self, gpt: ModuleType, model: torch.nn.Module, run: Run) -> None:
        self.gpt = gpt
        count = run.replicas if run.sync else 1
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.made = [run.optimizer(one) for one in self.models]
        due, own = parse(run.sync) if run.sync else None, self._each()
        self.agreeing = Replicas(due, list(own[0]), own) if due else None

    def step(self, k: int, batch: list[Tensor]) -> None:
        """Each takes its rows; then they agree, where that is due."""
        for r, (model, (optimizer, schedule)) in enumerate(
            zip(self.models, self.made, strict=True)
        ):
            self.gpt.train_step(model, optimizer, *replica_rows.rows(batch, r, len(self.models)))
            schedule.step()
        if self.agreeing is not None:
            changed = self.agreeing.after(k + 1, self._each())
            for own, new in zip(self._each(), changed, strict=True):
                for name, x in own.items():
                    x.copy_(new.get(name, x))

    def weights(self) -> Weights:
        """Their mean."""
        return mean_of(self._each())

    def end(self) -> float:
        """No gradient was old."""
        return 0.0

    def _each(self) -> list[Weights]:
        return [{n: p.detach() for n, p in one.named_parameters()} for one in self.models]


class Served:
    """Workers and servers."""

    def __init__(self, gpt: ModuleType, model: torch.nn.Module, run: Run) -> None:
        optimizer, self.schedule = run.optimizer(model)
        like = batch_at(torch.zeros(1000).long(), 0, run.batch * run.replicas, run.seed)
        self.run = Asynchronous(
            gpt.train_step,
            model,
            optimizer,
            like,
            run.sync,
            num_workers=run.replicas,
            seed=run.seed,
        )
        self.weights = self.run.weights

    def step(self, k: int, batch: list[Tensor]) -> None:
        """Give each worker its rows; they may be two batches behind."""
        self.run.step(k, batch)
        self.schedule.step()

    def end(self) -> float:
        """Let all workers end; how old gradients were."""
        self.run.finish()
        ages = self.run.staleness
        return sum(age * n for age, n in ages.items()) / max(1, ages.total())


def outcome(gpt: ModuleType, run: Run) -> Outcome:
    """Train, and look at the validation loss now and then."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    train_text, valid_text = text.tensor_split([len(text) * 9 // 10])
    torch.manual_seed(run.seed)
    model = gpt.GPT(run.width, run.depth, run.heads, 0.0)
    trained = (Served if run.by_servers else Replicated)(gpt, copy.deepcopy(model), run)
    found, age = [], 0.0
    for step in range(run.steps):
        trained.step(step, list(batch_at(train_text, step, run.batch * run.replicas, run.seed)))
        age = trained.end() if step + 1 == run.steps else age
        if (step + 1) % LOOK == 0:
            found.append(_validation(gpt, model, trained.weights(), valid_text))
    return Outcome(found, round(age, 2))


def _validation(gpt: ModuleType, model: torch.nn.Module, weights: Weights, text: Tensor) -> float:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return gpt.mean_loss(lambda tokens: gpt.eval_step(model, tokens), text, 16, 20)


class Results:
    """The runs made so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def of(self, gpt: ModuleType, run: Run) -> Outcome:
        """What became of a run, made now unless it is there."""
        for row in self.rows:
            if row["run"] == asdict(run):
                return Outcome(row["losses"], row["age"])
        began = time.process_time()
        found = outcome(gpt, run)
        seconds = round(time.process_time() - began)
        self.rows.append({"run": asdict(run), **asdict(found), "processor_seconds": seconds})
        self.path.write_text(json.dumps(self.rows) + "\n")
        print(f"{_name(run)}, lr {run.lr}: {found.losses[-1]:.4f}, {seconds} s", file=sys.stderr)
        return found


Best = list[tuple[Run, Outcome]]


def _name(run: Run) -> str:
    return run.sync or f"one program, batches of {run.batch * run.replicas}"


def table(best: Best) -> str:
    """A line for each, after the one program that it is compared with."""
    lines = [
        "| sync | who | lr | validation loss | to one program | rounds | age of gradients |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    alone = {run.replicas: found.losses[-1] for run, found in best if not run.sync}
    for run, found in best:
        who, rounds, age = f"{run.replicas} replicas of {run.batch}", "-", "-"
        if run.by_servers:
            who, age = f"{run.replicas} workers of {run.batch}", f"{found.age:.1f} updates"
        elif run.sync:
            due = parse(run.sync)
            rounds = sum(len(due.rounds(k, run.replicas)) for k in range(1, run.steps + 1))
        else:
            who = f"one program, batches of {run.batch * run.replicas}"
        name = f"`{run.sync}`" if run.sync else "-"
        ratio = f"{found.losses[-1] / alone[run.replicas] - 1:+.1%}" if run.sync else "-"
        loss = f"{found.losses[-1]:.4f}"
        lines.append(f"| {name} | {who} | {run.lr:g} | {loss} | {ratio} | {rounds} | {age} |")
    return "\n".join(lines)


def draw(path: Path, best: Best) -> None:
    """The validation losses over tokens."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, found in best:
        step_tokens = run.batch * run.replicas * 128 / 1e6
        tokens = [LOOK * (i + 1) * step_tokens for i in range(len(found.losses))]
        many = f"{run.replicas} {'workers' if run.by_servers else 'replicas'}: " if run.sync else ""
        axes.plot(tokens, found.losses, "o-", markersize=3, label=many + _name(run))
    axes.set(xlabel="million tokens", ylabel="validation loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def options() -> argparse.Namespace:
    """Of the command line."""
    sizes = {n: x for n, x in asdict(Run()).items() if n not in ("sync", "lr")} | {"workers": 3}
    every = [s for s in (*OF_REPLICAS, *OF_WORKERS) if s]
    # `--out` is without a suffix: a table, a plot and every run have it in common.
    return parser(__doc__, **sizes, strategies=every, lrs=(), out=OUT).parse_args()


def main() -> None:
    """Make what runs are missing; write the table and the plot."""
    args = vars(options())
    chosen, lrs, out = args.pop("strategies"), args.pop("lrs"), args.pop("out")
    workers, like = args.pop("workers"), Run(**args)
    torch.set_num_threads(1)
    gpt, results = example(), Results(out.with_suffix(".json"))
    every = [replace(like, sync=s, lr=(OF_REPLICAS | OF_WORKERS).get(s, like.lr)) for s in chosen]
    groups = {
        like.replicas: [one for one in every if not one.by_servers],
        workers: [replace(one, replicas=workers) for one in every if one.by_servers],
    }
    best: Best = []
    for count, own in groups.items():
        for run in [replace(like, replicas=count), *own] if own else []:
            tried = [replace(run, lr=lr) for lr in lrs] if lrs else [run]
            each = [(one, results.of(gpt, one)) for one in tried]
            best.append(min(each, key=lambda pair: pair[1].losses[-1]))
    text = table(best)
    out.with_suffix(".md").write_text(text + "\n")
    draw(out.with_suffix(".png"), best)
    print(text)


if __name__ == "__main__":
    main()
