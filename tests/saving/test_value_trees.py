"""What a step leaves in Python goes on after a checkpoint: tuples, lists, dicts, texts, numbers in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from as_eager import Program
from capture import test_left_values as left
from tutti.errors import CheckpointError
from tutti.saving.value_trees import built, flat, name_of

TREES = [
    (torch.ones(2), 3, 2.5, True, None, "text", ""),
    [],
    (),
    {},
    {"a": [torch.zeros(()), (1,)], 2: {"b": ()}, (1, "x"): None},
    [[torch.tensor([1, 2])], {"é": "ü@x"}],
]


@pytest.mark.parametrize("value", TREES, ids=str)
def test_trees_come_back(value: Any) -> None:
    saved = dict(flat("python.state['x@y']", value))
    assert {name_of(name) for name in saved} == {"python.state['x@y']"}
    assert str(built(saved, None)) == str(value)


def test_named_tuples_come_back_in_the_place_of_one() -> None:
    saved = dict(flat("kept", left.Pair(torch.ones(1), 2)))
    assert built(saved, left.Pair(0, 0)) == left.Pair(torch.ones(1), 2)
    with pytest.raises(CheckpointError, match='has a named tuple for "kept"'):
        built(saved, (0, 0))


def test_what_no_tensor_can_hold_stays_as_it_is() -> None:
    saved = dict(flat("kept", (torch.ones(1), torch.relu)))
    assert built(saved, (torch.zeros(1), torch.tanh)) == (torch.ones(1), torch.tanh)
    with pytest.raises(CheckpointError, match='"kept" holds a value that no checkpoint has'):
        built(saved, None)


def resumed(program: Callable[[], Program], path: Path | None) -> list[float]:
    torch.manual_seed(0)
    train_step, model, optimizer, batch = program()
    step = tutti.distribute(train_step, model, optimizer)
    if path is not None and path.exists():
        step.load(path)
        return [float(step(*batch)) for _ in range(2)]
    losses = [float(step(*batch)) for _ in range(3)]
    if path is not None:
        step.save(path)
    return [*losses, *(float(step(*batch)) for _ in range(2))][3:]


@pytest.mark.parametrize(
    "program",
    [
        *(left.tuple_from_none, left.named_tuple_with_a_count, left.items_from_none, left.new_dict),
        *(left.tuple_of_a_parameter, left.nested_lists_of_a_parameter, left.tuple_of_a_group),
    ],
    ids=lambda x: x.__name__,
)
def test_a_loaded_step_goes_on(program: Callable[[], Program], tmp_path: Path) -> None:
    whole = resumed(program, tmp_path / "saved")
    assert resumed(program, tmp_path / "saved") == pytest.approx(whole, rel=1e-6)
