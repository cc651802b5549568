"""What cannot be split in time or into stages is refused, by verify and by the first call of a step."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stacks
import tutti
from small_steps import trained
from tutti.errors import LayoutError, ScheduleError, ShardingError, TuttiError


def by_verify(name: str, layout: str) -> TuttiError:
    """The refusal of `verify`."""
    step, model, optimizer, batches = stacks.built(name)
    return refused(lambda: tutti.verify(step, model, optimizer, batches[0], layout))


def by_a_call(name: str, layout: str) -> TuttiError:
    """The refusal of `distribute`, or of the first call on one device."""
    step, model, optimizer, batches = stacks.built(name)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    error = refused(lambda: tutti.distribute(step, model, optimizer, layout)(*batches[0]))
    assert all(x.equal(before[n]) for n, x in model.state_dict().items())
    return error


def refused(call: Callable[[], Any]) -> TuttiError:
    with pytest.raises(TuttiError) as caught:
        call()
    assert caught.value.what and caught.value.fix, caught.value
    return caught.value


BOTH = pytest.mark.parametrize("ask", [by_verify, by_a_call])


@BOTH
@pytest.mark.parametrize(
    ("name", "op", "read", "line"),
    [
        ("normed", "sub.Tensor in norms.0", "a sum of div.Tensor", "norm(layer(x))"),
        ("contrastive", "mm", "div.Tensor (", "features @ features.t()"),
    ],
)
def test_what_couples_samples(
    ask: Callable[[str, str], TuttiError], name: str, op: str, read: str, line: str
) -> None:
    error = ask(name, "micro=4")
    assert isinstance(error, ShardingError)
    assert (
        error.what == f"micro=4 cannot split the batch in time: {op} needs all its samples at once"
    )
    path, _, number = error.at.partition("  ")[0].rpartition(":")
    assert line in linecache.getline(path, int(number)) and line in error.at
    assert f"it reads {read}" in error.why and "BatchNorm" in error.why
    assert "leave micro=4 out" in error.fix


LOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: torch.stack([torch.logsumexp(row, -1) for row in y]),
    "rows by number": lambda y: torch.stack([torch.logsumexp(y[i], -1) for i in range(len(y))]),
    "chunks": lambda y: torch.cat([part.logsumexp(-1) for part in y.split(4)]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_samples(name: str) -> None:
    loop = LOOPS[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    step = trained(lambda m, x: loop(m(x)).mean())
    batch = (torch.ones(8, 3, 4, dtype=torch.float64),)
    with pytest.raises(ShardingError, match="needs all its samples at once") as caught:
        tutti.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), batch, "micro=2")
    error = caught.value
    assert f'"{name}": lambda y' in error.at
    assert "a loop over its rows or chunks" in error.why and "BatchNorm" not in error.why
    assert "torch.logsumexp(x, -1)" in error.fix and "leave micro=2 out" in error.fix


@pytest.mark.parametrize(("layout", "most"), [("micro=5", 4), ("data=2 micro=5", 2)])
def test_micro_batches_that_do_not_divide(layout: str, most: int) -> None:
    """As many as divide each rank's 28 or 14 samples; it is said."""
    step, model, optimizer, batches = stacks.built("stack")
    with pytest.warns(UserWarning, match=f"micro=5 .* rank takes them in {most} .*drop_last=True"):
        found = tutti.verify(step, model, optimizer, batches[0], layout, steps=1)
    assert found.ok


def test_more_stages_than_there_is_to_do() -> None:
    error = by_verify("stack", "pipe=40 micro=4")
    assert isinstance(error, LayoutError) and "40 stages" in error.what
    most = int(error.fix.removeprefix("pipe=").removesuffix(" at most"))
    step, model, optimizer, batches = stacks.built("stack")
    found = tutti.verify(step, model, optimizer, batches[0], f"pipe={most} micro=4", steps=1)
    assert found.ok


def test_a_second_update_on_what_the_first_one_made() -> None:
    for layout in ("pipe=2", "micro=4", "data=2 zero=3 micro=2"):
        error = by_verify("twice", layout)
        assert isinstance(error, ShardingError)
        assert error.what.endswith(": addmm in layers.0 reads the result of an update")
        assert "stacks.py" in error.at and "two calls of distribute" in error.fix
        assert "BatchNorm" not in error.why + error.fix


def test_a_second_forward_with_weights_that_a_gradient_has_changed() -> None:
    """As SAM does, without an update in between."""

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    error = refused(lambda: tutti.verify(step, model, optimizer, (torch.ones(8, 4),), "micro=2"))
    assert "a backward has made" in error.why and "SAM" in error.why
    assert "all_reduce" not in error.why and "BatchNorm" not in error.why + error.fix


def by_module(model: Any, x: Tensor) -> Tensor:
    return model(x)  # a call


def by_weight(model: Any, x: Tensor) -> Tensor:
    return F.linear(x, model[0].weight)  # a function


