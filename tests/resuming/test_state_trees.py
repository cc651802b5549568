"""State dicts come back equal, with their types; what is no state is refused by its keys."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tutti.errors import CheckpointError
from tutti.resuming.state_trees import TreeReader, TreeWriter, forms_in


def through_json(value: Any) -> Any:
    """The value after a save and a load."""
    writer = TreeWriter("part/")
    tree = json.loads(json.dumps(writer.write(value, "part"), allow_nan=False))
    forms = forms_in(tree)
    assert {n: (x.shape, x.dtype) for n, x in forms.items()} == {
        n: (x.shape, x.dtype) for n, x in writer.tensors.items()
    }
    return TreeReader(writer.tensors).read(tree)


def assert_equal(found: Any, expected: Any) -> None:
    """Equal in values, types and order."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        return
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(map(repr, found)) == list(map(repr, expected))
        for (a, x), (b, y) in zip(found.items(), expected.items(), strict=True):
            assert_equal(a, b)
            assert_equal(x, y)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert_equal(x, y)
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    elif isinstance(expected, frozenset):
        assert found == expected
    else:
        assert found == expected and repr(found) == repr(expected)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(math.pi)])
    | st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), 2**200])
)
KEYS = (
    st.text()
    | st.integers()
    | st.booleans()
    | st.none()
    | st.tuples(st.integers(), st.text())
    | st.just("!")
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(TREES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert_equal(through_json(value), value)


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randint(2, (3, 2)).to(dtype)
    found = through_json({"x": [x, x[0, 0], x[:0], x.T]})
    for a, b in zip(found["x"], [x, x[0, 0], x[:0], x.T], strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        raw = [y.flatten().view(torch.uint8).tolist() for y in (a, b)]
        assert raw[0] == raw[1]


@pytest.mark.parametrize("dtype", ["f4", ">i2", "U3", "M8[s]", "?", "c16"])
def test_arrays_of_numpy(dtype: str) -> None:
    x = np.zeros((2, 3), dtype)
    assert_equal(through_json({"x": x, "t": x.T}), {"x": x, "t": x.T})


def test_states_of_random_generators_and_schedules() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    for state in (*states, schedule.state_dict(), model.state_dict(), optimizer.state_dict()):
        found = through_json(state)
        if isinstance(state, OrderedDict):
            assert type(found) is OrderedDict
        assert_equal(found, state)


class Own:
    """No state."""


def itself() -> list[Any]:
    """A list that contains itself."""
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"a": [1, (2, print)]}, "part['a'][1][1]", "builtin_function_or_method"),
        ({"a": {3: Own()}}, "part['a'][3]", "Own"),
        ({(1, Own): 2}, "a key of part[1]", "type"),
        (itself(), "part[0]", "contains itself"),
        ({"x": torch.eye(2).to_sparse()}, "part['x']", "sparse"),
        ({"x": np.array([Own()])}, "part['x']", "dtype object"),
        ({"x": torch.empty(2, device="meta")}, "part['x']", "meta"),
    ],
)
def test_what_is_no_state_is_refused_by_its_keys(value: Any, path: str, why: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        TreeWriter("part/").write(value, "part")
    assert caught.value.what == f"{path} cannot be saved" and why in caught.value.why


@pytest.mark.parametrize(
    "tree",
    [
        {"!": "eval", "of": "1"},
        {"!": "tensor", "name": "other"},
        {"!": "numpy", "dtype": "O", "shape": [1], "of": {"!": "tensor", "name": "x"}},
        {"!": "numpy", "dtype": "f8", "of": "a"},
        {"!": "dtype", "of": "load"},
        {"!": "tuple"},
        {"!": ["tuple"], "of": []},
    ],
)
def test_trees_that_no_save_writes_are_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        TreeReader({"x": torch.zeros(8, dtype=torch.uint8)}).read({"a": [tree]})


def test_forms_of_hostile_tensors_are_refused() -> None:
    for form in ({"shape": [-1], "dtype": "float32"}, {"shape": [1], "dtype": "load"}):
        with pytest.raises(CheckpointError, match="cannot be read"):
            forms_in([{"!": "tensor", "name": "x", "device": "cpu", **form}])
