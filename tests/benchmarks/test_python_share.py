"""The three measures of Python's share: what they leave out and what they see."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders.contender import Place
from benchmarks.contenders.tutti_step import Distributed, build
from benchmarks.python_share import (
    NOTHING,
    WHOLE_STEP,
    _hollowed,
    between_seconds,
    execution_of,
    hollow_seconds,
    measure,
    outside_seconds,
    rewritten,
    uncovered_seconds,
)
from tests.benchmarks.tiny import GPT, SLEEPER
from tutti.calls.numbers import Numbers

PAUSE_SECONDS = 0.05


class Count(TorchDispatchMode):
    """How many ops ran."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def contender() -> Distributed:
    made = build(GPT, Place(0, 1), layout="", num_shares=1)
    assert isinstance(made, Distributed)
    made.step()
    return made


def test_hollow_code_runs_no_op(contender: Distributed) -> None:
    generated = execution_of(contender).generated
    inputs: list[Any] = [NOTHING] * 1000
    names = generated.text.split("[", 1)[1].split("]", 1)[0]
    with Count() as count:
        rewritten(generated.function, _hollowed)(inputs[: names.count(",") + 1], None)
    assert count.num_ops == 0
    with Count() as count:
        contender.step()
    graph = execution_of(contender).graph
    assert graph is not None
    ops = [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert count.num_ops >= len(ops) > 75, (count.num_ops, len(ops))


def test_hollow_steps_leave_the_state_and_real_ones_go_on(contender: Distributed) -> None:
    function = execution_of(contender).generated.function
    seconds = hollow_seconds(contender)
    assert seconds > 0 and execution_of(contender).generated.function is function
    model = contender.distributed.model
    before = [p.detach().clone() for p in model.parameters()]
    hollow_seconds(contender)  # one real step, the others hollow
    moved = [p.detach().clone() for p in model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    contender.step()
    assert any(
        not torch.equal(a, b.detach()) for a, b in zip(moved, model.parameters(), strict=True)
    )


def codes(contender: Distributed) -> list[dict[str, Any]]:
    """The constants of the generated functions: of the step, and of the parts of its loops."""
    names: Any = execution_of(contender).generated.function.__globals__
    loops = [x for x in names.values() if isinstance(x, partial)]
    return [names, *(f.__globals__ for x in loops for f in x.args[1].values())]


def make_a_call_slow(contender: Distributed, patch: pytest.MonkeyPatch) -> None:
    found = ((names, n, x) for names in codes(contender) for n, x in names.items())
    names, name, op = next(x for x in found if x[2] in (torch.mm, torch.addmm, torch.add))

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE_SECONDS)
        return op(*args, **kwargs)

    patch.setitem(names, name, slow)


def test_python_between_ops_is_seen(
    contender: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_a_call_slow(contender, monkeypatch)
    assert outside_seconds(contender) >= PAUSE_SECONDS


@pytest.mark.parametrize("layout", ["", "micro=2"])
def test_a_clock_around_each_call_leaves_what_lies_between(
    layout: str, contender: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow call is not Python, also in a part of a loop; a slow reading of the batch is."""
    if layout:
        made = build(GPT, Place(0, 1), layout=layout, num_shares=1)
        assert isinstance(made, Distributed)
        made.step()
        assert len(codes(made)) > 1
        contender = made

    def between() -> float:
        return between_seconds(contender)

    with monkeypatch.context() as patch:
        make_a_call_slow(contender, patch)
        # On a busy machine another process may run for longer than that between two calls.
        assert any(0 < between() < PAUSE_SECONDS for _ in range(5))
    of = Numbers.of
    monkeypatch.setattr(Numbers, "of", lambda *a: (time.sleep(PAUSE_SECONDS), of(*a))[1])
    assert between() >= PAUSE_SECONDS


def test_what_the_direct_children_leave_uncovered() -> None:
    def event(name: str, micros: float, *children: Any) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: micros)
        return SimpleNamespace(name=name, time_range=span, cpu_children=children)

    inner = event("aten::mm", 20)
    steps = [
        event(WHOLE_STEP, 100, event("aten::linear", 30, inner), event("a collective", 40)),
        event(WHOLE_STEP, 90, event("aten::linear", 40, inner)),
        event(WHOLE_STEP, 1000, event("aten::linear", 960)),
    ]
    assert uncovered_seconds([*steps, inner]) == pytest.approx(40e-6)


def test_other_contenders_have_no_share() -> None:
    assert measure(SLEEPER.build(GPT, Place(0, 1))) == {}
