"""`verify` of replicas: every strategy, layouts inside a replica, what is data parallelism, and faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import replicas_train as training
import tutti
from tutti.job import Job
from tutti.layout import Layout
from tutti.replicas.member import ReplicaMember
from tutti.replicas.strategies import parse
from tutti.verification.verdict import Verdict
from tutti.verification.verify_replicas import compare_replicas

LAYOUTS = [
    "replica=2 sync=average(every=1)",
    "replica=4 sync=average(every=8, then=16, after=3)",
    "replica=2 data=2 zero=1 sync=diloco(every=50)",
    "replica=2 data=2 zero=3 sync=diloco(every=20, fragments=3, delay=4, traffic=int8)",
    "replica=2 tensor=2 sync=average(every=4, traffic=bf16)",
    "replica=2 pipe=2 micro=2 sync=diloco(every=3, fragments=2)",
    "replica=4 data=2 sync=gossip(every=2, delay=3)",
    "replica=4 data=2 zero=3 sync=elastic(every=10)",
    "replica=2 tensor=2 sync=pairs(every=4)",
    "replica=2 pipe=2 micro=2 sync=elastic(every=3)",
]


def verdict(layout: str, kind: str = "adamw", **options: Any) -> Verdict:
    model, optimizer = training.make(kind)
    x, y = training.batch_at(0)
    batch = x.repeat(2, 1), y.repeat(2, 1) + torch.arange(16.0)[:, None]
    return tutti.verify(
        training.train_step, model, optimizer, batch, layout, place=training.PLACE, **options
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_as_many_runs_on_one_device(layout: str) -> None:
    found = verdict(layout)
    assert found.ok, found
    assert found.max_error < 1e-12
    assert ("data " in str(found)) == ("every=1)" in layout)


def test_statistics_are_averaged_and_dropout_is_each_replicas_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 8), torch.randn(8, 4)
    layout = "replica=2 data=2 sync=average(every=2)"
    assert tutti.verify(training.train_step, model, optimizer, batch, layout).ok


@pytest.mark.parametrize("layout", ["replica=2", "replica=4 tensor=2", "replica=2 data=2 zero=3"])
def test_averaging_every_step_of_sgd_is_data_parallelism(layout: str) -> None:
    found = verdict(f"{layout} sync=average(every=1)", "sgd", steps=4)
    assert found.ok and found.data_error is not None and found.data_error < 1e-14
    assert "to one program on the whole batch: the same numbers" in str(found)


def test_averaging_every_step_of_adam_is_not() -> None:
    found = verdict("replica=2 sync=average(every=1)")
    assert found.ok and found.data_error is not None and found.data_error > 1e-6
    assert "not the same" in str(found)


@pytest.mark.parametrize(
    ("sync", "other"),
    [
        ("diloco(every=4)", "diloco(every=4, lr=0.701)"),
        ("diloco(every=4)", "average(every=4)"),
        ("average(every=4)", "gossip(every=4)"),
        ("elastic(every=4)", "elastic(every=4, beta=0.8)"),
        ("pairs(every=4)", "average(every=4)"),
        ("average(every=2, then=4)", "average(every=2)"),
        ("diloco(every=4, fragments=2, delay=1)", "diloco(every=4, fragments=2, delay=2)"),
        ("diloco(every=4, fragments=2)", "diloco(every=4)"),
        ("diloco(every=4, traffic=int8)", "diloco(every=4)"),
        ("diloco(every=4, traffic=bf16)", "diloco(every=4, traffic=int8)"),
        ("average(every=4, traffic=bf16)", "average(every=4)"),
    ],
)
def test_ranks_that_agree_otherwise_are_caught(sync: str, other: str) -> None:
    model, optimizer = training.make("adamw")
    laid_out = Layout.parse(f"replica=4 sync={sync}")
    found = compare_replicas(
        Job.of(training.train_step, model, optimizer, laid_out),
        training.batch_at(0),
        steps=2,
        dtype=torch.float64,
        strategy=parse(other),
    )
    assert not found.ok and found.max_error > 1e-6
    assert "NOT the same step" in str(found)


@pytest.mark.parametrize(
    ("layout", "traffic"), [("replica=2", "bf16"), ("replica=2 data=2 zero=3", "int8")]
)
def test_errors_that_are_forgotten_are_caught(
    layout: str, traffic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{layout} sync=average(every=4, traffic={traffic})"
    assert verdict(text).ok
    monkeypatch.setattr(ReplicaMember, "settle", lambda self, mean: None)
    found = verdict(text)
    assert not found.ok and found.max_error > 1e-6


def test_a_complex_parameter_is_refused_rather_than_left_to_differ() -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.phase.abs()

    model = Phases()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, layout = (torch.randn(4, 4), torch.randn(4, 4)), "replica=2 sync=average(every=1)"
    with pytest.raises(tutti.TuttiError, match=r'cannot average "phase" \(complex64\)'):
        tutti.verify(training.train_step, model, optimizer, batch, layout)


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(tutti.TuttiError, match=r'"replica" \(size 3\)'):
        verdict("replica=3 sync=average(every=2)")
