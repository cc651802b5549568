"""Keys, attributes and items that a step removes or moves, once or at each call: as on one device."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.errors import CaptureError

NUM_CALLS = 3


class Holder:
    """A user's object."""

    def __init__(self) -> None:
        self.done, self.log = False, list[Any]()
        self.held: Any = {0: ["a"], 1: ["b"], 2: ["c"]}
        self.weights = {"a": 1.0, "b": 2.0}
        self.extra, self.seen = 3.0, torch.ones(3, dtype=torch.float64)


def once(change: Callable[[Holder, Tensor], Any]) -> Callable[[Holder, Tensor], None]:
    def changed(c: Holder, loss: Tensor) -> None:
        if not c.done:
            c.done = True
            change(c, loss)

    return changed


def deleted(c: Holder, loss: Tensor) -> None:
    del c.extra


def fallen(c: Holder, loss: Tensor) -> None:
    c.log.append(str(c.held.pop(1)))
    c.log.append("z")


def merged(c: Holder, loss: Tensor) -> None:
    for i in copy.deepcopy(c.held):
        if i:
            c.held[0].extend(c.held.pop(i))
    groups = copy.deepcopy(c.held)
    c.held = {}
    for i, group in enumerate(groups.values()):
        c.held[i] = group


def replaced(c: Holder, loss: Tensor) -> None:
    c.held[0].extend(c.held.pop(1))
    groups = c.held
    c.held = {}
    for i, group in enumerate(groups.values()):
        c.held[i] = group


def rotated(c: Holder, loss: Tensor) -> None:
    key = next(iter(c.weights))
    c.weights[key] = c.weights.pop(key)
    c.log.append(key)


def last_first(c: Holder, loss: Tensor) -> None:
    c.held.move_to_end("a")
    c.log.append(next(iter(c.held)))


def refilled(c: Holder, loss: Tensor) -> None:
    c.weights.pop("a")
    c.weights["c"] = loss.item()
    c.weights["a"] = 4.0


def ordered(c: Holder) -> None:
    c.held = OrderedDict(a=1, b=2, c=3)


def attributes(c: Holder, loss: Tensor) -> None:
    for i in (3, 7, 1, 0, 6, 2, 5, 4):
        setattr(c, f"of_{i}", i)


def default(c: Holder) -> None:
    c.held = defaultdict(list, a=[1], b=[2])


def on_objects(c: Holder) -> None:
    c.held = {"a": Holder, "b": torch.ones(2), "c": c.seen}


PROGRAMS: dict[str, tuple[Callable[[Holder, Tensor], Any], Callable[[Holder], None]]] = {
    "a key": (once(lambda c, _: c.held.pop(1)), lambda c: None),
    "a key whose value it reads": (once(fallen), lambda c: None),
    "a list into another": (once(lambda c, _: c.held[0].extend(c.held.pop(1))), lambda c: None),
    "groups as they merge": (once(merged), lambda c: None),
    "groups in another dict": (once(replaced), lambda c: None),
    "an attribute": (once(deleted), lambda c: None),
    "an attribute by name": (once(lambda c, _: delattr(c, "seen")), lambda c: None),
    "all keys": (once(lambda c, _: c.weights.clear()), lambda c: None),
    "the last key": (once(lambda c, _: c.weights.popitem()), lambda c: None),
    "a key to another": (once(lambda c, _: c.held.update({7: c.held.pop(1)})), lambda c: None),
    "a key at the end": (rotated, lambda c: None),
    "an ordered one": (last_first, ordered),
    "a default one": (once(lambda c, _: c.held.pop("a")), default),
    "objects": (once(lambda c, _: [c.held.pop(k) for k in ("a", "b", "c")] and None), on_objects),
    "new attributes": (once(attributes), lambda c: None),
    "a key and a new one": (once(refilled), lambda c: None),
    "an item of a list": (once(lambda c, _: c.held[1].pop()), lambda c: None),
    "all items": (once(lambda c, _: c.held[1].clear()), lambda c: None),
    "the first item": (
        once(lambda c, _: c.held.__delitem__(0)),
        lambda c: setattr(c, "held", ["a", 2, None]),
    ),
    "an item in front": (
        once(lambda c, _: c.held.insert(0, "z")),
        lambda c: setattr(c, "held", ["a", 2, None]),
    ),
    "the items of a deque": (
        once(lambda c, _: c.held.popleft()),
        lambda c: setattr(c, "held", deque([1, 2, 3], maxlen=4)),
    ),
}


def played(name: str, layout: str | None) -> list[Any]:
    change, begin = PROGRAMS[name]
    torch.manual_seed(0)
    model, c = nn.Linear(8, 4).double(), Holder()
    begin(c)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if len(c.held) == 3 and "extra" in vars(c):
            loss = loss * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        change(c, loss)
        return loss

    play: Any = step if layout is None else tutti.distribute(step, model, optimizer, layout)
    given = (model, optimizer) if layout is None else ()
    found: list[Any] = []
    for i in range(NUM_CALLS):
        loss = play(*given, torch.full((8, 8), 0.5 + i, dtype=torch.float64))
        found.append((loss.item(), str(vars(c)), [*c.held], [*c.weights]))
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-12)
        assert one[1:] == other[1:]


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_is_eager(name: str) -> None:
    assert_same(played(name, ""), played(name, None))


def test_two_ranks_are_eager(ranks: Ranks) -> None:
    for name in ("groups as they merge", "a key at the end", "an attribute"):
        for found in ranks.run(played, name, "data=2 zero=3", n=2):
            assert_same(found, played(name, None))


def test_a_list_that_each_call_shortens_is_refused_and_stays() -> None:
    c = Holder()
    c.log = ["a", "b", "c"]

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        c.log.pop()
        return loss

    model = nn.Linear(8, 4)
    play = tutti.distribute(step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")
    with pytest.raises(CaptureError, match=r"changes len\(c\.log\) in Python \(3, then 2\)"):
        play(torch.ones(8, 8))
    assert c.log == ["a", "b", "c"]


def test_a_removed_value_is_gone_after_a_load() -> None:
    """Also if the script begins with it again, and in the checkpoints after this one."""

    def begun() -> tuple[Holder, Any]:
        c, model = Holder(), nn.Linear(8, 4)

        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            once(lambda c, _: c.held.pop(1))(c, loss)
            return loss

        return c, tutti.distribute(step, model, torch.optim.SGD(model.parameters(), lr=0.1), "")

    x = torch.ones(8, 8)
    (c, step), (later, other), (last, third) = begun(), begun(), begun()
    step(x)
    saved = step.state_dict()
    other.load_state_dict(saved)
    assert later.done and later.held == c.held == {0: ["a"], 2: ["c"]}
    third.load_state_dict(other.state_dict())
    assert last.held == c.held
    assert torch.equal(step(x), third(x))
