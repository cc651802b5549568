"""How much of a step of tutti is Python: not ATen, not collectives.

There are four numbers. The target is held against `sampled`, or where there is none against `outside`:

`hollow`: the step runs with every call in its generated code answered at once by a Python function that does
nothing, called through one more Python frame as `torch`'s op overloads are. What is left is `Step.__call__`
and the interpreter's work with all it needs in the caches. Python inside of what is called (a random draw, a
collective's bookkeeping) is not counted, nor is torch's parsing of arguments.

`between`: a clock around every call of an op, a collective or a channel in the real step, read from Python;
what it leaves is the interpreter's, as cold as a matmul leaves it, the reading of the clock included.
Parsing of arguments counts as the call.

`outside`: under `torch.profiler`, what no op and no collective covers. It counts all Python, and also the
parsing of arguments and the profiler's own work at each op: the truth lies below.

`sampled`: how often a look at the thread finds it in the interpreter or in PyTorch's reading of arguments,
and not in a collective (`sampler.py`). Nothing is added to an op, so it is no bound but the share itself,
within 0.3 %.

All are shares of the step as it runs undisturbed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any
from unittest import mock

from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contenders.contender import Contender
from benchmarks.contenders.tutti_step import Distributed
from benchmarks.harness import Crew
from benchmarks.sampler import Sampler
from benchmarks.worker import steps
from tutti.comm.collectives.channel import DistributedChannel, SharedChannel
from tutti.execution.execute import Execution
from tutti.execution.loops import Loops, RowEngine
from tutti.graph.players.playing import ADD

NUM_STEPS, NUM_HOLLOW, NUM_BETWEEN, NUM_SAMPLED = 5, 20, 7, 32
WHOLE_STEP = "benchmark: step"


def python_share(crew: Crew) -> dict[str, float]:
    """The shares of a crew's step, of the rank where each is largest; empty unless it runs tutti."""
    found = [x for x in crew.call(measure) if x]
    return {name: max(x[name] for x in found) for name in found[0]} if found else {}


def measure(contender: Contender) -> dict[str, float]:
    """The shares of a contender's step, on every rank at once."""
    if not isinstance(contender, Distributed):
        return {}
    seconds = statistics.median(steps(contender, NUM_STEPS).seconds)
    found = {
        "hollow": hollow_seconds(contender) / seconds,
        "between": between_seconds(contender) / seconds,
        "outside": min(outside_seconds(contender) / seconds, 1.0),
    }
    sampler = Sampler()
    return found | ({"sampled": sampled_share(contender, sampler)} if sampler.works else {})


def hollow_seconds(contender: Distributed) -> float:
    """Median seconds of a step whose calls do nothing."""
    execution = execution_of(contender)
    last: list[Any] = []

    def keep(inputs: list[Any], key: Any) -> Any:
        last[:] = real(inputs, key)
        return last[0], last[1]

    real = execution.generated.function
    with _function(execution, keep):
        contender.step()
    empty = rewritten(execution.generated.function, _hollowed)

    def replay(inputs: list[Any], key: Any) -> Any:
        empty(inputs, key)
        return list(last[0]), list(last[1])  # the state stays what it is

    with _function(execution, replay):
        return statistics.median(steps(contender, NUM_HOLLOW).seconds)


def between_seconds(contender: Distributed) -> float:
    """Median seconds of a step outside of the calls in its generated code, loops and their parts included."""
    execution = execution_of(contender)
    inside = 0.0

    def clocked(x: Any) -> Any:
        if isinstance(x, partial) and isinstance(getattr(x.func, "__self__", None), Loops):
            row, functions = x.args
            return partial(x.func, row, {k: rewritten(f, clocked) for k, f in functions.items()})
        return timed(x) if callable(x) else x

    def timed(x: Callable[..., Any]) -> Callable[..., Any]:

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            began = time.perf_counter()
            result = x(*args, **kwargs)
            inside += time.perf_counter() - began
            return result

        return run

    found = []
    with (
        _function(execution, rewritten(execution.generated.function, clocked)),
        mock.patch.dict(ADD, {op: timed(add) for op, add in ADD.items()}),
        ExitStack() as stack,
    ):
        for channel, name in product((SharedChannel, DistributedChannel), ("send", "recv")):
            stack.enter_context(mock.patch.object(channel, name, timed(getattr(channel, name))))
        for _ in range(NUM_BETWEEN):
            inside, began = 0.0, time.perf_counter()
            contender.step()
            found.append(time.perf_counter() - began - inside)
    return statistics.median(found)


