"""Rules that are worked out from shapes, on shapes that nobody thought of."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force import check
from tutti.rules.families.views import reshape_factors
from tutti.rules.samples.sample import f, flags, ints, sample

few = settings(max_examples=30, derandomize=True)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
shapes = st.lists(sizes, min_size=1, max_size=4)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of the same elements: primes grouped in two ways, in the same order."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3]), min_size=1, max_size=7))

    def grouped() -> list[int]:
        shape, size = [], 1
        for prime in primes:
            size *= prime
            if draw(st.booleans()):
                shape.append(size)
                size = 1
        shape = [*shape, size] if size > 1 else shape
        at = draw(st.integers(0, len(shape)))
        return [*shape[:at], *[1] * draw(st.integers(0, 1)), *shape[at:]]

    return grouped(), grouped()


@few
@given(reshapes())
def test_reshape(pair: tuple[list[int], list[int]]) -> None:
    before, after = pair
    check(sample("reshape", f(*before), after), thorough=len(before) < 4)


@given(shapes, st.data())
def test_reshape_factors_make_up_both_shapes(before: list[int], data: st.DataObject) -> None:
    after = data.draw(st.permutations(before))
    left, right, factors = reshape_factors(tuple(before), tuple(after))
    for shape, term in ((before, left), (after, right)):
        for size, names in zip(shape, term, strict=True):
            product = math.prod(factors[n] for n in names)
            assert not names or product == size


@few
@given(shapes, st.data())
def test_broadcasting(shape: list[int], data: st.DataObject) -> None:
    def stretched() -> list[int]:
        kept = [n if data.draw(st.booleans()) else 1 for n in shape]
        return kept[data.draw(st.integers(0, len(kept))) :]

    check(sample("mul.Tensor", f(*shape), f(*stretched())), thorough=False)
    check(sample("add.Tensor", f(*stretched()), f(*shape)), thorough=False)
    check(sample("where.self", flags(*stretched()), f(*shape), f(*stretched())), thorough=False)
    grown = [*stretched()]
    check(sample("expand", f(*grown), shape), thorough=False)


@few
@given(shapes, st.data())
def test_reductions(shape: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    signed = [d - len(shape) * data.draw(st.integers(0, 1)) for d in dims]
    keep = data.draw(st.booleans())
    for op in ("sum.dim_IntList", "amax", "logsumexp", "var_mean.correction"):
        kwargs = {"correction": 0, "keepdim": keep} if "correction" in op else {}
        check(sample(op, f(*shape), signed, *(() if kwargs else (keep,)), **kwargs), thorough=False)


@few
@given(shapes, st.data())
def test_cuts(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[dim]
    start = data.draw(st.integers(0, size - 1))
    check(sample("slice.Tensor", f(*shape), dim, start, size), thorough=False)
    check(sample("select.int", f(*shape), dim, start), thorough=False)
    check(sample("cat", [f(*shape), f(*shape)], dim), thorough=False)
    check(sample("stack", [f(*shape), f(*shape)], dim), thorough=False)
    order = data.draw(st.permutations(range(len(shape))))
    check(sample("permute", f(*shape), order), thorough=False)


@few
@given(shapes, st.data())
def test_looking_up(shape: list[int], data: st.DataObject) -> None:
    common = data.draw(st.lists(sizes, min_size=1, max_size=2))
    indices = [ints(n, *common) if data.draw(st.booleans()) else None for n in shape]
    if not any(indices):
        indices[0] = ints(shape[0], *common)
    check(sample("index.Tensor", f(*shape), indices), thorough=False)
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = ints(shape[dim], *shape[:dim], data.draw(sizes), *shape[dim + 1 :])
    check(sample("gather", f(*shape), dim, index), thorough=False)
    check(sample("scatter_add", f(*shape), dim, index, f(*index.shape)), thorough=False)


def test_common_factors_are_cut_off_at_the_major_end() -> None:
    assert reshape_factors((4, 6, 12), (24, 12))[:2] == (
        (("f0",), ("f1",), ("f2",)),
        (("f0", "f1"), ("f2",)),
    )
    left, right, factors = reshape_factors(
        (6, 4), (4, 6)
    )  # halves of the rows are halves of the rows
    assert left[0][0] == right[0][0] and factors[left[0][0]] == 2
    assert reshape_factors((3, 4), (4, 3))[:2] == (((), ()), ((), ()))
