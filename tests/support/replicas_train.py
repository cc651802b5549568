"""Short runs with replicas, to be compared: on the ranks of a pool, and written out in plain PyTorch."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import runs
import tutti
from captured_once import captured_once
from tutti.replicas.replica_rows import rows
from tutti.replicas.strategies import parse
from tutti.replicas.virtual_replicas import Replicas

State = dict[str, NDArray[Any]]
PLACE = {"0.weight": "tensor, -"}
WAIT_SECONDS = 25.0


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """One step on a mean of squares."""
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def class_step(model: nn.Module, x: Tensor) -> Tensor:
    """An evaluation."""
    return model(x)


def make(kind: str = "adamw", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model in float64, and an optimizer; `norm` has running statistics."""
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(16)] if kind == "norm" else []
    model = nn.Sequential(nn.Linear(8, 16), *norm, nn.GELU(), nn.Linear(16, 4)).double()
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    chance = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 8, generator=chance), torch.randn(8, 4, generator=chance)
    return x.double(), y.double()


def one(step: tutti.Step, k: int) -> float:
    """The loss of step k; steps of models of one kind share a capture."""
    with captured_once("replicas"):
        return step(*batch_at(k)).item()


def run(step: tutti.Step, begin: int, end: int) -> list[float]:
    """The losses of some steps."""
    return [one(step, k) for k in range(begin, end)]


def state_of(step: tutti.Step) -> State:
    """The whole state of this rank's replica."""
    return {n: runs.whole(x).numpy().copy() for n, x in step.state_dict().items()}


def train(layout: str, steps: int, kind: str = "adamw") -> tuple[list[float], State]:
    """On a rank: the losses of its replica, and the state after the run."""
    model, optimizer = make(kind, seed=dist.get_rank())  # rank 0's weights are those that count
    step = tutti.distribute(train_step, model, optimizer, layout, place=PLACE)
    return run(step, 0, steps), state_of(step)


def reference(
    sync: str, count: int, steps: int, kind: str = "adamw"
) -> list[tuple[list[float], State]]:
    """Every replica's losses and model, in plain PyTorch; the strategy is played on whole weights."""
    model, _ = make(kind)
    models = [copy.deepcopy(model) for _ in range(count)]
    optimizers = []
    for one in models:
        made = make(kind)[1]
        options = {k: v for k, v in made.param_groups[0].items() if k in ("lr", "momentum")}
        optimizers.append(type(made)(one.parameters(), **options))
    names = [n for n, _ in model.named_parameters()]
    replicas = Replicas(parse(sync), names, [weights_of(one) for one in models])
    losses: list[list[float]] = [[] for _ in models]
    for k in range(steps):
        for r, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            losses[r].append(train_step(one, optimizer, *rows(list(batch_at(k)), r, count)).item())
        buffers = [statistics_of(one) for one in models]
        changed = replicas.after(k + 1, [weights_of(one) for one in models], buffers)
        for one, new in zip(models, changed, strict=True):
            for name, x in one.state_dict().items():
                x.copy_(new.get(name, x))
    return [
        (mine, {n: x.numpy() for n, x in one.state_dict().items()})
        for mine, one in zip(losses, models, strict=True)
    ]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the floating buffers."""
    return {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}


def save_and_go_on(layout: str, before: int, steps: int, path: str) -> tuple[list[float], State]:
    """A run that saves on its way."""
    step = tutti.distribute(train_step, *make(), layout)
    run(step, 0, before)
    step.save(Path(path))
    return run(step, before, steps), state_of(step)


def resume(layout: str, first: int, steps: int, path: str) -> tuple[int, State, list[float], State]:
    """A run that loads after `first` steps of its own: where it is then, and where it ends."""
    step = tutti.distribute(train_step, *make(), layout)
    run(step, 0, first)
    step.load(Path(path))
    at = step.num_steps
    there = state_of(step)
    return at, there, run(step, at, steps), state_of(step)


def one_replica_is_late(sync: str, steps: int, late_at: int, seen_at: int, path: str) -> list[int]:
    """Replica 1 takes its step `late_at` after replica 0 has taken its step `seen_at`: the steps that it
    knows replica 0 to have taken when it goes on."""
    step = tutti.distribute(train_step, *make(), f"replica=2 sync={sync}")
    note, found = Path(path), []
    for k in range(1, steps + 1):
        if dist.get_rank() == 1 and k == late_at:
            until = time.monotonic() + WAIT_SECONDS
            while not note.exists() and time.monotonic() < until:
                time.sleep(0.01)
            found.append(int(note.read_text()) if note.exists() else -1)
        one(step, k)
        if dist.get_rank() == 0 and k == seen_at:
            note.with_suffix(".draft").write_text(str(k))
            note.with_suffix(".draft").rename(note)
    return found


def evaluate(layout: str) -> tuple[Any, Any, State]:
    """What an evaluation returns for the whole batch after a step that makes replicas differ."""
    model, optimizer = make()
    step = tutti.distribute(train_step, model, optimizer, layout)
    look = tutti.distribute(class_step, model, layout=layout)
    x, y = batch_at(0)
    step(x, y)
    return look(x).tolist(), dist.get_rank(), state_of(step)


def train_by_hand(layout: str, steps: int, kind: str) -> tuple[list[float], State]:
    """Losses and state of steps that update weights by "hand", or of "sgd" at the same rate."""

    def by_sgd(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y)

    def descend(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
        return loss.detach()

    model, _ = make(seed=dist.get_rank())
    optimizer = None if kind == "hand" else torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.distribute(descend if kind == "hand" else by_sgd, model, optimizer, layout)
    losses = [step(*batch_at(k)).item() for k in range(steps)]
    assert step.num_steps == steps
    return losses, {n: x for n, x in state_of(step).items() if not n.startswith("optim")}


def follow(layout: str) -> list[float]:
    """How far the average of this replica is from what its own weights give, in each step.

    The average has no optimizer, and needs no samples.
    """
    model, optimizer = make()
    both = nn.ModuleDict({"now": model, "mean": copy.deepcopy(model).requires_grad_(False)})

    def fit(both: nn.ModuleDict, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return train_step(both["now"], optimizer, x, y)

    def average(both: nn.ModuleDict, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(both["mean"].parameters(), both["now"].parameters(), strict=True):
                old.lerp_(new, 0.5)
        return both["mean"](x)

    step = tutti.distribute(fit, both, optimizer, layout)
    mean = tutti.distribute(average, both, layout=layout)
    expected, found = copy.deepcopy(model), []
    for k in range(3):
        x, y = batch_at(k)
        step(x, y)
        with torch.no_grad():
            for old, new in zip(expected.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
        found.append(float((mean(x) - expected(x)).abs().max()))
    return found


def start_differently(layout: str) -> str:
    """What a rank says when rank 0's state has not been sent."""
    from tutti.state import residence

    model, optimizer = make(seed=dist.get_rank())
    step = tutti.distribute(train_step, model, optimizer, layout)
    kept = residence.dist.broadcast
    residence.dist.broadcast = lambda *args, **named: None  # type: ignore[assignment]
    try:
        step(*batch_at(0))
    except tutti.TuttiError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        residence.dist.broadcast = kept  # type: ignore[assignment]
    return "nothing"


