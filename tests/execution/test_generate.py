"""Generated code: names of values that are gone are used again."""

from __future__ import annotations

import re
from operator import getitem

import torch
from torch import fx, nn

from small_programs import Builder
from tutti.execution.generate import Generated, generate
from tutti.graph.ops.fused_updates import KERNELS
from tutti.graph.ops.matmul import matmul
from tutti.graph.ops.overwriting import overwriting_lists
from tutti.layout import Mesh

aten = torch.ops.aten
found = overwriting_lists(aten._foreach_add.Scalar)
assert found is not None
add_to_each = found.function


def generated(graph: fx.Graph) -> Generated:
    return generate(graph, nn.Module(), None, Mesh(()), {})


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bv\d+\b", text))


def test_a_long_chain_takes_few_names() -> None:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    value = x
    for _ in range(50):
        value = b.call(aten.add.Tensor, value, x)
    made = generated(b.done([value], []))
    assert len(names_in(made.text)) <= 4
    (result,), _ = made.function([torch.ones(3)], None)
    assert torch.equal(result, torch.full((3,), 51.0))


def test_living_values_keep_their_names() -> None:
    b = Builder()
    x = b.given("x", 3, kind="batch")
    kept = [x]
    for k in range(20):
        unused = b.call(aten.mul.Tensor, kept[-1], 3)
        b.call(aten.neg.default, unused)
        kept.append(b.call(aten.add.Tensor, kept[-1], k))
    made = generated(b.done(kept[1:], []))
    assert 20 <= len(names_in(made.text)) <= 25
    results, _ = made.function([torch.zeros(3)], None)
    assert [float(r[0]) for r in results] == [k * (k + 1) / 2 for k in range(20)]


def test_a_matmul_has_no_python_function_in_between() -> None:
    """One with a bias that does not lie in one piece too."""
    b = Builder()
    x, w, c = b.given("x", 64, 32, kind="batch"), b.given("w", 48, 32), b.given("c", 48)
    made = generated(b.done([b.call(matmul, x, w, c, shape=(64, 48))], []))
    given = [torch.randn(64, 32), torch.randn(48, 32), torch.randn(96)[::2]]
    want = torch.nn.functional.linear(*given)
    if torch.backends.mkldnn.is_available():
        (result,), _ = made.function(list(given), None)
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    called = [f for n, f in made.function.__globals__.items() if n.startswith("c") and callable(f)]
    assert called and not any(hasattr(f, "__code__") for f in called)


def test_what_is_overwritten_keeps_its_name() -> None:
    """No line for a result that is its operand, and no name for what nobody needs."""
    b = Builder()
    w, g, steps = b.given("w", 3), b.given("g", 3, kind="batch"), b.given("steps", 3)
    counted = b.call(add_to_each, [steps], 1, shape=(3,))
    kernel = next(k for k in KERNELS if k.name == "sgd")
    numbers = (
        dict.fromkeys(kernel.numbers, 0.0) | dict.fromkeys(kernel.switches, False) | {"lr": 0.5}
    )
    updated = b.graph.call_function(kernel.overwriting, ([w], [g], []), numbers)
    new, new_steps = (
        b.call(getitem, updated, 0, shape=(3,)),
        b.call(getitem, counted, 0, shape=(3,)),
    )
    twice = b.call(aten.mul.Tensor, new, 2)
    made = generated(b.done([twice], [new, new_steps]))
    body = made.text.splitlines()[2:]
    assert len(body) == 4 and not any(line.strip().startswith("v") for line in body[:2])
    given = torch.ones(3), torch.ones(3), torch.zeros(3)
    (result,), state = made.function(list(given), None)
    assert torch.equal(result, torch.ones(3)) and state[0] is given[0] and state[1] is given[2]
    assert torch.equal(given[0], torch.full((3,), 0.5)) and torch.equal(given[2], torch.ones(3))


def test_a_value_lives_as_long_as_any_name_for_it() -> None:
    """What stands for an operand is needed after the operand's own last line, and then let go."""
    b = Builder()
    x = b.given("x", 3, kind="batch")
    fresh = b.call(aten.add.Tensor, x, 1)
    again = b.call(getitem, b.call(add_to_each, [fresh], 1, shape=(3,)), 0, shape=(3,))
    other = b.call(aten.mul.Tensor, x, 3)
    made = generated(b.done([b.call(aten.add.Tensor, again, other)], []))
    (result,), _ = made.function([torch.zeros(3)], None)
    assert torch.equal(result, torch.full((3,), 2.0))
    first, _, between, last, _ = made.text.splitlines()[2:]
    name = first.split()[0]
    assert f"del {name}" not in between and name in last.partition("del")[2]
