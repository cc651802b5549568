"""`verify` of parameter servers: every consistency, several workers and servers, and faults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from server.split.steps import Apart, Model, batch, by_norm, step
from tutti.errors import ShardingError
from tutti.layout import Layout
from tutti.server.protocol.consistency import parse
from tutti.server.protocol.feedback import Feedback
from tutti.server.protocol.messages import TensorPart
from tutti.server.protocol.virtual_servers import VirtualServers
from tutti.verification.comparisons import feed_of
from tutti.verification.verdict import Subject, Verdict
from tutti.verification.verify_servers import verdict_of

STEP = "replica=2 server=2 sync=step"
ASYNC = "replica=3 server=2 sync=async"
AFTER = "replica=3 server=2 sync=async(after=4)"


class Dropping(Model):
    """The same with dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.2)


@cache
def subject(rows: int) -> tuple[Subject, list[dict[str, Any]]]:
    """AdamW with clipping: captured with so many samples, and those of three workers."""
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [batch(which, rows) for which in range(3)]
    made = Subject(partial(step, by_norm), model, optimizer, batches[0], steps=2)
    return made, [feed_of(made.captured, optimizer, one) for one in batches]


def verdict(layout: str, spoil: Any = None) -> Verdict:
    parsed = Layout.parse(layout)
    due, count = parse(parsed.sync), parsed.num_replicas
    made, feeds = subject(12)
    apart = subject(4)[0], subject(4)[1][:count]
    if due.alone(0):
        return verdict_of(*apart, parsed, spoil=spoil)
    return verdict_of(made, feeds[:1], parsed, then=apart if due.both else None, spoil=spoil)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_step_is_one_device(workers: int, servers: int) -> None:
    found = verdict(f"replica={workers} server={servers} sync=step")
    assert found.ok and found.max_error < 1e-13, found
    assert found.staleness is None


def test_bounded_by_nothing_is_step() -> None:
    found, other = verdict("replica=2 server=2 sync=bounded(0)"), verdict(STEP)
    assert found.ok and found.max_error == other.max_error


@pytest.mark.parametrize(
    ("layout", "oldest"),
    [(ASYNC, 3), ("replica=3 server=2 sync=async(predict)", 3)]
    + [("replica=3 server=1 sync=bounded(1)", 2), ("replica=2 server=2 sync=async", 1)],
)
def test_stale_gradients_are_those_of_a_replay_in_the_same_order(layout: str, oldest: int) -> None:
    found = verdict(layout)
    assert found.ok and found.max_error < 1e-13, found
    assert found.staleness is not None and found.staleness >= oldest
    assert f"up to {found.staleness} updates old" in str(found)


def verified(model: nn.Module, layout: str) -> Verdict:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    place = {"up.weight": "tensor, -", "down.weight": "-, tensor", "table.weight": "-, tensor"}
    given = (partial(step, by_norm), model, optimizer, batch(0, 12), layout)
    return tutti.verify(*given, place=place)


@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 data=2 server=1 sync=step",
        "replica=2 tensor=2 server=2 sync=step",
        "replica=2 data=3 tensor=2 server=1 sync=step(traffic=int8)",
        "replica=3 data=2 tensor=2 server=2 sync=async(damped)",
        "replica=2 tensor=2 server=1 sync=async(after=2, predict)",
    ],
)
def test_workers_of_several_ranks(layout: str) -> None:
    found = verified(Model(), layout)  # its norm couples all samples
    assert found.ok and found.max_error < 1e-13, found


def test_several_ranks_take_slices() -> None:
    found = verified(Apart(), "replica=2 data=2 tensor=2 micro=3 server=2 sync=step")
    assert found.ok and found.max_error < 1e-13, found


@pytest.mark.parametrize(
    "layout",
    [
        "replica=2 server=2 sync=step micro=3",
        "replica=3 server=1 sync=bounded(0) micro=2 remat=full",
        "replica=2 server=1 sync=async micro=2 remat=full precision=bf16",
    ],
)
def test_workers_take_their_rows_in_slices(layout: str) -> None:
    found = verified(Apart(), layout)
    assert found.ok and found.max_error < 1e-13, found


@pytest.mark.parametrize(
    "layout",
    [
        "replica=3 server=2 sync=step(traffic=int8)",
        "replica=2 server=1 sync=bounded(1, traffic=bf16)",
        "replica=3 server=2 sync=async(damped, traffic=int8)",
        "replica=3 server=1 sync=async(damped)",
        "replica=2 server=2 sync=async(after=2, traffic=bf16)",
    ],
)
def test_coded_gradients_and_damped_rates_are_judged_as_they_are(layout: str) -> None:
    found = verdict(layout)
    assert found.ok and found.max_error < 1e-12, found