def largest_difference(found: State, expected: State) -> float:
    """Over the tensors of `expected`."""
    assert expected.keys() <= found.keys()
    return max(float(np.abs(found[n] - x).max()) for n, x in expected.items())


def losses_of(layout: str, steps: int) -> list[float]:
    """The losses of a run alone."""
    step = tutti.distribute(train_step, *make(seed=dist.get_rank()), layout)
    return run(step, 0, steps)


def train_with_calls(
    layout: str, steps: int, slow: int
) -> tuple[list[tuple[Any, ...]], list[NDArray[Any]]]:
    """What happened on this rank, (step, event), and its weights after every step; replica `slow` is.

    In the second half it waits for a reply if none has come: all steps may take less time than one.
    """
    step = tutti.distribute(train_step, *make(), layout)
    events: list[tuple[Any, ...]] = []
    one(step, 0)  # before the first round
    assert step.agreeing is not None and step.agreeing.team is not None
    calls, between = step.agreeing.team.calls, step.agreeing.team.between
    calls.note = lambda event: events.append((step.num_steps, *event))
    dist.barrier()
    seen = []
    for k in range(1, steps):
        if dist.get_rank() == slow:
            time.sleep(0.02)
        if k > steps // 2 and calls._out and not any(event[1] == "land" for event in events):
            with between.post.changed:
                between.post.changed.wait_for(lambda: between.may_have_arrived, timeout=60)
        one(step, k)
        seen.append(flat({n: x.detach() for n, x in step.state_dict().items()}, step.model))
    dist.barrier()
    return events, seen


def flat(state: Any, model: nn.Module) -> NDArray[Any]:
    """All parameters in one row."""
    names = [n for n, _ in model.named_parameters()]
    return np.concatenate([runs.whole(state[n]).numpy().reshape(-1) for n in names])


def sent_nbytes(layout: str, first: int, last: int) -> tuple[int, int]:
    """The bytes and the number of letters that this rank sends in the steps after `first` up to `last`."""
    step = tutti.distribute(train_step, *make(), layout)
    run(step, 0, first)
    assert step.agreeing is not None and step.agreeing.team is not None
    post = step.agreeing.team.between.post
    post.flush()
    before = post.nbytes
    sent: list[str] = []
    send = post.send
    post.send = lambda to, topic, *rest: (sent.append(topic), send(to, topic, *rest))[1]  # type: ignore[method-assign]
    run(step, first, last)
    post.flush()
    return post.nbytes - before, len(sent)
