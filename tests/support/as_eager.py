"""A program played by tutti next to plain PyTorch, in float64: here, on virtual ranks, or on ranks of a pool.

def program(): ...       # at module level: what `tutti.distribute` takes, and the batch
assert_as_eager(program)
assert_as_eager_on_ranks(ranks, program, "data=2")
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tutti
from ranks import Ranks
from runs import whole
from tutti.capture.forms import flattened, returnable
from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.capture.state.lift import state_of
from tutti.capture.state.models import as_one_module

CALLS = 3
TOLERANCE = 1e-10
Program = tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]
Found = tuple[list[NDArray[Any]], dict[str, NDArray[Any]]]


@contextmanager
def _built(program: Callable[[], Program]) -> Iterator[Program]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(compile|AccumulateGrad|sparse|Sparse).*")
            yield program()
    finally:
        torch.set_default_dtype(before)


def eager(program: Callable[[], Program], calls: int = CALLS) -> Found:
    """What some calls return, and the state after them, by plain PyTorch; random ops draw tutti's numbers."""
    with _built(program) as (step, model, optimizer, batch):
        args = (model,) if optimizer is None else (model, optimizer)
        returned = []
        for k in range(calls):
            with OurRandomness(0, k) as ours, rewinding(ours):
                returned += _arrays(step(*args, *batch))
        state = state_of(as_one_module(step, model)[1], optimizer)
        return returned, {s.name: _array(s.tensor) for s in state}


def played(program: Callable[[], Program], layout: str, calls: int = CALLS) -> Found:
    """The same by a distributed step."""
    with _built(program) as (train_step, model, optimizer, batch):
        step = tutti.distribute(train_step, model, optimizer, layout)
        returned = [x for _ in range(calls) for x in _arrays(step(*batch))]
        return returned, {n: _array(whole(x)) for n, x in step.state_dict().items()}


def assert_as_eager(
    program: Callable[[], Program], layout: str = "data=2 zero=1", calls: int = CALLS
) -> None:
    """One device gives eager's numbers, and `layout` those of one device."""
    _assert_equal(played(program, "", calls), eager(program, calls))
    with _built(program) as (train_step, model, optimizer, batch):
        found = tutti.verify(train_step, model, optimizer, batch, layout)
    assert found.ok, str(found)
    assert found.num_tensors > 2, str(found)


def assert_as_eager_on_ranks(
    ranks: Ranks, program: Callable[[], Program], layout: str, calls: int = CALLS
) -> None:
    """Two real ranks give eager's numbers."""
    expected = eager(program, calls)
    for found in ranks.run(_on_rank, program.__module__, program.__name__, layout, calls, n=2):
        _assert_equal(found, expected)


def _on_rank(module: str, name: str, layout: str, calls: int) -> Found:
    return played(getattr(importlib.import_module(module), name), layout, calls)


def _assert_equal(found: Found, expected: Found) -> None:
    assert len(found[0]) == len(expected[0])
    for x, y in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)
    for name, y in expected[1].items():
        x = found[1][name]
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def _arrays(returned: Any) -> list[NDArray[Any]]:
    leaves = flattened(returnable(returned))[0]
    return [_array(x) for x in leaves if isinstance(x, Tensor | int | float)]


def _array(x: Tensor | float) -> NDArray[Any]:
    if not isinstance(x, Tensor):
        return np.asarray(x)
    x = x.detach()
    return (x.to_dense() if x.is_sparse else x).numpy().copy()
