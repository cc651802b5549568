"""Lists and deques to which a step appends: as on one device, after each call, and without a new trace."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from ranks import Ranks
from tutti.errors import CaptureError

LAYOUTS = ["data=2 zero=3", "pipe=2 micro=2", "tensor=2", "micro=4"]
NUM_CALLS = 5


class Holder:
    """A trainer with a history, or torchvision's smoothed value."""

    def __init__(self, history: Any) -> None:
        self.history, self.total, self.count = history, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.history.append(value)
        self.total += value * n
        self.count += n


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.losses: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


@dataclass(frozen=True)
class Recorded:
    """`record(history, model, loss, output)` in the step; `start` makes the history; `between` calls."""

    record: Callable[[Any, Any, Tensor, Tensor], Any]
    start: Callable[[], Any] = list
    between: Callable[[Any, Any], Any] = lambda history, model: None
    num_traces: int = 1


def renewed(holder: Any, _: Any) -> None:
    if len(holder.history) == 2:
        holder.history = []


PROGRAMS = {
    "items": Recorded(lambda h, m, loss, y: h.append(loss.item())),
    "tensors": Recorded(lambda h, m, loss, y: h.append(loss.detach())),
    "outputs": Recorded(lambda h, m, loss, y: h.append(y.detach())),
    "several": Recorded(lambda h, m, loss, y: h.extend([loss.item(), 3, y.mean().detach()])),
    "dicts": Recorded(lambda h, m, loss, y: h.append({"loss": loss.item(), "mean": y.mean()})),
    "a default dict": Recorded(
        lambda h, m, loss, y: h["loss"].append(loss.item()),
        lambda: defaultdict(list),
        num_traces=2,  # the first call makes the list
    ),
    "a dict of lists": Recorded(
        lambda h, m, loss, y: h["loss"].append(loss.item()), lambda: {"loss": [], "n": 1}
    ),
    "a list with items": Recorded(
        lambda h, m, loss, y: h.append(loss.item()), lambda: [7.0, torch.ones(2)]
    ),
    "read again": Recorded(lambda h, m, loss, y: h.append(loss.item()) or h.append(2 * h[-1])),
    "in a module": Recorded(lambda h, m, loss, y: m.losses.append(loss.detach())),
    "in place": Recorded(lambda h, m, loss, y: setattr(m, "losses", m.losses.__iadd__([y.sum()]))),
    "emptied between calls": Recorded(
        lambda h, m, loss, y: h.append(loss.item()),
        between=lambda h, m: h.clear() if len(h) == 3 else None,
    ),
    "renewed between calls": Recorded(
        lambda h, m, loss, y: h.history.append(loss.item()), lambda: Holder([]), renewed, 5
    ),
    "a deque": Recorded(lambda h, m, loss, y: h.append(loss.item()), lambda: deque(maxlen=3)),
    "a smoothed value": Recorded(
        lambda h, m, loss, y: h.update(loss.item(), len(y)),
        lambda: Holder(deque(maxlen=2)),
        num_traces=2,
    ),
}


def flat(x: Any) -> list[float]:
    if isinstance(x, Holder):
        return [*flat(x.history), x.total, x.count]
    if isinstance(x, dict):
        return [y for value in x.values() for y in flat(value)]
    if isinstance(x, list | deque):
        return [y for value in x for y in flat(value)]
    return x.flatten().tolist() if isinstance(x, Tensor) else [float(x)]


