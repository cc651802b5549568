"""Each strategy against its paper's formula, written out again on plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replicas_every import (
    NAMES,
    descending,
    difference,
    play,
    some_weights,
)
from tutti.replicas.strategies import parse

COUNT = 4


def starts() -> list[dict[str, Tensor]]:
    return [some_weights(5) for _ in range(COUNT)]


def stacked(weights: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([own[name] for own in weights])


def local(x: Tensor, name: str) -> Tensor:
    """`descending` for all replicas at once."""
    targets = torch.stack([some_weights(1000 + r)[name] for r in range(COUNT)])
    return x - 0.1 * (x - targets)


def assert_same(seen: list[list[dict[str, Tensor]]], name: str, expected: list[Tensor]) -> None:
    assert len(seen) == len(expected)
    for after, x in zip(seen, expected, strict=True):
        torch.testing.assert_close(stacked(after, name), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_average(name: str) -> None:
    x = stacked(starts(), name)
    expected = [x]
    for step in range(1, 13):
        x = local(x, name)
        if step <= 2 or (step - 2) % 3 == 0:
            x = x.mean(0).expand_as(x)
        expected.append(x)
    assert_same(play("average(every=3, after=2)", starts(), 12, descending), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_average_on_two_levels(name: str) -> None:
    x = stacked(starts(), name)
    expected = [x]
    for step in range(1, 13):
        x = local(x, name)
        if step % 6 == 0:
            x = x.mean(0).expand_as(x)
        elif step % 2 == 0:
            x = torch.cat([x[:2].mean(0).expand_as(x[:2]), x[2:].mean(0).expand_as(x[2:])])
        expected.append(x)
    assert_same(play("average(every=2, then=6)", starts(), 12, descending), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_diloco(name: str) -> None:
    """Nesterov's momentum as torch.optim.SGD has it."""
    x = stacked(starts(), name)
    theta = torch.nn.Parameter(x[0].clone())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    expected = [x]
    for step in range(1, 13):
        x = local(x, name)
        if step % 4 == 0:
            theta.grad = theta.detach() - x.mean(0)
            outer.step()
            x = theta.detach().clone().expand_as(x)
        expected.append(x)
    assert_same(play("diloco(every=4)", starts(), 12, descending), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_streaming_diloco(name: str) -> None:
    fragment = NAMES.index(name) % 2
    x = stacked(starts(), name)
    theta, m, due = x[0], torch.zeros_like(x[0]), {}
    expected = [x]
    for step in range(1, 20):
        x = local(x, name)
        if step in due:
            change = due.pop(step)
            m = 0.9 * m + change
            theta = theta - 0.4 * (change + 0.9 * m)
            x = 0.25 * x + 0.75 * theta
        if step % 5 == (0, 2)[fragment]:
            due[step + 3] = theta - x.mean(0)
        expected.append(x)
    text = "diloco(every=5, lr=0.4, fragments=2, delay=3, alpha=0.25)"
    assert_same(play(text, starts(), 19, descending), name, expected)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_gradient_push(name: str, delay: int) -> None:
    """With the matrices of the paper; a message under way is a row of its own."""
    x, w = stacked(starts(), name), torch.ones(COUNT, dtype=torch.float64)
    wide = (COUNT,) + (1,) * (x.ndim - 1)
    due: dict[int, tuple[Tensor, Tensor]] = {}
    expected = [x]
    for step in range(1, 13):
        z = x / w.view(wide)
        x = x + (local(z, name) - z)
        if step in due:
            x, w = x + due[step][0], w + due[step][1]
            due.pop(step)
        hop = (1, 2)[(step - 1) % 2]
        sent = (x / 2).roll(hop, 0), (w / 2).roll(hop, 0)
        x, w = x / 2, w / 2
        if delay:
            due[step + delay] = sent
        else:
            x, w = x + sent[0], w + sent[1]
        expected.append(x / w.view(wide))
    text = f"gossip(every=1, delay={delay})"
    assert_same(play(text, starts(), 12, descending), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_elastic_averaging(name: str) -> None:
    """Replicas come to the centre one after the other, as servers take what comes."""
    x = [own[name] for own in starts()]
    centre, expected = x[0].clone(), [torch.stack(x)]
    for step in range(1, 13):
        x = list(local(torch.stack(x), name))
        for i in range(COUNT) if step % 3 == 0 else ():
            d = 0.8 / COUNT * (x[i] - centre)
            x[i], centre = x[i] - d, centre + d
        expected.append(torch.stack(x))
    assert_same(play("elastic(every=3, beta=0.8)", starts(), 12, descending), name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_pairs(name: str) -> None:
    """AD-PSGD's steps: all show what they have changed, then pairs average; who has been asked sees it
    when it looks the next time."""
    strategy = parse("pairs(every=2)")
    x = stacked(starts(), name)
    y, base, expected = x.clone(), x.clone(), [x.clone()]
    met = set()
    for step in range(1, 25):
        x = local(x, name)
        if step % 2 == 0:
            y = y + (x - base)
            x, base = y.clone(), y.clone()
            for i in range(COUNT):
                j = strategy.partner(step, i, range(COUNT))
                assert (j is None) == (i % 2 == 1)
                if j is not None:
                    met.add((i, j))
                    mean = (y[i] + y[j]) / 2
                    y[i], y[j], x[i], base[i] = mean, mean, mean, mean
        expected.append(x.clone())
    assert met == {(0, 1), (0, 3), (2, 1), (2, 3)}
    assert_same(play("pairs(every=2)", starts(), 24, descending), name, expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("diloco(every=3, lr=1.0, momentum=0.0)", "average(every=3)"),
        ("diloco(every=1, lr=1.0, momentum=0.0)", "average(every=1)"),
        ("diloco(every=4, fragments=1, delay=0, alpha=0.9)", "diloco(every=4)"),
        ("average(every=5, after=40)", "average(every=1)"),
        ("diloco(every=5, after=40)", "average(every=1)"),
        ("elastic(every=7, beta=0.9)", "elastic(every=7)"),
    ],
)
def test_what_is_the_same(one: str, other: str) -> None:
    first, second = (play(text, starts(), 24, descending) for text in (one, other))
    found = [
        difference(a, b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert max(found) < 1e-13


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("text", ["average(every=2, traffic={})", "diloco(every=2, traffic={})"])
def test_compressed_messages_end_near_the_exact_ones(text: str, compression: str) -> None:
    exact = play(text.format("fp32"), starts(), 80, descending)
    compressed = play(text.format(compression), starts(), 80, descending)
    gap = max(difference(a, b) for a, b in zip(exact[-1], compressed[-1], strict=True))
    assert 0 < gap < 2e-2
