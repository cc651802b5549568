"""Small checkpoints, written and read without a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.files import Reading, write_checkpoint
from tutti.checkpoint.folder import open_folder
from tutti.checkpoint.manifest import Manifest, TensorForm
from tutti.checkpoint.share_plans import share_planner
from tutti.checkpoint.unanimous import Unanimous

ALONE = Unanimous(None)


def state(number: int) -> dict[str, Tensor]:
    """Tensors of several dtypes, other ones for each number."""
    generator = torch.Generator().manual_seed(number)
    return {
        "up.weight": torch.randn(8, 4, generator=generator),
        "up.bias": torch.randn(8, generator=generator, dtype=torch.float64),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "num_steps": torch.tensor(number),
        "none": torch.empty(0, 3),
    }


def save(path: Path, number: int, ranks: Unanimous = ALONE) -> None:
    """Save `state(number)`, under the folder's lock."""
    given = state(number)
    forms = {n: TensorForm(tuple(x.shape), x.dtype) for n, x in given.items()}
    manifest = Manifest("", "", forms, "", {}, {"number": number, "losses": [0.25, 1.5]})
    lock = open_folder(path)
    try:
        write_checkpoint(path, share_planner(given), manifest, ranks)
    finally:
        lock.close()


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor that the manifest names, and what else it says."""
    reading = Reading(path, ALONE)
    forms = reading.manifest.tensors
    found = {n: torch.full(form.shape, 77, dtype=form.dtype) for n, form in forms.items()}
    reading.fill(found)
    return found, reading.manifest.extra


def number_of(path: Path) -> int:
    """Which save the folder holds, after looking that all of it is of that save."""
    found, extra = load(path)
    number = extra["number"]
    expected = state(number)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
    return number