def recorded(name: str, layout: str, *, eager: bool = False) -> list[list[float]]:
    """What the lists have after each call."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model, history = Model().double(), program.start()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 6).double()

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        y = model(x)
        loss = F.mse_loss(y, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        program.record(history, model, loss, y)
        return loss

    place = {"up.weight": "tensor, -"} if "tensor" in layout else None
    step: Any = None
    if not eager:
        step = tutti.distribute(train_step, model, optimizer, layout, place=place)
    found = []
    for _ in range(NUM_CALLS):
        _ = train_step(model, optimizer, x) if eager else step(x)
        found.append([*flat(history), *flat(model.losses)])
        program.between(history, model)
    if not eager:
        assert step._num_traces <= program.num_traces
        saved = {name for name in step.state_dict() if name.startswith("python.")}
        assert saved <= {"python.history.total", "python.history.count"}
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device_appends_what_the_step_does(name: str) -> None:
    expected = recorded(name, "", eager=True)
    assert all(expected)
    for values, wanted in zip(recorded(name, ""), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["items", "outputs", "dicts", "in a module", "a smoothed value"])
def test_ranks_append_what_one_device_does(ranks: Ranks, name: str, layout: str) -> None:
    expected = recorded(name, "", eager=True)
    for found in ranks.run(recorded, name, layout, n=1 if layout == "micro=4" else 2):
        for values, wanted in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-12)


@contextlib.contextmanager
def stacks_sampled() -> Iterator[None]:
    """Context with a thread that keeps the last stacks of this one, as profilers and watches do."""
    main, over, interval = threading.get_ident(), threading.Event(), sys.getswitchinterval()

    def sample() -> None:
        kept: deque[Any] = deque(maxlen=3)
        while not over.is_set():
            frame = sys._current_frames()[main]
            kept.append(frame)
            time.sleep(0)

    thread = threading.Thread(target=sample)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", ["tensors", "outputs", "in a module", "a dict of lists"])
def test_another_thread_that_holds_gradients_changes_nothing(name: str) -> None:
    """A frame of a sampled stack holds its tensors, and autograd copies a gradient that anything holds."""
    expected = recorded(name, "", eager=True)
    with stacks_sampled():
        for _ in range(3):
            for values, wanted in zip(recorded(name, ""), expected, strict=True):
                assert values == pytest.approx(wanted, rel=1e-12)


def stepped(change: Callable[[list[Any], Tensor], Tensor | None]) -> tuple[list[Any], Any]:
    history: list[Any] = []

    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        found = change(history, loss)
        return loss if found is None else found

    torch.manual_seed(0)
    return history, tutti.distribute(train_step, nn.Linear(4, 4))


def length(history: list[Any], loss: Tensor) -> None:
    history.append(loss.item() * len(history))


def popped(history: list[Any], loss: Tensor) -> None:
    history.append(loss.item())
    if len(history) > 2:
        history.pop(0)


def last(history: list[Any], loss: Tensor) -> Tensor:
    found = loss + (history[-1] if history else 0.0)
    history.append(loss.detach())
    return found


def stacked(history: list[Any], loss: Tensor) -> Tensor:
    history.append(loss.detach())
    return torch.stack(history).mean()


def summed(history: list[Any], loss: Tensor) -> Tensor:
    history.append(loss.item())
    return loss + sum(history)


def inserted(history: list[Any], loss: Tensor) -> None:
    history.insert(0, loss.item())


def objects(history: list[Any], loss: Tensor) -> None:
    history.append(Fraction(1, 2))


@pytest.mark.filterwarnings("ignore:time.perf_counter")
def test_a_clock_is_named_as_a_possible_reason() -> None:
    _, step = stepped(lambda history, loss: history.append(time.perf_counter()))
    with pytest.raises(
        CaptureError, match=r"appends other values than this one to [\s\S]* a clock"
    ):
        step(torch.randn(8, 4))


def raw_bytes(history: list[Any], loss: Tensor) -> None:
    history.append(b"loss")


@pytest.mark.parametrize(
    "change",
    [length, popped, last, stacked, summed, inserted, objects, raw_bytes],
    ids=lambda x: x.__name__,
)
def test_a_list_with_other_uses_is_refused(change: Any) -> None:
    history, step = stepped(change)
    with pytest.raises(CaptureError, match=r"len\(history\)|history\[0\]") as caught:
        step(torch.randn(8, 4))
    if change is not stacked:  # a function of C reads the items of the list
        assert "test_appended_lists.py" in caught.value.at and "history" in caught.value.at
    assert history == [] and type(history) is list


class Replay:
    """Of images, as in CycleGAN: a list whose items the step reads and replaces at random."""

    def __init__(self, size: int) -> None:
        self.size, self.kept = size, list[Tensor]()
        self.random = random.Random(0)

    def push_and_pop(self, images: Tensor) -> Tensor:
        found = []
        for image in images.unbind():
            if len(self.kept) < self.size:
                self.kept.append(image)
                found.append(image)
            elif self.random.random() > 0.5:
                k = self.random.randrange(self.size)
                found.append(self.kept[k].clone())
                self.kept[k] = image
            else:
                found.append(image)
        return torch.stack(found)


class Gan:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.maker, self.critic = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.made = torch.optim.SGD(self.maker.parameters(), 0.1)
        self.judged = torch.optim.SGD(self.critic.parameters(), 0.1)
        self.replay = Replay(12)

    def make(self, models: Any, optimizer: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        images = models["maker"](z)
        loss = F.softplus(-models["critic"](images)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), images.detach()

    def judge(self, critic: Any, optimizer: Any, images: Tensor, x: Tensor) -> Tensor:
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(images)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def both(self, models: Any, optimizers: Any, z: Tensor, x: Tensor) -> Tensor:
        _, images = self.make(models, optimizers[0], z)
        return self.judge(models["critic"], optimizers[1], self.replay.push_and_pop(images), x)


def test_a_buffer_that_the_step_reads_is_refused_with_its_line() -> None:
    gan = Gan()
    models = {"maker": gan.maker, "critic": gan.critic}
    step = tutti.distribute(gan.both, models, [gan.made, gan.judged], "")
    x = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"len\(.*replay\.kept\)") as caught:
        step(x, x)
    assert "if len(self.kept) < self.size" in caught.value.at
    assert "a second step" in caught.value.fix


def in_two_steps(layout: str | None) -> list[Tensor]:
    """As the refusal advises: the buffer changes between two steps."""
    gan = Gan()
    models = {"maker": gan.maker, "critic": gan.critic}
    make: Any = partial(gan.make, models, gan.made)
    judge: Any = partial(gan.judge, gan.critic, gan.judged)
    if layout is not None:
        make = tutti.distribute(gan.make, models, gan.made, layout)
        judge = tutti.distribute(gan.judge, gan.critic, gan.judged, layout)
    made, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        z, x = torch.randn(2, 8, 4, generator=made, dtype=torch.float64)
        loss, images = make(z)
        found += [loss, judge(gan.replay.push_and_pop(images), x)]
    return found


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_a_buffer_between_two_steps(ranks: Ranks, layout: str) -> None:
    for found in ranks.run(in_two_steps, layout, n=2):
        torch.testing.assert_close(found, in_two_steps(None), rtol=0, atol=1e-12)


def test_a_deque_of_a_refused_step_stays_as_it_was() -> None:
    history: deque[Any] = deque([1.0], maxlen=3)

    def train_step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        history.append(loss.item() * len(history))
        return loss

    with pytest.raises(CaptureError, match=r"len\(history\)"):
        tutti.distribute(train_step, nn.Linear(4, 4))(torch.randn(8, 4))
    assert list(history) == [1.0] and type(history) is deque


def test_verify_takes_several_steps_of_a_step_that_appends() -> None:
    history: list[Any] = []

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss.item(), loss.detach()))
        return loss

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for layout in ("data=2", "pipe=2 micro=2"):
        found = tutti.verify(
            train_step, model, optimizer, (torch.randn(8, 4).double(),), layout, steps=3
        )
        assert found.ok and found.steps == 3, str(found)
    assert history == []
