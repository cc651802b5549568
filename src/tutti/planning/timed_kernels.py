"""The kernels of a program timed on this machine, in the program's own order, without its collectives.

A graph runs on random values: an op finds its operands in the caches, or not, as it would in a step. A rank
shares the machine's memory with the others, so `num_ranks` processes run the graph at the same time.
Random numbers are drawn as in a run. Collectives move nothing here: their results are memory that is there
already. Their own time is that of the links (`costs/collective_seconds.py`).

The clock is the processor's: it stops while other work has the processor. A probe is shorter than a turn of
that work and a graph is longer, so on the wall's clock a loaded machine would slow graphs down, but no probe.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from tutti.execution.allocator import keep_freed_memory
from tutti.execution.direct import direct
from tutti.graph.analysis.draws import is_draw
from tutti.graph.analysis.liveness import last_uses
from tutti.graph.ops import collectives
from tutti.graph.ops.expert_rows import for_random_values
from tutti.graph.ops.loop import loop
from tutti.graph.randomness.draw import drawn
from tutti.graph.randomness.random import RandomBlock
from tutti.planning.kernel_times import GraphTimes, KernelTimes
from tutti.planning.speed_probe import SpeedProbe
from tutti.torch_private.pytrees import tree_map

# Repetitions after one to warm up; fewer for long graphs.
_MOST_REPEATS, _LONG_SECONDS = 7, 1.0
_NUMBER = 1e-3  # for a number that only a run knows, such as a learning rate
_MOVES = (*collectives.PLAYED, loop)


@dataclass(frozen=True)
class TimedKernels:
    """Seconds of the kernels of a graph, one graph after the other.

    Args:
        num_ranks: processes that compute at the same time.
        num_threads: of each.
        times: of all graphs so far.
    """

    num_ranks: int
    num_threads: int
    times: KernelTimes = field(default_factory=KernelTimes, compare=False)

    def __call__(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Seconds by node; of a graph that is timed together those of the median run."""
        if (known := self.times.known(_timed(graph))) is not None:
            return known
        found = self._run(graph)
        return self.times.seconds(found)

    def settled(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Seconds by node from all graphs timed so far; a graph with a new kernel is timed."""
        timed = _timed(graph)
        if (found := self.times.of(timed)) is None:
            self._run(graph)
            found = self.times.of(timed)
        assert found is not None
        return found

    def _run(self, graph: fx.Graph) -> GraphTimes:
        keep_freed_memory()  # as in a run: fresh pages would cost more than the ops
        with _threads(self.num_threads), torch.no_grad():
            run, alone = _GraphRun(graph), SpeedProbe(time.thread_time)()
            with _others(self.num_ranks - 1, run):
                found = run.of_median_run(alone)
        self.times.add(found)
        return found


def _timed(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _is_timed(node)]


def _is_timed(node: fx.Node) -> bool:
    return is_draw(node) or (node.op == "call_function" and node.target not in _MOVES)


class _GraphRun:
    """A graph whose ops run one after the other on random values, on a clock."""

    def __init__(self, graph: fx.Graph, now: Callable[[], float] = time.thread_time) -> None:
        self.graph, self.now = graph, now
        dying = last_uses(graph)
        self.steps: list[tuple[fx.Node, Callable[..., Any], tuple[Any, ...], list[fx.Node]]] = []
        self.given: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if is_draw(node):
                self.steps.append((node, _drawing(node), (), []))
            elif _is_timed(node):
                function, *before = direct(node.target)
                gone = [x for x in dying.get(node, ()) if x not in self.given]
                self.steps.append((node, function, tuple(before), gone))
            elif node.op != "output":
                self.given[node] = tree_map(_made, node.meta.get("val"))

    def once(self) -> dict[fx.Node, float]:
        """Run every op; its seconds by node."""
        values, seconds, now = dict(self.given), dict[fx.Node, float](), self.now
        for node, function, before, gone in self.steps:
            args = fx.map_arg(for_random_values(node), values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            begin = now()
            made = function(*before, *args, **kwargs)
            seconds[node] = now() - begin
            values[node] = made
            for x in gone:
                values.pop(x, None)
        return seconds

    def of_median_run(self, alone: float) -> GraphTimes:
        """The median of several runs, each relative to the probe, divided among the ops by their means.

        The sum of the ops' own medians would be less than any run: each run has some slow ops.

        Args:
            alone: seconds of the probe before other processes ran the graph.
        """
        self.once()
        probe = SpeedProbe(self.now)
        probes, runs, totals = [probe()], list[dict[fx.Node, float]](), list[float]()
        until = time.monotonic() + _LONG_SECONDS
        while len(runs) < _MOST_REPEATS and (not runs or time.monotonic() < until):
            runs.append(self.once())
            totals.append(sum(runs[-1].values()))
            probes.append(probe())
        speeds = [(before + after) / 2 for before, after in pairwise(probes)]
        median = statistics.median(a / b for a, b in zip(totals, speeds, strict=True))
        share = median / max(sum(totals), 1e-12)
        relative = {node: share * sum(run[node] for run in runs) for node, *_ in self.steps}
        return GraphTimes(relative, probes, alone)


def _drawing(node: fx.Node) -> Callable[..., Tensor]:
    """The function that draws a tensor of the shape of this rank's part, as generated code does."""
    given: Any = node.args
    kind, _, params, dtype, device = given[:5]
    shape = tuple(node.meta["val"].shape)
    block: Any = RandomBlock.of([torch.arange(n) for n in shape], shape, device)

    def drawing(*_: Any) -> Tensor:
        return drawn(kind, params, dtype, device, 0, block, shape)

    return drawing


def _made(x: Any) -> Any:
    """A value of the same shape: small random numbers; indices 0 and 1."""
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, torch.SymInt):
        return int(x.node.hint or 1)
    if isinstance(x, torch.SymFloat | float):
        return _NUMBER
    return x


def _tensor(x: Tensor) -> Tensor:
    shape = [1 if step == 0 else n for n, step in zip(x.shape, x.stride(), strict=True)]
    made = torch.empty_strided(shape, x.stride(), dtype=x.dtype)
    if x.dtype.is_floating_point:
        made.normal_(0.0, 0.02)
    elif x.dtype is torch.bool:
        made.fill_(True)
    elif not x.dtype.is_complex:
        made.random_(0, 2)
    return made.expand(x.shape) if shape != list(x.shape) else made


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Context with so many threads, and without denormal numbers: random values make many, which are slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


@contextmanager
def _others(count: int, run: _GraphRun) -> Iterator[None]:
    """Context in which `count` other processes run the same graph over and over."""
    children = [child for _ in range(count) if (child := _forked(run))]
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _forked(run: _GraphRun) -> int:
    child = os.fork()
    if child:
        return child
    try:
        while os.getppid() != 1:
            run.once()
    finally:
        os._exit(0)


def seconds_by_op(seconds: Mapping[fx.Node, float]) -> dict[str, float]:
    """Seconds of a graph by the name of the op, the longest first."""
    found: dict[str, float] = {}
    for node, x in seconds.items():
        name = getattr(node.target, "__name__", str(node.target))
        found[name] = found.get(name, 0.0) + x
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
