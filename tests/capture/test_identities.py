"""Sets, tuples, keys of dicts and ids by which a step tells parameters apart: as eager, or refused."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from as_eager import Program, assert_as_eager, assert_as_eager_on_ranks
from gradient_programs import looking, losing, small_model
from ranks import Ranks
from tutti.capture.python.held_values import ITEM, Table
from tutti.capture.step import capture
from tutti.errors import CaptureError

CALLS = 4
Pair = namedtuple("Pair", "first others")


def sets() -> Program:
    made = small_model()
    frozen, doubled = {made[0].weight, made[1].bias}, frozenset({made[2].weight})

    def look(p: Any) -> None:
        if p in frozen:
            p.grad = None
        elif p in doubled:
            p.grad.mul_(2)

    return looking(made, look)


def keys() -> Program:
    made = small_model()
    scales = {made[0].weight: 2.0, made[2].bias: 0.5}
    names = {p: name for name, p in made.named_parameters()}
    others = defaultdict(float, {made[1].weight: 3.0})

    def look(p: Any) -> None:
        p.grad.mul_(scales.get(p, 1.0) + others[p])
        if "bias" in names[p]:
            p.grad.neg_()

    return looking(made, look)


def ids() -> Program:
    """In a set, as keys, alone, and inside of tuples."""
    made = small_model()
    held = SimpleNamespace(skipped={id(made[0].weight)}, last=id(made[2].bias))
    held.numbers = {id(p): i for i, p in enumerate(made.parameters())}
    held.scales = {(id(made[1].weight), "weight"): 2.0, ("own", made[1].bias): 3.0}

    def look(p: Any) -> None:
        p.grad.mul_(1 + held.numbers[id(p)])
        p.grad.mul_(held.scales.get((id(p), "weight"), 1.0) * held.scales.get(("own", p), 1.0))
        if id(p) in held.skipped:
            p.grad = None
        elif id(p) == held.last:
            p.grad.neg_()

    return looking(made, look)


def tuples() -> Program:
    made = small_model()
    pair = Pair(made[0].weight, [made[2].weight])
    groups = {"decayed": [made[1].weight], "rest": (made[0].bias, (made[2].bias,))}

    def look(p: Any) -> None:
        if p is pair.first or any(p is q for q in pair.others):
            p.grad.mul_(2)
        if p is groups["decayed"][0]:
            p.grad.add_(p.detach(), alpha=0.1)
        first, (second,) = groups["rest"]
        if p is first or p is second:
            p.grad.neg_()

    return looking(made, look)


def references() -> Program:
    """Weak ones, and a function with a parameter bound to it."""
    made = small_model()
    first, bound = (
        weakref.ref(made[0].weight),
        functools.partial(_penalty, made[2].weight, of=made[1].bias),
    )

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean() + bound()
        for p in model.parameters():
            if p is first():
                loss = loss + p.sum()
        return loss

    return losing(made, loss_of)


def _penalty(p: Tensor, of: Tensor) -> Tensor:
    return 0.1 * p.square().sum() + of.sum()


def buffers() -> Program:
    made = small_model()
    kept = {made[1].running_mean}

    def look(p: Any) -> None:
        for b in made.buffers():
            if b in kept:
                p.grad.add_(b.sum())

    return looking(made, look)


class ByHand:
    """No `torch.optim.Optimizer`, with values by parameter: numbers, tensors, new tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.mean = {p: torch.zeros_like(p) for p in model.parameters()}
        self.count = dict.fromkeys(model.parameters(), 0)
        self.last: dict[nn.Parameter, Tensor | None] = dict.fromkeys(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for p, mean in self.mean.items():
            assert p.grad is not None
            self.count[p] += 1
            mean.mul_(0.9).add_(p.grad)
            last = self.last[p]
            p.sub_(mean if last is None else mean + last, alpha=0.1 / self.count[p])
            self.last[p] = p.grad.clone()


def an_optimizer_by_hand() -> Program:
    made = small_model()
    by_hand = ByHand(made)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        by_hand.step()
        return loss.detach()

    return step, made, None, (torch.randn(8, 6),)


def slow_weights() -> Program:
    """As Lookahead: every other call moves to them."""
    made = small_model()
    slow, calls = {p: p.detach().clone() for p in made.parameters()}, {"count": 0}
    plain, *rest = looking(made, lambda _: None)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = plain(model, optimizer, x)
        calls["count"] += 1
        if calls["count"] % 2 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    slow[p].add_(p - slow[p], alpha=0.5)
                    p.copy_(slow[p])
        return loss

    return step, *rest  # type: ignore[return-value]


def a_teacher() -> Program:
    """Tensors outside of the model."""
    made, teacher = small_model(), nn.Linear(6, 4).requires_grad_(False)
    counted, by_id = {teacher.weight}, {id(teacher.bias)}

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x)
        loss = (found - teacher(x)).square().mean()
        for p in teacher.parameters():
            loss = loss + found.mean() * (
                p.sum() if p in counted else 3.0 if id(p) in by_id else 0.0
            )
        return loss

    return losing(made, loss_of)