@pytest.mark.parametrize("layout", ["micro=2", "pipe=2 micro=2"])
@pytest.mark.parametrize(
    ("again", "op", "line"),
    [(by_module, "addmm in 0", "# a call"), (by_weight, "mm", "# a function")],
)
def test_a_forward_behind_the_update_without_gradients(
    again: Any, op: str, line: str, layout: str
) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return loss, again(model, x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    error = refused(lambda: tutti.verify(step, model, optimizer, (torch.ones(8, 4),), layout))
    assert error.what.endswith(f": {op} reads the result of an update") and line in error.at
    assert "two calls of distribute" in error.fix


def _langevin(model: Any, optimizer: Any, x: Tensor, *, joined: bool) -> Tensor:
    """The samples move along gradients of their own; no weight changes."""
    z = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).sum(), z)
    z = (z - 0.1 * slope).detach()
    of_x, of_z = model(torch.cat([x, z])).chunk(2) if joined else (model(x), model(z))
    loss = of_z.mean() - of_x.mean() + of_x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _joined(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    of_x, of_half = model(torch.cat([x, x / 2])).chunk(2)
    loss = of_half.mean() - of_x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("layout", ["micro=2", "pipe=2 micro=2"])
@pytest.mark.parametrize("step", [partial(_langevin, joined=True), _joined])
def test_two_batches_joined_in_one_call(step: Any, layout: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = (torch.randn(8, 4, dtype=torch.float64),)
    error = refused(lambda: tutti.verify(step, model, optimizer, batch, layout))
    assert "torch.cat([x" in error.at and "torch.cat along dim 0" in error.why
    assert "MAML" not in error.why and "model(x) and model(z)" in error.fix
    two = partial(_langevin, joined=False)
    assert tutti.verify(two, model, optimizer, batch, layout).ok


@BOTH
@pytest.mark.parametrize(
    ("layout", "what", "fix"),
    [
        ("pipe=2 schedule=zvb", 'schedule="zvb" is unknown', "did you mean zb"),
        ("pipe=2 schedule=interleaved(0)", "is unknown", "interleaved?"),
        ("pipe=2 schedule=zb(2)", "is unknown", "zb"),
        ("micro=4 schedule=zb", "orders the stages of a pipeline", "pipe=2 micro=4 schedule=zb"),
    ],
)
def test_schedules_that_are_none(
    ask: Callable[[str, str], TuttiError], layout: str, what: str, fix: str
) -> None:
    error = ask("stack", layout)
    assert isinstance(error, LayoutError)
    assert what in error.what and fix in error.fix


def test_the_way_out_of_too_few_ranks_can_be_gone() -> None:
    error = by_a_call("stack", "pipe=2 micro=4 schedule=zb")
    assert error.fix == 'start 2 ranks, or "micro=4"'


RIGHT = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"


@pytest.mark.parametrize(
    ("text", "layout", "what", "at", "fix"),
    [
        ("0F0 0F1\n  1F0 1b0 1F1", "pipe=2 micro=2", 'read "1b0"', "line 2, column 7", "1B0"),
        (RIGHT, "pipe=2 micro=4", "for 2 ranks and 2 micro-batches", "mine.txt", "pipe=2 micro=2"),
        (RIGHT, "pipe=4 micro=2", "for 2 ranks and 2 micro-batches", "mine.txt", "pipe=2 micro=2"),
        (RIGHT.replace(" 0B1", ""), "pipe=2 micro=2", "0B1 is missing", "rank 0", "add 0B1"),
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            *("pipe=2 micro=2", "deadlock: 2 ranks wait", "rank 0", "change the order"),
        ),
    ],
    ids=["a bad word", "other micro-batches", "other ranks", "a gap", "a deadlock"],
)
def test_a_file_that_is_wrong(
    tmp_path: Path, text: str, layout: str, what: str, at: str, fix: str
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    error = by_verify("stack", f"{layout} schedule={file}")
    assert isinstance(error, ScheduleError)
    assert what in error.what and at in error.at and fix in error.fix


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    error = by_verify("stack", f"pipe=2 micro=2 schedule={tmp_path}/none.txt")
    assert isinstance(error, ScheduleError) and "No such file" in error.why


def test_two_layouts_of_one_model() -> None:
    step, model, optimizer, batches = stacks.built("stack")
    tutti.distribute(step, model, optimizer, "micro=4")(*batches[0])
    error = refused(lambda: tutti.distribute(step, model, optimizer, "micro=2")(*batches[0]))
    assert error.what == 'this model is laid out as "micro=4" already, not "micro=2"'


def test_an_op_without_a_rule_is_named() -> None:
    """It is not said to couple samples: its operands are gathered because nothing is known of it."""
    with torch.library._scoped_library("tutti_test_refusals", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
        op = torch.ops.tutti_test_refusals.doubled
        model = torch.nn.Linear(4, 4)
        step = trained(lambda model, x: (model(x) - op(model(x).detach())).square().mean())
        optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 4),)
        with pytest.warns(UserWarning, match="no rule says"):
            error = refused(lambda: tutti.verify(step, model, optimizer, batch, "micro=2"))
    assert "no rule says how" in error.what and "doubled" in error.what
    assert "tutti.rule(" in error.fix


def test_a_step_whose_forward_is_not_split_names_the_way_out() -> None:
    """As MAML writes it: a loop over the tasks of a batch, each with a forward, a backward and an update."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for task in range(x.shape[0]):
            loss = model(x[task]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        return total

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(LayoutError, match="cannot cut the step into 2 stages") as caught:
        tutti.verify(step, model, optimizer, (torch.randn(4, 3, 4),), "pipe=2 micro=2")
    error = caught.value
    assert "addmm in 0 reads the result of an update" in error.why
    assert "loss = model(x[task])" in error.at and "one update a step" in error.fix


@pytest.mark.parametrize(
    ("of_the_batch", "why"),
    [
        (lambda x: x[1], "select.int reads all samples of the batch at once"),
        (torch.ones_like, "the step reads no tensor of its batch"),
    ],
)
def test_a_step_that_takes_the_batch_otherwise(
    of_the_batch: Callable[[Tensor], Tensor], why: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    step = trained(lambda model, x: model(of_the_batch(x)).square().mean())
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 3, 4),)
    error = refused(lambda: tutti.verify(step, model, optimizer, batch, "pipe=2 micro=2"))
    assert error.what == "cannot cut the step into 2 stages" and why in error.why
    assert bool(error.at) == ("select" in why)
