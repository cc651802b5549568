"""Small steps with every kind of update, and the whole of a split played in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tutti.capture.captured import Captured
from tutti.capture.state.lift import numbers
from tutti.capture.step import capture
from tutti.graph.edits.promote import promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualRanks
from tutti.layout import Mesh
from tutti.server.protocol.update import WEIGHT, ServedVariable
from tutti.server.split.three_parts import Split
from tutti.server.split.updater import GraphUpdater

Clip = Callable[[nn.Module], Any]
State = dict[str, Tensor]
BLOCK = 7


class Model(nn.Module):
    """A classifier of tokens with a norm, running statistics, two biases that have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.up, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.shift = nn.Parameter(torch.zeros(5))
        self.down, self.scale = nn.Linear(8, 5), nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.up(self.table(tokens))))
        return self.down(h * self.scale) + self.shift


class Apart(Model):
    """The same, its samples not coupled by a norm, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens), 0.2)


def step(clip: Clip, model: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor) -> Any:
    loss = F.cross_entropy(model(tokens), targets, ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    norm = clip(model)
    optimizer.step()
    return {"loss": loss, "norm": norm}


def batch(which: int = 0, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of these ignored, unevenly."""
    g = torch.Generator().manual_seed(which)
    tokens = torch.randint(11, (rows,), generator=g)
    targets = torch.randint(5, (rows,), generator=g)
    targets[: rows // 3] = -1
    return tokens, targets


def unclipped(_model: nn.Module) -> None:
    return None


def by_norm(model: nn.Module) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.1)


def by_parts(model: Any) -> tuple[Tensor, Tensor]:
    """Two groups of weights, clipped apart."""
    rest = [p for n, p in model.named_parameters() if not n.startswith("table")]
    return clip_grad_norm_(model.table.parameters(), 0.05), clip_grad_norm_(rest, 0.1)


def by_infinity(model: nn.Module) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))


def by_third_norm(model: nn.Module) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.01, norm_type=3)


def norms(model: nn.Module) -> Tensor:
    """A norm of each gradient, of none of them alone."""
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 0.01)


def skipped(model: nn.Module) -> Tensor:
    """Gradients that are not finite anywhere are left out everywhere."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    good = torch.stack([torch.isfinite(g).all() for g in grads]).all()
    for g in grads:
        g.mul_(good)
    return good


optim = torch.optim
# optimizer, what is done to the gradients first, whether every variable may be cut into blocks
CASES: dict[str, tuple[Callable[..., Any], Clip, bool]] = {
    "adamw": (partial(optim.AdamW, lr=0.1), by_norm, True),
    "adamw_plain": (partial(optim.AdamW, lr=0.1, foreach=True), by_norm, True),
    "adamw_fused": (partial(optim.AdamW, lr=0.1, fused=True, amsgrad=True), by_value, True),
    "adam_by_parts": (partial(optim.Adam, lr=0.1, weight_decay=0.1), by_parts, True),
    "sgd": (partial(optim.SGD, lr=0.1), unclipped, True),
    "sgd_momentum": (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), by_third_norm, True),
    "sgd_norms": (partial(optim.SGD, lr=0.1), norms, True),
    "sgd_infinity": (partial(optim.SGD, lr=0.1, weight_decay=0.1), by_infinity, False),
    "adagrad": (partial(optim.Adagrad, lr=0.1, lr_decay=0.1), by_norm, True),
    "rmsprop": (partial(optim.RMSprop, lr=0.1, momentum=0.5), by_norm, True),
    "nadam": (partial(optim.NAdam, lr=0.1), skipped, True),
    "adamax": (partial(optim.Adamax, lr=0.1), unclipped, True),
    "adafactor": (partial(optim.Adafactor, lr=0.1), by_norm, False),
}  # fmt: skip


def captured(name: str) -> tuple[Captured, dict[str, float]]:
    """A captured case, and its numbers."""
    torch.manual_seed(0)
    make, clip, _ = CASES[name]
    model = Model()
    optimizer = make(model.parameters())
    found = capture(partial(step, clip), model, optimizer, batch())
    return found, numbers(optimizer, batch())


def start(found: Captured) -> State:
    """State as after some steps: no slot is zero."""
    g = torch.Generator().manual_seed(1)
    state = {}
    for s in found.state:
        x = s.tensor.detach().clone()
        if s.kind == "slot":
            x = x + (3 if x.ndim == 0 else torch.rand(x.shape, generator=g))
        state[s.name] = promoted_value(x)
    return state


def run(found: Captured, state: State, feed: dict[str, Any], k: int) -> tuple[list[Any], State]:
    """One step of a captured graph in float64: what it returns and the new state."""
    graph, owner, _ = promoted(found.graph, found.owner)
    feed = feed | {f"batch.{i}": x for i, x in enumerate(batch(k))}
    inputs = [state.get(n, feed.get(n)) for n in found.inputs]
    returned, new = VirtualRanks(Mesh(), step=k).run(graph, owner, [inputs])[0]
    return returned, {**state, **dict(zip(found.updated, new, strict=True))}


def blocks(variable: ServedVariable, x: Tensor) -> list[Tensor]:
    """A tensor of a variable in blocks; a slot of another shape once for each."""
    if not variable.divisible:
        return [x]
    count = -(-torch.Size(variable.shape).numel() // BLOCK)
    if tuple(x.shape) != variable.shape:
        return [x.clone() for _ in range(count)]
    return [part.clone() for part in x.flatten().split(BLOCK)]


def names(found: Captured, variable: str) -> Iterator[tuple[str, str]]:
    """The state of a variable: short name and name."""
    for s in found.state:
        if variable in (s.name, s.owner):
            yield s.slot or WEIGHT, s.name


class Servers:
    """All blocks of all variables, updated as servers would."""

    def __init__(self, split: Split, state: State) -> None:
        self.split, self.updater = split, GraphUpdater(split, wide=True)
        self.blocks: dict[str, list[State]] = {}
        for v in self.updater.variables:
            cut = {short: blocks(v, state[name]) for short, name in names(split.captured, v.name)}
            count = len(cut[WEIGHT])
            self.blocks[v.name] = [{n: xs[i] for n, xs in cut.items()} for i in range(count)]

    def scalars(self, gradients: State, given: dict[str, float]) -> dict[str, float]:
        """Sums of the blocks, put together."""
        sums = {
            v.name: torch.stack(
                [self.updater.sums(v.name, g) for g in blocks(v, gradients[v.name])]
            ).sum(0)
            for v in self.updater.variables
        }
        return dict(self.updater.scalars(sums, given))

    def update(self, gradients: State, scalars: dict[str, float]) -> None:
        for v in self.updater.variables:
            for state, g in zip(self.blocks[v.name], blocks(v, gradients[v.name]), strict=True):
                self.updater.update(v.name, state, g, scalars)

    def state(self) -> State:
        """Every tensor whole again, by its name in the capture."""
        found = {}
        for v in self.updater.variables:
            for short, name in names(self.split.captured, v.name):
                parts = [b[short] for b in self.blocks[v.name]]
                like = v.shape if short == WEIGHT else v.slots[short][0]
                cut = v.divisible and tuple(like) == v.shape
                assert cut or all(torch.equal(parts[0], p) for p in parts)
                found[name] = torch.cat(parts).reshape(like) if cut else parts[0]
        return found


def difference(a: object, b: object) -> float:
    """Relative, of tensors; other values are equal or not."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) if b.numel() else 0.0