def _with_means(mean_of: Callable[[Any], Tensor]) -> Program:
    """Momentum by hand, in tensors that `mean_of` makes at the first use."""

    @torch.no_grad()
    def look(p: Any) -> None:
        mean = mean_of(p)
        mean.mul_(0.9).add_(p.grad)
        p.grad.copy_(mean)

    return looking(small_model(), look)


def filled_by_tensor() -> Program:
    means: Any = defaultdict(dict)

    def mean_of(p: Any) -> Tensor:
        if "mean" not in means[p]:
            means[p]["mean"] = torch.zeros_like(p)
        return means[p]["mean"]

    return _with_means(mean_of)


def filled_by_id() -> Program:
    means: dict[int, Tensor] = {}

    def mean_of(p: Any) -> Tensor:
        if id(p) not in means:
            means[id(p)] = torch.zeros_like(p)
        return means[id(p)]

    return _with_means(mean_of)


def filled_by_pair() -> Program:
    means: dict[Any, Tensor] = {}
    return _with_means(lambda p: means.setdefault(("mean", p), torch.zeros_like(p)))


def a_dict_made_late() -> Program:
    """With the last gradients by tensor, by id, and the id of a tensor."""
    made, held = small_model(), SimpleNamespace(last=None, first=None)

    @torch.no_grad()
    def look(p: Any) -> None:
        if held.last is None:
            held.last = {q: (id(q), q.grad.clone()) for q in made.parameters()}
            held.first = [id(next(made.parameters()))]
        number, before = held.last[p]
        assert number == id(p)
        held.last[p] = number, p.grad.clone()
        p.grad.add_(before, alpha=2.0 if held.first[0] == id(p) else 0.5)

    return looking(made, look)


def slots_of_the_step() -> Program:
    """The step's own code puts slots into the state of the optimizer, which it holds."""
    made = small_model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    slots = optimizer.state

    @torch.no_grad()
    def look(p: Any) -> None:
        if "mean" not in slots[p]:
            slots[p]["mean"] = torch.zeros_like(p)
        slots[p]["mean"].mul_(0.9).add_(p.grad)
        p.grad.copy_(slots[p]["mean"])

    return looking(made, look, optimizer)


