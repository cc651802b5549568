"""Places in Python with one tensor: a step puts it there, or the script does between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.errors import CaptureError

NUM_CALLS = 5


class Meter:
    """A user's object."""

    def __init__(self) -> None:
        self.n, self.first, self.log = torch.zeros(3).double(), True, list[Any]()


class Module(nn.Module):
    """The same as a module."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(vars(Meter()))


Change = Callable[[Any, Any, Tensor], Any]


def once(a: Any, b: Any, loss: Tensor) -> None:
    a.n += loss
    if a.first:
        b.n = a.n
        a.first = False


def always(a: Any, b: Any, loss: Tensor) -> None:
    a.n += loss
    b.n = a.n


def new(a: Any, b: Any, loss: Tensor) -> None:
    a.n = a.n + loss
    b.n = a.n


def former(a: Any, b: Any, loss: Tensor) -> None:
    b.n, a.n = a.n, a.n + loss


def exchanged(a: Any, b: Any, loss: Tensor) -> None:
    a.n += loss
    a.n, b.n = b.n, a.n


def in_a_list(a: Any, b: Any, loss: Tensor) -> None:
    a.n = a.n + loss
    a.log.append(a.n)
    b.log.append({"n": a.n, "m": (loss, a.n)})


def detached(a: Any, b: Any, loss: Tensor) -> None:
    a.n = a.n + loss
    b.n = a.n.detach()


def found_detached(a: Any, b: Any, loss: Tensor) -> None:
    if a.first:
        b.n, a.first = a.n.detach(), False
    a.log.append(b.n.sum() + loss)


def both(a: Any, b: Any, loss: Tensor) -> None:
    a.n += loss
    b.n += 2


def shared_between(a: Any, b: Any, k: int) -> None:
    if k in (1, 3):
        a.n = torch.zeros(3).double()
        b.n = a.n
    elif k == 2:
        a.n, b.n = torch.ones(3).double(), torch.zeros(3).double()


def changed_between(a: Any, b: Any, k: int) -> None:
    if k:
        a.n.mul_(2)


PROGRAMS: dict[str, tuple[Change, Callable[[Any, Any, int], None]]] = {
    "once": (once, changed_between),
    "always": (always, changed_between),
    "new": (new, changed_between),
    "former": (former, changed_between),
    "exchanged": (exchanged, changed_between),
    "in a list": (in_a_list, changed_between),
    "detached": (detached, changed_between),
    "found detached": (found_detached, changed_between),
    "shared between calls": (both, shared_between),
}


def numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [numbers(x) for x in value]
    return numbers([*value.values()]) if isinstance(value, dict) else value


def played(name: str, kind: type, layout: str | None) -> list[Any]:
    change, between = PROGRAMS[name]
    torch.manual_seed(0)
    model, a, b = nn.Linear(8, 4).double(), kind(), kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        change(a, b, loss.detach())
        return loss

    play: Any = step if layout is None else tutti.distribute(step, model, optimizer, layout)
    given = (model, optimizer) if layout is None else ()
    found: list[Any] = []
    for k in range(NUM_CALLS):
        between(a, b, k)
        loss = play(*given, torch.full((8, 8), 0.5 + k, dtype=torch.float64))
        one = a.log[-1] if a.log else None
        found.append((loss.item(), a.n is b.n, one is a.n, numbers([a.n, b.n, a.log, b.log])))
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one[1:3] == other[1:3]
        for x, y in zip(one[3], other[3], strict=True):
            torch.testing.assert_close(
                *map(torch.tensor, (flat(x), flat(y))), rtol=1e-12, atol=1e-12
            )


def flat(value: Any) -> list[float]:
    return [y for x in value for y in flat(x)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("kind", [Meter, Module])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_is_eager(name: str, kind: type) -> None:
    assert_same(played(name, kind, ""), played(name, kind, None))


def test_two_ranks_are_eager(ranks: Ranks) -> None:
    for name, layout in (("once", "data=2 zero=3"), ("new", "pipe=2"), ("former", "data=2")):
        for found in ranks.run(played, name, Meter, layout, n=2):
            assert_same(found, played(name, Meter, None))


def test_a_write_into_one_of_two_tensors_of_one_memory_is_refused() -> None:
    a, b, model = Meter(), Meter(), nn.Linear(8, 4)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean() + b.n.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a.n += 1
        return loss

    play = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    x = torch.ones(8, 8)
    play(x)
    b.n = a.n[1:]
    with pytest.raises(CaptureError, match=r"writes into a\.n, which shares memory with b\.n"):
        play(x)
