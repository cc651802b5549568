"""The times of kernels over all graphs of a plan: what is one kernel, and how noise of timings cancels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import small_steps
from tests.planning.test_hardware_files import FOUND
from tutti.job import Job
from tutti.layout import Layout
from tutti.planning import hardware_files, timed_kernels
from tutti.planning.kernel_times import GraphTimes, KernelTimes, kernel_of
from tutti.planning.layout_plan import PlanAnswer, answer
from tutti.planning.this_machine import question_here
from tutti.planning.timed_kernels import TimedKernels, _GraphRun


def traced(function: Callable[..., Any], *given: Tensor) -> fx.Graph:
    return make_fx(function)(*given).graph


def ops(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def test_a_kernel_is_an_op_on_tensors_of_one_form() -> None:
    x, y, bf16 = torch.ones(4, 6), torch.ones(6, 4), torch.ones(4, 6, dtype=torch.bfloat16)

    def several(x: Tensor, y: Tensor, bf16: Tensor) -> Any:
        return x.add(2.0), x.add(2.0), x.add(3.0), y.add(2.0), bf16.add(2.0), x.neg()

    one, again, *others = map(kernel_of, ops(traced(several, x, y, bf16)))
    assert one == again
    assert len({one, *others}) == 5
    (transposed,) = map(kernel_of, ops(traced(lambda x: x.add(2.0), y.t())))
    assert transposed not in (one, *others)


def test_the_median_over_graphs_counts() -> None:
    times = KernelTimes()
    a, b = (ops(traced(lambda x: x.neg().neg().abs(), torch.ones(3))) for _ in range(2))
    times.add(GraphTimes(dict(zip(a, [1.0, 3.0, 5.0], strict=True)), [0.5], 0.5))
    times.add(GraphTimes(dict(zip(b, [4.0, 4.0, 6.0], strict=True)), [0.5], 0.5))
    times.add(GraphTimes(dict(zip(b, [90.0, 90.0, 90.0], strict=True)), [0.5], 0.5))
    assert list((times.of(a) or {}).values()) == [2.0, 2.0, 3.0]  # halves of 4, 4 and 6
    assert times.of(ops(traced(lambda x: x.exp(), torch.ones(3)))) is None


def test_a_kernel_of_three_graphs_is_known() -> None:
    times, x = KernelTimes(), torch.ones(3)

    def add(seconds: list[float], function: Callable[..., Any]) -> None:
        graph = traced(function, x)
        times.add(GraphTimes(dict(zip(ops(graph), seconds, strict=True)), [1.0], 1.0))

    common, rare = (ops(traced(f, x)) for f in (lambda x: x.neg().abs(), lambda x: x.neg().exp()))
    for seconds in ([1.0, 2.0], [3.0, 2.0], [9.0, 2.0]):
        assert times.known(common) is None
        add(seconds, lambda x: x.neg().abs())
    assert list((times.known(common) or {}).values()) == [3.0, 2.0]
    assert times.known(rare) is None
    add([1.0], torch.exp)  # in one graph, of which it is a fourth
    assert times.known(rare) is None
    for _ in range(9):  # now it is nearly nothing beside the known ones
        add([100.0, 2.0], lambda x: x.neg().abs())
    assert list((times.known(rare) or {}).values()) == [100.0, 1.0]


def test_a_slower_processor_changes_no_time() -> None:
    graph = traced(lambda x: (x.neg() + 1.0).abs(), torch.ones(3))
    clock, pace = [0.0], [1e-3]

    def now() -> float:
        clock[0] += pace[0]
        return clock[0]

    found = []
    for pace[0] in (1e-3, 3e-3):
        with torch.no_grad():
            found.append(_GraphRun(graph, now).of_median_run(1e-3))
    quick, slow = (list(times.relative.values()) for times in found)
    assert quick == pytest.approx([1.0] * 3) and slow == pytest.approx([1.0] * 3)
    times = KernelTimes()
    times.add(found[0])
    before = times.of(ops(graph)) or {}
    assert list(before.values()) == pytest.approx([1e-3] * 3)


def test_a_known_graph_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, timed = TimedKernels(1, 1), list[fx.Graph]()
    own = _GraphRun.of_median_run
    monkeypatch.setattr(
        _GraphRun, "of_median_run", lambda run, alone: (timed.append(run.graph), own(run, alone))[1]
    )
    one, same, other = (
        traced(f, torch.ones(8)) for f in (torch.neg, torch.neg, lambda x: torch.neg(x).exp())
    )
    first = kernels(one)
    assert list(kernels.settled(same).values()) == list(first.values())
    assert timed == [one]
    assert len(kernels.settled(other)) == 2
    assert timed == [one, other]
    kernels(same), kernels(same)
    assert timed == [one, other, same]  # the third with this kernel; then it is known


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def plan(
    noise: float,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    probes: Iterator[float] | None = None,
) -> PlanAnswer:
    """On a machine whose kernels take a microsecond a value, with noise by graph; `probes`: their seconds
    by graph."""
    chooses = random.Random(seed)

    def times(run: _GraphRun, alone: float) -> GraphTimes:
        factor = 1.0 + chooses.uniform(-noise, noise)
        sizes = {n: n.meta["val"] for n, *_ in run.steps}
        own = {n: factor * 1e-6 * getattr(x, "numel", lambda: 8)() for n, x in sizes.items()}
        probe = next(probes) if probes else 1.0
        return GraphTimes(own, [probe], probe)

    monkeypatch.setattr(_GraphRun, "of_median_run", times)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job.of(small_steps.step, model, optimizer, Layout())
    return answer(job, (torch.ones(16, 8),), question_here(num_ranks=2))


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_choose(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware_files.write(FOUND, tmp_path)
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    monkeypatch.setattr(timed_kernels, "_others", lambda *_: nullcontext())
    exact = plan(0.0, 0, monkeypatch).ranking
    noisy = plan(0.1, seed, monkeypatch).ranking
    best = exact.rows[0].estimate.seconds
    assert exact.row(noisy.rows[0].layout).estimate.seconds <= 1.02 * best


def test_the_processors_speed_does_not_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe takes longer for each graph; links, calls and kernels count alike in every layout."""
    hardware_files.write(replace(FOUND, probe=1e-3), tmp_path)
    monkeypatch.setenv("TUTTI_HARDWARE", str(tmp_path))
    monkeypatch.setattr(timed_kernels, "_others", lambda *_: nullcontext())
    steady = plan(0.0, 0, monkeypatch, probes=repeat(1e-3)).ranking
    probes = (1e-3 + i / 4e3 for i in count())
    slower, seen = plan(0.0, 0, monkeypatch, probes=probes).ranking, list[float]()
    for one, other in zip(steady.rows, slower.rows, strict=True):
        assert one.layout == other.layout
        seen.append(other.estimate.seconds / one.estimate.seconds)
    assert seen == pytest.approx([seen[0]] * len(seen)) and seen[0] > 1.1