FILLED = [filled_by_tensor, filled_by_id, filled_by_pair, a_dict_made_late]
PROGRAMS = [
    *FILLED,
    sets,
    keys,
    ids,
    tuples,
    references,
    buffers,
    an_optimizer_by_hand,
    slow_weights,
    a_teacher,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_one_device_and_a_layout(program: Callable[[], Program]) -> None:
    assert_as_eager(program, calls=CALLS)


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2"])
@pytest.mark.parametrize(
    "program",
    [sets, keys, ids, an_optimizer_by_hand, slots_of_the_step, *FILLED],
    ids=lambda p: p.__name__,
)
def test_on_ranks(ranks: Ranks, program: Callable[[], Program], layout: str) -> None:
    assert_as_eager_on_ranks(ranks, program, layout, CALLS)


def after_another_shape(layout: str) -> list[float]:
    """Shards take the parameters' places after the first call; then another batch is traced."""
    torch.manual_seed(0)
    step, made, optimizer, (x,) = ids()
    if layout != "eager":
        step = tutti.distribute(step, made, optimizer, layout)
        return [float(step(x)), float(step(x[:4])), float(step(x[:6])), float(step(x))]
    return [float(step(made, optimizer, rows)) for rows in (x, x[:4], x[:6], x)]


def test_ids_of_parameters_that_shards_replace(ranks: Ranks) -> None:
    expected = pytest.approx(after_another_shape("eager"), rel=1e-5)
    for layout in ("data=2 zero=3", "tensor=2"):
        assert ranks.run(after_another_shape, layout, n=2) == [expected] * 2


def test_containers_stay_as_they_are() -> None:
    made = small_model()
    keys, held = {p: i for i, p in enumerate(made.parameters())}, {made[0].weight}
    before = [*keys.items()], {*held}
    step, _, optimizer, batch = looking(made, lambda p: p.grad.mul_(keys[p] if p in held else 1.0))
    tutti.distribute(step, made, optimizer, "")(*batch)
    assert all(a is b and i == j for (a, i), (b, j) in zip(keys.items(), before[0], strict=True))
    assert held == before[1] and [*keys] == [*made.parameters()]


def test_a_container_has_the_keys_that_the_step_adds() -> None:
    made = small_model()
    found: dict[Any, Any] = {}
    numbers: dict[int, int] = {}

    def look(p: Any) -> None:
        found[p] = found.get(p, 0) + 1
        numbers[id(p)] = numbers.get(id(p), 0) + 1

    step, _, optimizer, batch = looking(made, look)
    played = tutti.distribute(step, made, optimizer, "")
    for calls in (1, 2, 3):
        played(*batch)
        assert [*found.items()] == [(p, calls) for p in made.parameters()]
        assert [*numbers.items()] == [(id(p), calls) for p in made.parameters()]


@pytest.mark.parametrize("program", [filled_by_tensor, filled_by_id, filled_by_pair])
def test_a_filled_dict_is_traced_twice(program: Callable[[], Program]) -> None:
    """Names of what is in it do not change with the parameters' numbers."""
    step, made, optimizer, batch = program()
    played = tutti.distribute(step, made, optimizer, "")
    for _ in range(4):
        played(*batch)
    assert played._num_traces == 2


def _in_a_pipeline() -> list[float]:
    torch.manual_seed(0)
    step, made, optimizer, (x,) = _layers()
    played = tutti.distribute(step, made, optimizer, "pipe=2 micro=2")
    return [float(played(x)) for _ in range(CALLS)]


def _layers() -> Program:
    """Without batch norm, whose statistics need the whole batch."""
    made, means = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), defaultdict(dict)

    @torch.no_grad()
    def look(p: Any) -> None:
        means[p].setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.grad.copy_(means[p]["mean"])

    return looking(made, look)


def test_a_filled_dict_in_a_pipeline(ranks: Ranks) -> None:
    torch.manual_seed(0)
    step, made, optimizer, (x,) = _layers()
    expected = pytest.approx([float(step(made, optimizer, x)) for _ in range(CALLS)], rel=1e-5)
    assert ranks.run(_in_a_pipeline, n=2) == [expected] * 2


def test_a_name_of_a_value_by_parameter() -> None:
    """It does not show the parameter's numbers, which change."""
    a, b = torch.ones(2), torch.ones(2)
    table = Table("scales", ITEM, lambda held={a: 1.0, b: 2.0, "c": 3}: held, None)
    assert [table.name(key) for key in (b, a, "c")] == [
        "scales[tensor 1]",
        "scales[tensor 0]",
        "scales['c']",
    ]


@pytest.mark.parametrize(
    "of", [lambda p: p, lambda p: p.untyped_storage()], ids=["tensor", "storage"]
)
def test_an_address_is_refused(of: Callable[[Tensor], Any]) -> None:
    made = small_model()
    frozen = {of(made[0].weight).data_ptr()}

    def look(p: Any) -> None:
        if of(p).data_ptr() in frozen:  # here
            p.grad = None

    step, _, optimizer, batch = looking(made, look)
    with pytest.raises(CaptureError, match=r"address of a tensor(?s:.*)# here"):
        tutti.distribute(step, made, optimizer, "")(*batch)


def test_an_address_for_which_pytorch_asks_gives_no_warning() -> None:
    """`copy.deepcopy` of a tensor asks for it."""

    def look(p: Any) -> None:
        p.grad = copy.deepcopy(p.grad) * 2

    program = looking(small_model(), look)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # PyTorch gives this warning once a process
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Accessing the data pointer")
            capture(*program)
    finally:
        torch.set_warn_always(before)
