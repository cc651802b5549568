"""The way out of a value that is read: in a line of the user's own, in an assertion, inside a library."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.errors import CaptureError

LIBRARY = """
import torch

def told(x):
    return x, f"the sum is {x.sum().item():.3f}"

def compared(x):
    return x if float(x.sum()) > 0 else -x

def selected(x):
    return x[x > 0]
"""


@pytest.fixture
def library(tmp_path: Path) -> Any:
    """A package among those that are installed."""
    path = tmp_path / "site-packages" / "thelibrary" / "guards.py"
    path.parent.mkdir(parents=True)
    path.write_text(LIBRARY)
    spec: Any = importlib.util.spec_from_file_location("thelibrary_guards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(function: Any) -> CaptureError:
    def step(model: Any, x: Tensor) -> Tensor:
        return function(model(x)).sum()  # the user's call

    with pytest.raises(CaptureError) as found:
        tutti.distribute(step, nn.Linear(4, 4))(torch.ones(2, 4))
    return found.value


@pytest.mark.parametrize("name", ["told", "compared", "selected"])
def test_inside_a_library_the_users_call_is_named(library: Any, name: str) -> None:
    error = refused(getattr(library, name))
    assert "# the user's call" in error.at and __file__ in error.at
    assert f"thelibrary does so in {name}" in error.why and "guards.py:" in error.why
    assert "torch.where" not in error.fix and "thelibrary" in error.fix


def test_a_line_of_the_users_own() -> None:
    def converting(x: Tensor) -> Tensor:
        return x / int(x.sum())  # here

    error = refused(converting)
    assert "# here" in error.at and "x.long().item()" in error.fix


def test_an_assertion() -> None:
    assert "PYTHONOPTIMIZE=1" in refused(_asserting).fix


def _asserting(x: Tensor) -> Tensor:
    assert float(x.detach().abs().max()) < 1e3, "values"
    return x
