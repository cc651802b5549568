"""The two comparisons behind a verdict: partitioned against captured, captured against eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.calls.eager import eagerly
from tutti.calls.guards import MOST_WAYS, ReadGuard, no_way
from tutti.capture.captured import Captured
from tutti.capture.forms import flattened, returnable
from tutti.capture.handed import arguments_of, rebuilt
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.drawn_numbers import kept
from tutti.capture.python.findings import Findings
from tutti.capture.python.plain_values import is_number
from tutti.capture.python.python_state import PythonState
from tutti.capture.state.found_gradients import found_gradients
from tutti.capture.state.left_modes import hooks_kept
from tutti.capture.state.lift import called_optimizers, numbers, state_of
from tutti.capture.substitutes.sparse import dense
from tutti.errors import TuttiError
from tutti.graph.edits.promote import Promoted, promoted, promoted_value
from tutti.graph.players.virtual_ranks import VirtualPost, VirtualRanks
from tutti.layout import Mesh, Sharding, assemble
from tutti.partition.partition import Program
from tutti.torch_private.pytrees import tree_leaves
from tutti.verification.following import following, plays_again

# The largest relative difference by rounding, in float64 and against the eager step.
PARTITION_TOLERANCE = 1e-9
CAPTURE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
HALF_TOLERANCE = 0.1
# A tensor far smaller than others of its kind is compared on their scale: its own may be all rounding.
FLOOR = 1e-3
# And if all of a kind is rounding (a gradient that is exactly zero), on the scale of the weights.
NOISE = 1e-6
# Likewise within a step: a value this far below the largest of its region.
ROUNDING = 1e-4


class Errors:
    """Keeps the largest difference and its name; NaN on one side only counts as infinite."""

    def __init__(self) -> None:
        self.worst, self.name, self.count = 0.0, "", 0
        self.apart: Errors | None = None  # of a comparison in which each side keeps its own state

    def add(self, name: str, difference: Tensor, scale: float) -> None:
        """Count a tensor, and `see` it."""
        self.count += 1
        self.see(name, difference, scale)

    def take(self, other: Errors) -> None:
        """Keep the largest of another comparison if it is larger."""
        self.see(other.name, torch.tensor(other.worst), 1.0)

    def see(self, name: str, difference: Tensor, scale: float) -> None:
        """Keep the difference if it is the largest."""
        error = float(difference) / max(scale, 1e-300) if float(difference) else 0.0
        if not error <= self.worst:
            self.worst, self.name = error if error == error else float("inf"), name


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `TuttiError` for another dtype of the comparison than float64."""
    if dtype != torch.float64:
        raise TuttiError(
            f"verify compares in float64, not {dtype}",
            why="a wrong program must differ by far more than rounding does",
            fix="leave dtype out",
        )


