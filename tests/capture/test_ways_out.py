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

def seeded(x):
    torch.manual_seed(0)
    return x

def as_array(x):
    return [y.detach().numpy() for y in x]

def padded(x):
    return torch.nn.functional.pad(x, (0, x.sum().long()))

class Layer:
    def chosen(self, x):
        return [x[x > 0]][0]
"""
TRANSFORMERS = """
def forward(run, x):
    return run(x)

def _mask_hidden_states(run, x):
    return run(x)
"""


@pytest.fixture
def library(tmp_path: Path) -> Any:
    """A package among those that are installed."""
    return installed(tmp_path / "site-packages" / "thelibrary" / "guards.py", LIBRARY)


def installed(path: Path, source: str) -> Any:
    path.parent.mkdir(parents=True)
    path.write_text(source)
    spec: Any = importlib.util.spec_from_file_location("a_library", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(function: Any) -> CaptureError:
    def step(model: Any, x: Tensor) -> Tensor:
        return function(model(x)).sum()  # the user's call

    with pytest.raises(CaptureError) as found:
        tutti.distribute(step, nn.Linear(4, 4))(torch.ones(2, 4))
    return found.value


@pytest.mark.parametrize("name", ["told", "compared", "selected", "seeded", "as_array", "padded"])
def test_inside_a_library_the_users_call_is_named(library: Any, name: str) -> None:
    error = refused(getattr(library, name))
    assert "# the user's call" in error.at and __file__ in error.at
    assert f"thelibrary does so in {name}" in error.why and "guards.py:" in error.why
    assert "torch.where" not in error.fix and "thelibrary" in error.fix
    assert f"a function of your own in place of {name};" in error.fix


def test_a_method_of_a_library_is_named_with_its_class(library: Any) -> None:
    error = refused(library.Layer().chosen)
    assert "thelibrary does so in Layer.chosen" in error.why
    assert "a subclass of Layer with a chosen of your own" in error.fix


@pytest.mark.parametrize(
    ("file", "name", "option"),
    [
        ("integrations/moe.py", "forward", 'model.set_experts_implementation("batched_mm")'),
        ("models/whisper/modeling_whisper.py", "_mask_hidden_states", "apply_spec_augment = False"),
    ],
)
def test_an_option_of_transformers_is_named(
    library: Any, tmp_path: Path, file: str, name: str, option: str
) -> None:
    path = tmp_path / "site-packages" / "transformers" / file
    caller = getattr(installed(path, TRANSFORMERS), name)
    error = refused(lambda x: caller(library.selected, x))
    assert option in error.fix


def test_a_size_that_is_a_value() -> None:
    """PyTorch's own text names its sources."""
    error = refused(lambda x: torch.nn.functional.pad(x, (0, x.sum().long())))
    assert "a plain number decides a size" in error.what
    assert "the user's call" in error.at or "pad(" in error.at


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
