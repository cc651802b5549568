"""Generated code: names of values that are gone are used again."""

from __future__ import annotations

import re

import torch
from torch import fx, nn

from small_programs import Builder
from tutti.graph.product import product
from tutti.layout import Mesh
from tutti.runtime.generate import Generated, generate

aten = torch.ops.aten


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


def test_a_product_has_no_python_function_in_between() -> None:
    """One with a bias that does not lie in one piece too."""
    b = Builder()
    x, w, c = b.given("x", 64, 32, kind="batch"), b.given("w", 48, 32), b.given("c", 48)
    made = generated(b.done([b.call(product, x, w, c, shape=(64, 48))], []))
    given = [torch.randn(64, 32), torch.randn(48, 32), torch.randn(96)[::2]]
    want = torch.nn.functional.linear(*given)
    if torch.backends.mkldnn.is_available():
        (result,), _ = made.function(list(given), None)
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    called = [f for n, f in made.function.__globals__.items() if n.startswith("c") and callable(f)]
    assert called and not any(hasattr(f, "__code__") for f in called)
