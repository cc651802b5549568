"""Shows that a partitioned step is the same step, and where it is not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tutti.capture.lift import create_slots, numbers, state_of
from tutti.capture.random_ops import OurRandomness, rewinding
from tutti.capture.step import Captured, capture, copied
from tutti.errors import TuttiError
from tutti.graph.promote import promoted, promoted_value
from tutti.graph.virtual import VirtualRanks
from tutti.layout import Layout, Mesh, Sharding, assemble
from tutti.partition.partition import Program, partition
from tutti.propagate.plan import plan
from tutti.runtime.residence import Residence, run_device, settle

# The largest relative difference that rounding explains, in float64 and against the eager step.
PARTITION_TOLERANCE = 1e-9
CAPTURE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
HALF_TOLERANCE = 0.1
# A tensor far smaller than others of its kind is compared on their scale: its own may be all rounding.
FLOOR = 1e-3
# And where all of a kind is rounding (a gradient that is zero in truth), on the scale of the weights.
NOISE = 1e-6
# Likewise within a step: a value this far below the largest of its region.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first value of the step that differs: which, where it was written, and both norms."""

    node: str
    op: str
    source: str
    module: str
    error: float
    norm: float
    expected_norm: float

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return (
            f"%{self.node} = {self.op}{where} at {self.source}: norm {self.norm:.6g}, "
            f"on one device {self.expected_norm:.6g}, relative difference {self.error:.1e}"
        )


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.

    `max_error` is the largest relative difference between the partitioned program and one device in
    float64, `worst` the tensor that has it; `capture_error` that between the captured and the eager
    step in the model's own dtypes, relative to what the steps changed.
    """

    ok: bool
    layout: str
    steps: int
    num_tensors: int
    max_error: float
    worst: str
    capture_error: float
    worst_capture: str
    first_difference: Difference | None = None

    def __str__(self) -> str:
        word = "ok: the same step" if self.ok else "NOT the same step"
        lines = [
            f'verify "{self.layout}": {word} ({self.num_tensors} tensors, {self.steps} steps)',
            f"  partition  {self.max_error:.1e} in float64, largest in {self.worst}"
            if self.max_error
            else "  partition  exact, in float64",
            f"  capture    {self.capture_error:.1e} of what the steps changed, "
            f"largest in {self.worst_capture}"
            if self.capture_error
            else "  capture    exact, in the model's own dtypes",
        ]
        if self.first_difference is not None:
            lines.append(f"  first      {self.first_difference}")
        return "\n".join(lines)

    def __bool__(self) -> bool:
        return self.ok


def compare(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: tuple[Any, ...],
    layout: Layout,
    *,
    place: Mapping[str, str] | None,
    steps: int,
    dtype: torch.dtype,
    seed: int,
) -> Verdict:
    """Both comparisons for one layout."""
    if dtype != torch.float64:
        raise TuttiError(
            f"verify compares in float64, not {dtype}",
            why="a wrong program must differ by far more than rounding does",
            fix="leave dtype out",
        )
    subject = Subject(train_step, model, optimizer, batch, steps=steps, seed=seed)
    return subject.verdict(layout, place)


class Subject:
    """A step to be verified under any number of layouts: captured, and compared with eager, once.

    Model and optimizer are copied; the given ones stay as they are.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        batch: tuple[Any, ...],
        *,
        steps: int = 2,
        seed: int = 0,
    ) -> None:
        self.steps, self.seed = steps, seed
        model, optimizer = copy.deepcopy((model, optimizer))
        create_slots(optimizer)
        settle(model, optimizer, Residence(Layout()), run_device(model), seed)
        self.captured = capture(train_step, model, optimizer, batch)
        self.start = _snapshot(self.captured, model, optimizer)
        self.feed = _feed(self.captured, optimizer, batch)
        self.capture = _Capture(
            self.captured, train_step, model, optimizer, batch, self.start, self.feed, seed
        )
        self.capture.run(steps)

    def program(self, layout: Layout, place: Mapping[str, str] | None = None) -> Program:
        """The partitioned program under `layout`."""
        return partition(plan(copied(self.captured), layout, place))

    def verdict(
        self,
        layout: Layout,
        place: Mapping[str, str] | None = None,
        program: Program | None = None,
    ) -> Verdict:
        """The verdict for `layout`; `program` replaces the partitioned program (to inject faults)."""
        program = program or self.program(layout, place)
        parts = _Partition(self.captured, program, self.start, self.feed, self.seed)
        parts.run(self.steps)
        same = parts.errors.worst <= PARTITION_TOLERANCE
        captured = self.capture.errors
        first = None
        if not same:
            first = _first_difference(program, self.start, self.feed, self.seed, self.steps)
        return Verdict(
            ok=same and captured.worst <= self.capture.tolerance,
            layout=str(layout) or "one device",
            steps=self.steps,
            num_tensors=parts.errors.count,
            max_error=parts.errors.worst,
            worst=parts.errors.name,
            capture_error=captured.worst,
            worst_capture=captured.name,
            first_difference=first,
        )