def sampled_share(contender: Distributed, sampler: Sampler) -> float:
    """The share of looks at the running step that find Python's code, outside of collectives."""
    flag = sampler.flag

    def excused(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            flag[0] = 1
            result = function(*args)
            flag[0] = 0
            return result

        return run

    def play() -> None:
        for _ in range(NUM_SAMPLED):
            contender.step()

    with _collectives(contender, excused):
        looks = sampler.run(play)
    return looks.num_python / max(looks.num_looks, 1)


def outside_seconds(contender: Distributed) -> float:
    """Seconds of a step that no profiled op and no collective covers."""
    with (
        _collectives(contender, _recorded),
        _quiet(),
        profile(activities=[ProfilerActivity.CPU]) as seen,
    ):
        for _ in range(NUM_STEPS):
            with record_function(WHOLE_STEP):
                contender.step()
    return uncovered_seconds(seen.events() or ())


def uncovered_seconds(events: Iterable[Any]) -> float:
    """Median over the steps among profiler events of what their direct children leave uncovered."""
    uncovered = [
        e.time_range.elapsed_us() - sum(c.time_range.elapsed_us() for c in e.cpu_children)
        for e in events
        if e.name == WHOLE_STEP
    ]
    return statistics.median(uncovered) / 1e6


def execution_of(contender: Distributed) -> Execution:
    """What the last call ran."""
    last = contender.distributed._last
    assert last is not None, "no step yet"
    assert isinstance(last.execution, Execution)
    return last.execution


def rewritten(function: Any, change: Callable[[Any], Any]) -> Any:
    """A generated function with each constant of it changed."""
    names = {
        name: x if name.startswith("__") or x is function else change(x)
        for name, x in function.__globals__.items()
    }
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


@contextmanager
def _function(execution: Execution, function: Any) -> Iterator[None]:
    generated = execution.generated
    before, generated.function = generated.function, function
    try:
        yield
    finally:
        generated.function = before


@contextmanager
def _collectives(contender: Distributed, change: Callable[[Any], Any]) -> Iterator[None]:
    """With each collective changed; what pipeline ranks send each other is one, waiting included."""
    execution = execution_of(contender)
    generated, player = execution.generated, execution.player
    players = [] if player is None else [player, player.shared_memory or player]

    def changed(x: Any) -> Any:
        return change(x) if any(getattr(x, "__self__", None) is p for p in players) else x

    with (
        _function(execution, rewritten(generated.function, changed)),
        mock.patch.object(RowEngine, "send", change(RowEngine.send)),
        mock.patch.object(RowEngine, "receive", change(RowEngine.receive)),
        mock.patch.object(RowEngine, "_post", change(RowEngine._post)),
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's own lines, which come from below Python, would break up the progress shown."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    # `record_function` would add some 30 us of Python to each.
    mark = _RecordFunctionFast("benchmark: collective")

    def run(*args: Any, **kwargs: Any) -> Any:
        with mark:
            return function(*args, **kwargs)

    return run


class _Nothing:
    """Stands for any value: parts of it, and sums with it, are nothing too."""

    def same(self, *_: Any) -> _Nothing:
        return self

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = same
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = same

    def __getattr__(self, name: str) -> Any:
        """A method in place of an op."""
        return self.same


NOTHING = _Nothing()


def _nothing(*_args: Any, **_kwargs: Any) -> _Nothing:
    return NOTHING


class _Call:
    """Called through a frame of its own, as `torch._ops.OpOverload` is."""

    def __init__(self) -> None:
        self._op = _nothing

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)


def _hollowed(x: Any) -> Any:
    return _Call() if callable(x) else x