class Forgetting(Feedback):
    """What is rounded away is lost."""

    def part(self, key: int, gradient: Tensor) -> TensorPart:
        self._errors.clear()
        return super().part(key, gradient)


@pytest.mark.parametrize(
    ("sync", "wrong"),
    [
        ("step(traffic=bf16)", Feedback("fp32")),
        ("step(traffic=int8)", Forgetting("int8")),
        ("async(traffic=bf16)", Forgetting("bf16")),
        ("async(traffic=int8)", Feedback("bf16")),
    ],
)
def test_gradients_that_are_coded_otherwise_are_found(sync: str, wrong: Feedback) -> None:
    def spoil(servers: VirtualServers) -> None:
        servers._feedback[1] = wrong

    found = verdict(f"replica=2 server=2 sync={sync}", spoil)
    assert not found.ok and found.max_error > 1e-6, found


def test_rates_that_are_not_damped_are_found() -> None:
    def spoil(servers: VirtualServers) -> None:
        for machine in servers.machines:
            machine.ledger.consistency = parse("async")

    assert not verdict("replica=3 server=1 sync=async(damped)", spoil).ok


def test_a_step_that_couples_samples_is_not_sliced() -> None:
    with pytest.raises(ShardingError, match="needs all its samples at once"):
        verified(Model(), "replica=2 server=1 sync=step micro=2")


@pytest.mark.parametrize("sync", ["async(after=300)", "bounded(1, after=9, predict)"])
def test_together_at_first_then_apart(sync: str) -> None:
    """Two steps of the whole batch on one device, then two of each worker in any order, from there."""
    found = verdict(f"replica=3 server=2 sync={sync}")
    assert found.ok and found.max_error < 1e-13, found
    assert found.steps == 4 and found.staleness is not None and found.staleness >= 2
    assert found.num_tensors > verdict("replica=3 server=2 sync=step").num_tensors


def test_by_the_public_name() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    for layout in (ASYNC, "replica=3 server=2 sync=async(after=5)"):
        found = tutti.verify(partial(step, by_norm), model, optimizer, batch(0, 6), layout, steps=1)
        assert found.ok and layout.split("sync=")[1] in str(found)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


class Wrong:
    """An updater with something wrong about one variable."""

    def __init__(self, right: Any, what: str) -> None:
        self.right, self.what = right, what
        self.spoiled: Any = None  # its ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def sums(self, variable: str, gradient: Tensor) -> Tensor:
        found = self.right.sums(variable, gradient)
        return found * 0 if self.what == "sums" and variable == "up.weight" else found

    def scalars(self, sums: Any, given: Any) -> Mapping[str, float]:
        found = dict(self.right.scalars(sums, given))
        if self.what == "scalars":
            found["returned.1"] *= 1.001
        return found

    def update(self, variable: str, state: Any, gradient: Tensor, scalars: Any) -> None:
        if variable != "up.weight":
            return self.right.update(variable, state, gradient, scalars)
        if self.what == "twice":
            self.right.update(variable, state, gradient, scalars)
        if self.what == "late" and self.spoiled.alone:
            return
        if self.what != "never":
            factor = 0.5 if self.what == "mean" else 1
            self.right.update(variable, state, gradient * factor, scalars)


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (STEP, "sums"),
        (STEP, "scalars"),
        (STEP, "mean"),
        (STEP, "never"),
        (ASYNC, "twice"),
        (ASYNC, "never"),
        (ASYNC, "mean"),
        (AFTER, "sums"),
        (AFTER, "late"),
    ],
)
def test_wrong_servers_are_found(layout: str, what: str) -> None:
    def spoil(servers: VirtualServers) -> None:
        for machine in servers.machines:
            wrong: Any = Wrong(machine.ledger.updater, what)
            wrong.spoiled = machine.ledger
            machine.ledger.updater = wrong

    found = verdict(layout, spoil)
    assert not found.ok and found.max_error > 1e-5, found


def test_weights_of_another_time_are_found() -> None:
    """A server that answers each pull with what it had at the beginning."""

    def spoil(servers: VirtualServers) -> None:
        begin = servers.state()
        old = {n: x["weight"] for n, x in begin.items()}
        servers._pulled = lambda _: {n: x.clone() for n, x in old.items()}  # type: ignore[method-assign]

    assert not verdict(ASYNC, spoil).ok
    assert not verdict(STEP, spoil).ok