class _Errors:
    """Keeps the largest difference and its name; NaN on one side only counts as infinite."""

    def __init__(self) -> None:
        self.worst, self.name, self.count = 0.0, "", 0

    def add(self, name: str, difference: Tensor, scale: float) -> None:
        self.count += 1
        error = float(difference) / max(scale, 1e-300) if float(difference) else 0.0
        if not error <= self.worst:
            self.worst, self.name = error if error == error else float("inf"), name


def _snapshot(captured: Captured, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    now = {s.name: s.tensor for s in state_of(model, optimizer)}
    return {s.name: now[s.name].detach().clone() for s in captured.state}


def _feed(captured: Captured, optimizer: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Hyper-parameters and batch by input name."""
    tensors = [x.detach() for x in tree_leaves(batch) if isinstance(x, Tensor)]
    feed: dict[str, Any] = dict(numbers(optimizer, tree_leaves(batch)))
    return feed | {f"batch.{i}": x for i, x in enumerate(tensors)}


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _kind(name: str) -> str:
    """Tensors of one kind have one scale: all parameters and buffers, or all slots of one name."""
    return name.rpartition(".")[2] if name.startswith("optim") else "model"


def _scales(state: Mapping[str, Tensor]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, x in state.items():
        if x.is_floating_point():
            scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _largest(x))
    return scales


class _Partition:
    """The partitioned program on virtual ranks against the captured graph on one, all in float64."""

    def __init__(
        self,
        captured: Captured,
        program: Program,
        start: dict[str, Tensor],
        feed: dict[str, Any],
        seed: int,
    ) -> None:
        self.captured, self.program, self.seed = captured, program, seed
        self.mesh = program.mesh
        self.feed = {n: promoted_value(x) for n, x in feed.items()}
        self.one = {n: promoted_value(x) for n, x in start.items()}
        places = [self.mesh.coordinates(r) for r in range(self.mesh.num_ranks)]
        self.many = [
            {n: program.storage[n].cut(x, self.mesh, p) for n, x in self.one.items()}
            for p in places
        ]
        self.errors = _Errors()

    def run(self, steps: int) -> None:
        dense, dense_owner, _ = promoted(self.captured.graph, self.captured.owner)
        local, local_owner, _ = promoted(self.program.graph, self.captured.owner)
        for k in range(steps):
            out, new = VirtualRanks(Mesh(), seed=self.seed, step=k).run(
                dense, dense_owner, [_inputs(self.captured, self.one, self.feed)]
            )[0]
            ranks = VirtualRanks(self.mesh, seed=self.seed, step=k).run(
                local, local_owner, [_inputs(self.captured, s, self.feed) for s in self.many]
            )
            self._returned(out, [r[0] for r in ranks], k)
            self.one |= dict(zip(self.captured.updated, new, strict=True))
            for state, (_, update) in zip(self.many, ranks, strict=True):
                state |= dict(zip(self.captured.updated, update, strict=True))
            self._state(k)

    def _returned(self, out: list[Any], ranks: list[list[Any]], k: int) -> None:
        for i, x in enumerate(out):
            if not isinstance(x, Tensor):
                continue
            for mine in ranks:
                self.errors.add(
                    f"returned value {i} (step {k})", _largest_difference(mine[i], x), _largest(x)
                )

    def _state(self, k: int) -> None:
        scales = _scales(self.one)
        floor = NOISE * scales.get("model", 0.0)
        for name in self.captured.updated:
            mine = assemble([s[name] for s in self.many], self.program.storage[name], self.mesh)
            x = self.one[name]
            scale = max(_largest(x), FLOOR * scales.get(_kind(name), 0.0), floor)
            self.errors.add(f"{name} (step {k})", _largest_difference(mine, x), scale)


def _largest_difference(a: Tensor, b: Tensor) -> Tensor:
    if not a.numel():
        return torch.tensor(0.0)
    difference = (a.double() - b.double()).abs()
    both = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    return torch.where(both, torch.zeros_like(difference), difference).max()


def _inputs(captured: Captured, state: Mapping[str, Any], feed: Mapping[str, Any]) -> list[Any]:
    return [state[n] if n in state else feed[n] for n in captured.inputs]


class _Capture:
    """The captured graph on one rank against the eager step, in the model's own dtypes."""

    def __init__(
        self,
        captured: Captured,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        batch: tuple[Any, ...],
        start: dict[str, Tensor],
        feed: dict[str, Any],
        seed: int,
    ) -> None:
        self.captured, self.start, self.feed, self.seed = captured, start, feed, seed
        self.train_step, self.model, self.optimizer, self.batch = (
            train_step,
            model,
            optimizer,
            batch,
        )
        self.errors = _Errors()
        self.tolerance = _capture_tolerance(captured.graph)

    def run(self, steps: int) -> None:
        mine = dict(self.start)
        args = (self.model,) if self.optimizer is None else (self.model, self.optimizer)
        for k in range(steps):
            out, new = VirtualRanks(Mesh(), seed=self.seed, step=k).run(
                self.captured.graph, self.captured.owner, [_inputs(self.captured, mine, self.feed)]
            )[0]
            mine |= dict(zip(self.captured.updated, new, strict=True))
            with OurRandomness(self.seed, k) as ours, rewinding(ours):
                eager = tree_leaves(self.train_step(*args, *self.batch))
            for i, (a, b) in enumerate(zip(out, eager, strict=True)):
                if isinstance(b, Tensor):
                    b = b.detach()
                    self.errors.add(
                        f"returned value {i} (step {k})", _largest_difference(a, b), _largest(b)
                    )
        self._changes(mine)

    def _changes(self, mine: dict[str, Tensor]) -> None:
        """Compare what the steps changed, each kind on its own scale."""
        now = _snapshot(self.captured, self.model, self.optimizer)
        eager = {n: now[n].double() - self.start[n].double() for n in self.captured.updated}
        scales = _scales(eager)
        for name, change in eager.items():
            error = _largest_difference(mine[name].double() - self.start[name].double(), change)
            rounding = torch.finfo(now[name].dtype).eps if now[name].is_floating_point() else 0
            scale = max(scales.get(_kind(name), 0.0), rounding * 1e3 * _largest(now[name].double()))
            self.errors.add(name, error, scale)


def _capture_tolerance(graph: fx.Graph) -> float:
    dtypes = {n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    if dtypes & {torch.bfloat16, torch.float16}:
        return HALF_TOLERANCE
    return CAPTURE_TOLERANCE[torch.float32 if torch.float32 in dtypes else torch.float64]


def _first_difference(
    program: Program, start: dict[str, Tensor], feed: dict[str, Any], seed: int, steps: int
) -> Difference | None:
    """Run both node by node and return the first value whose parts do not make up the whole."""
    one = {n: promoted_value(x) for n, x in start.items()}
    wide = {n: promoted_value(x) for n, x in feed.items()}
    mesh, captured = program.mesh, program.captured
    places = [mesh.coordinates(r) for r in range(mesh.num_ranks)]
    many = [{n: program.storage[n].cut(x, mesh, p) for n, x in one.items()} for p in places]
    dense, dense_owner, dense_back = promoted(captured.graph, captured.owner)
    local, local_owner, local_back = promoted(program.graph, captured.owner)
    holds: dict[fx.Node, tuple[fx.Node, Sharding]] = {}
    for value, node, sharding in program.made:
        holds.setdefault(node, (value, sharding))
    for k in itertools.islice(itertools.count(), steps):
        values: dict[fx.Node, Any] = {}
        new = VirtualRanks(Mesh(), seed=seed, step=k).run(
            dense,
            dense_owner,
            [_inputs(captured, one, wide)],
            lambda n, v, seen=values: seen.__setitem__(dense_back[n], v[0]),
        )[0][1]
        finder = _Finder(mesh, values, holds, local_back)
        ranks = VirtualRanks(mesh, seed=seed, step=k).run(
            local, local_owner, [_inputs(captured, s, wide) for s in many], finder.see
        )
        if finder.found is not None:
            return finder.found
        one |= dict(zip(captured.updated, new, strict=True))
        for state, (_, update) in zip(many, ranks, strict=True):
            state |= dict(zip(captured.updated, update, strict=True))
    return None


class _Finder:
    def __init__(
        self,
        mesh: Mesh,
        values: dict[fx.Node, Any],
        holds: dict[fx.Node, tuple[fx.Node, Sharding]],
        back: dict[fx.Node, fx.Node],
    ) -> None:
        self.mesh, self.values, self.holds, self.back = mesh, values, holds, back
        self.found: Difference | None = None
        self.largest: dict[str, float] = {}

    def see(self, node: fx.Node, parts: list[Any]) -> None:
        made = self.back[node]
        if self.found is not None or made not in self.holds or not isinstance(parts[0], Tensor):
            return
        value, sharding = self.holds[made]
        expected: Any = self.values.get(value)
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            return
        got = assemble(parts, sharding, self.mesh)
        same = got.shape == expected.shape
        scale = self._scale(value, expected)
        if same and self._alike(parts, sharding, scale):
            error = float(_largest_difference(got, expected)) / scale
        else:
            error = float("inf")
        if not error <= PARTITION_TOLERANCE:
            source = value.meta.get("forward_source") or value.meta.get("source", "")
            self.found = Difference(
                node=made.name,
                op=str(getattr(made.target, "__name__", made.target)),
                source=source,
                module=value.meta.get("module", ""),
                error=error,
                norm=float(got.norm()),
                expected_norm=float(expected.norm()),
            )

    def _scale(self, value: fx.Node, expected: Tensor) -> float:
        """What an error is relative to; a value far below others of its region may be all rounding."""
        region = value.meta.get("region", "forward")
        size = _largest(expected[expected.isfinite()])
        self.largest[region] = max(size, self.largest.get(region, 1e-12))
        return max(size, ROUNDING * self.largest[region])

    def _alike(self, parts: list[Tensor], sharding: Sharding, scale: float) -> bool:
        """Ranks that should hold the same values do."""
        if sharding.partial:
            return True
        first: dict[tuple[int, ...], Tensor] = {}
        for rank, part in enumerate(parts):
            place = self.mesh.coordinates(rank)
            key = tuple(place[a] for a in sorted(sharding.axes))
            lead = first.setdefault(key, part)
            if float(_largest_difference(part, lead)) > PARTITION_TOLERANCE * scale:
                return False
        return True