def snapshot(captured: Captured, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    now = {s.name: s.tensor for s in state_of(model, optimizer)}
    now |= {name: entry.get() for name, entry in captured.outside.items()}
    return {s.name: now[s.name].detach().clone() for s in captured.state}


def on_its_way(
    capture: Callable[[Assumed], Captured],
    model: nn.Module,
    optimizer: Any,
    batch: tuple[Any, ...],
    seed: int,
) -> tuple[Captured, dict[str, Tensor], dict[str, Any]]:
    """A capture with the branches of this batch, by the tensor values that it reads; its state and feed."""
    captured, assumed = capture(Assumed()), Assumed()
    for k in range(MOST_WAYS):
        captured = capture(assumed) if k else captured
        start = snapshot(captured, model, optimizer)
        feed = feed_of(captured, optimizer, batch)
        guard = ReadGuard(captured)
        if not captured.reads:
            return captured, start, feed
        given = [inputs_of(captured, start, feed)]
        out, _ = VirtualRanks(Mesh(), seed=seed).run(captured.graph, captured.owner, given)[0]
        values = guard.values(out)
        if guard.holds(feed, values):
            return captured, start, feed
        assumed = guard.assumed(feed, values)
    raise no_way(captured, assumed.values)


def feed_of(captured: Captured, optimizer: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    """Hyper-parameters and batch by input name."""
    batch = dense(batch)
    tensors = [x.detach() for x in tree_leaves(batch) if isinstance(x, Tensor)]
    python = {n.name: n.value for n in captured.numbers}
    feed: dict[str, Any] = dict(numbers(optimizer, tree_leaves(batch), python))
    feed |= captured.drawn.peeked()
    return feed | {f"batch.{i}": x for i, x in enumerate(tensors)}


def largest(x: Tensor) -> float:
    if x.dtype == torch.bool:
        return float(x.any())
    return float(x.abs().max()) if x.numel() else 0.0


def kind_of(name: str) -> str:
    """Tensors of one kind have one scale: all parameters and buffers, or all slots of one name."""
    return name.rpartition(".")[2] if name.startswith("optim") else "model"


def scales_of(state: Mapping[str, Tensor]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, x in state.items():
        if is_rounded(x):
            scales[kind_of(name)] = max(scales.get(kind_of(name), 0.0), largest(x))
    return scales


@dataclass
class Made:
    """The results of one run in a step. `gradients` are the inputs of updates, by name."""

    returned: Sequence[Any]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by a descriptive name."""
        for i, x in enumerate(self.returned):
            if isinstance(x, Tensor):
                yield f"returned value {i}", x
        for name, x in self.gradients.items():
            yield f"the gradient {name}", x
        yield from self.state.items()


@dataclass(frozen=True)
class Played:
    """The program of virtual ranks: for each pipeline rank a graph, and the state whose new values it
    returns. `mesh` are the ranks of one pipeline rank, `owners` the pipeline ranks that keep each state
    tensor (all, if it is not named)."""

    mesh: Mesh
    graphs: list[fx.Graph]
    updated: list[list[str]]
    owners: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, graph: fx.Graph) -> Played:
        """One graph for all ranks; an axis `micro` counts as ranks."""
        return cls(program.mesh, [graph], [program.captured.updated])

    def keeps(self, pipe_rank: int, name: str) -> bool:
        """Whether a pipeline rank keeps a state tensor."""
        return name not in self.owners or pipe_rank in self.owners[name]


class PartitionComparison:
    """The partitioned program on virtual ranks against the captured graph on one, all in float64.

    `wide` is the captured graph, `promoted`.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        start: dict[str, Tensor],
        feed: dict[str, Any],
        seed: int,
        *,
        played: Played,
        wide: Promoted,
    ) -> None:
        self.captured, self.program, self.seed, self.wide = captured, program, seed, wide
        self.played, self.mesh = played, played.mesh
        self.feed = {n: promoted_value(x) for n, x in feed.items()}
        self.one = {n: promoted_value(x) for n, x in start.items()}
        ranks = [self.mesh.coordinates(r) for r in range(self.mesh.num_ranks)]
        self.many = [
            [
                {
                    n: program.storage[n].cut(x, self.mesh, at).clone()
                    for n, x in self.one.items()
                    if played.keeps(pipe_rank, n)
                }
                for at in ranks
            ]
            for pipe_rank in range(len(played.graphs))
        ]
        self.errors = Errors()
        self._local = [promoted(graph, self.captured.owner)[:2] for graph in self.played.graphs]

    def run(self, steps: int) -> None:
        for k in range(steps):
            self.advance(k)

    def advance(self, k: int) -> None:
        """Take step `k` on both sides, and compare."""
        out, new = VirtualRanks(Mesh(), seed=self.seed, step=k).run(
            *self.wide[:2], [inputs_of(self.captured, self.one, self.feed)]
        )[0]
        self.one |= dict(zip(self.captured.updated, new, strict=True))
        for pipe_rank, ranks in enumerate(self.play(k)):
            for returned, _ in ranks:
                add_returned(self.errors, returned, out, k)
            for state, (returned, update) in zip(self.many[pipe_rank], ranks, strict=True):
                state |= dict(zip(self.played.updated[pipe_rank], update, strict=True))
                state |= following(self.captured, self.feed, returned)[1]
        self.compare_state(k)
        self.feed, others = following(self.captured, self.feed, out)
        self.one |= others

    def play(self, k: int) -> list[list[Any]]:
        """Step `k` of every pipeline rank; several concurrently, as they exchange messages."""
        post, local = VirtualPost(), self._local

        def play(pipe_rank: int) -> list[Any]:
            graph, owner = local[pipe_rank]
            ranks = VirtualRanks(self.mesh, seed=self.seed, step=k, post=post)
            feeds = [inputs_of(self.captured, s, self.feed) for s in self.many[pipe_rank]]
            return ranks.run(graph, owner, feeds)

        if len(local) == 1:
            return [play(0)]
        with ThreadPoolExecutor(len(local)) as pool:
            waiting = [pool.submit(play, pipe_rank) for pipe_rank in range(len(local))]
            wait(waiting, return_when=FIRST_EXCEPTION)
            failed = [one for one in waiting if one.done() and one.exception() is not None]
            if failed:
                post.close()  # no other rank may wait for missing messages
                failed[0].result()
            return [one.result() for one in waiting]

    def compare_state(self, k: int) -> None:
        """Compare the state after step `k`."""
        for pipe_rank, ranks in enumerate(self.many):
            mine = {
                n: self.whole(n, [s[n] for s in ranks], self.program.storage[n], k)
                for n in self.played.updated[pipe_rank]
            }
            add_state(self.errors, mine, self.one, k)

    def whole(self, name: str, parts: list[Tensor], sharding: Sharding, k: int) -> Tensor:
        """The whole tensor from the ranks' parts; replicated parts must agree."""
        found = assemble(parts, sharding, self.mesh)
        scale = largest(found)
        for rank, part in enumerate(parts if not sharding.partial else ()):
            same = sharding.cut(found, self.mesh, self.mesh.coordinates(rank))
            error = largest_difference(part, same)
            self.errors.see(f"{name} on rank {rank} (step {k})", error, scale)
        return found


def add_state(
    errors: Errors, mine: Mapping[str, Tensor], one: Mapping[str, Tensor], k: int
) -> None:
    """Compare whole tensors with those of one device after step `k`, each on its kind's scale."""
    scales = scales_of(one)
    floor = NOISE * scales.get("model", 0.0)
    for name, x in mine.items():
        scale = max(largest(one[name]), FLOOR * scales.get(kind_of(name), 0.0), floor)
        errors.add(f"{name} (step {k})", largest_difference(x, one[name]), scale)


def add_returned(errors: Errors, mine: Sequence[Any], one: Sequence[Any], k: int) -> None:
    """Compare a step's results with those of one device."""
    for i, (a, b) in enumerate(zip(mine, one, strict=True)):
        if isinstance(b, Tensor):
            errors.add(f"returned value {i} (step {k})", largest_difference(a, b), largest(b))


def largest_difference(a: Tensor, b: Tensor) -> Tensor:
    if not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):
        return torch.tensor(0.0)
    return differences(a, b).max()


def is_rounded(x: Tensor) -> bool:
    """Whether `x` holds floating-point or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def widened(x: Tensor) -> Tensor:
    """`x` in float64, or in a complex number of two of these."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def differences(a: Tensor, b: Tensor) -> Tensor:
    """The distance of entries, in float64; NaN equals NaN."""
    difference = (widened(a) - widened(b)).abs()
    both = (a == b) | (a.isnan() & b.isnan()) if is_rounded(a) else a == b
    return torch.where(both, torch.zeros_like(difference), difference)


def inputs_of(captured: Captured, state: Mapping[str, Any], feed: Mapping[str, Any]) -> list[Any]:
    return [state[n] if n in state else feed.get(n) for n in captured.inputs]


class CaptureComparison:
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
        *,
        precision: str,
    ) -> None:
        self.captured, self.start, self.feed, self.seed = captured, start, feed, seed
        self.precision = precision
        self.train_step, self.model, self.optimizer, self.batch = (
            train_step,
            model,
            optimizer,
            batch,
        )
        self.errors = Errors()
        self.steps = 0  # number of compared steps
        self.is_alike = True  # results have the same shapes and dtypes
        self.tolerance = capture_tolerance(captured.graph)
        self.eager: list[Made] = []  # for a closer comparison
        self.feeds: list[dict[str, Any]] = []  # of each step

    def run(self, steps: int) -> None:
        """Take `steps` steps on both sides, or fewer if a later step is another program."""
        trained = self.train_step, self.model, called_optimizers(self.optimizer)
        python = PythonState(*trained, Findings(), arguments_of(self.batch))
        outside = {name: entry.get() for name, entry in self.captured.outside.items()}
        generators = self.captured.drawn.generators().values()
        with python.restored(), hooks_kept(self.model), kept(generators):
            try:
                self._run(steps)
            finally:
                with torch.no_grad():
                    for name, x in outside.items():
                        x.copy_(self.start[name])

    def _run(self, steps: int) -> None:
        mine, feed, guard = dict(self.start), self.feed, ReadGuard(self.captured)
        for k in range(steps):
            self.feeds.append(feed)
            out, new = VirtualRanks(Mesh(), seed=self.seed, step=k).run(
                self.captured.graph,
                self.captured.owner,
                [inputs_of(self.captured, mine, feed)],
            )[0]
            if not guard.holds(feed, guard.values(out)):
                break  # this step is another program
            out = out[: self.captured.num_results]
            mine |= dict(zip(self.captured.updated, new, strict=True))
            feed, others = following(self.captured, feed, out)
            mine |= others
            with found_gradients(self.model) as found:
                given = self.train_step, self.model, self.optimizer, rebuilt(self.batch)
                result = eagerly(*given, seed=self.seed, step=k, precision=self.precision)
                eager, _ = flattened(returnable(result))
            eager += [x for e in self.captured.effects for x in e.results_now()]
            results = [x.detach().clone() if isinstance(x, Tensor) else x for x in eager]
            now = snapshot(self.captured, self.model, self.optimizer)
            self.eager.append(Made(results, found, {n: now[n] for n in self.captured.updated}))
            for i, (a, b) in enumerate(zip(out, eager, strict=True)):
                self._add_returned(i, k, a, b)
            self.steps = k + 1
            feed = {**feed, **self.captured.drawn.peeked()}
            if not plays_again(self.captured, feed):
                break
        self._changes(mine)

    def _add_returned(self, i: int, k: int, a: Any, b: Any) -> None:
        if i >= self.captured.num_returned and is_number(b):
            a, b = torch.tensor(float(a)), torch.tensor(float(b))
        if isinstance(b, Tensor):
            b = b.detach()
            alike = (a.dtype, a.shape) == (b.dtype, b.shape)
            self.is_alike &= alike
            difference = largest_difference(a, b) if alike else torch.tensor(math.inf)
            self.errors.add(f"{self._named(i)} (step {k})", difference, largest(b))

    def _named(self, i: int) -> str:
        if i < self.captured.num_returned:
            return f"returned value {i}"
        leaves = [e.entries[0].name for e in self.captured.effects for _ in range(e.num_leaves)]
        return leaves[i - self.captured.num_returned]

    def _changes(self, mine: dict[str, Tensor]) -> None:
        """Compare the steps' changes, each kind on its own scale."""
        now = snapshot(self.captured, self.model, self.optimizer)
        eager = {n: widened(now[n]) - widened(self.start[n]) for n in self.captured.updated}
        scales = scales_of(eager)
        for name, change in eager.items():
            error = largest_difference(widened(mine[name]) - widened(self.start[name]), change)
            rounding = torch.finfo(now[name].dtype).eps if is_rounded(now[name]) else 0
            scale = max(
                scales.get(kind_of(name), 0.0), rounding * 1e3 * largest(widened(now[name]))
            )
            self.errors.add(name, error, scale)


def capture_tolerance(graph: fx.Graph) -> float:
    dtypes = {n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    if dtypes & {torch.bfloat16, torch.float16}:
        return HALF_TOLERANCE
    return CAPTURE_TOLERANCE[torch.float32 if torch.float32 in dtypes else torch.float64]
