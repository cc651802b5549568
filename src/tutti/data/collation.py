"""Joins samples to a batch, on the rank and in the process that read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from tutti.capture.forms import flattened
from tutti.data.sample_errors import leaf_names, shape_of
from tutti.errors import TuttiError
from tutti.torch_private.pytrees import tree_unflatten

Collate = Callable[..., Any]


class Collation:
    """A user's `collate_fn`, or PyTorch's own; `by_rows`: a row of a batch depends on its sample alone."""

    def __init__(self, collate_fn: Collate | None, *, by_rows: bool) -> None:
        self.collate_fn, self.by_rows = collate_fn, by_rows
        self.takes_length = collate_fn is not None and _takes(collate_fn, "length")

    @property
    def stacks(self) -> bool:
        """Whether PyTorch's own function joins the samples: it stacks samples of one shape."""
        return self.collate_fn is None

    def __call__(self, samples: list[Any], names: Sequence[str], bound: int | None) -> Any:
        """The batch; `names` are those of the samples."""
        if self.collate_fn is not None:
            named = {"length": bound} if self.takes_length and bound is not None else {}
            return self.collate_fn(samples, **named)
        try:
            return default_collate(samples)
        except Exception as error:
            refuse_unequal(samples, names, error)
            raise


def _takes(function: Collate, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def refuse_unequal(
    samples: list[Any], names: Sequence[str], error: Exception | None = None
) -> None:
    """Raise if a sample has another shape than the first."""
    first, form = flattened(samples[0])
    said = [shape_of(x) for x in first]
    for number, sample in enumerate(samples[1:], 1):
        leaves, its_form = flattened(sample)
        if its_form != form:
            where, one, other = "", "one structure", "another"
        else:
            shapes = [shape_of(x) for x in leaves]
            i = next((i for i, (a, b) in enumerate(zip(said, shapes, strict=True)) if a != b), None)
            if i is None:
                continue
            where = list(leaf_names(samples[0], "sample"))[i] + " has "
            one, other = said[i], shapes[i]
        raise TuttiError(
            f"samples of a batch differ: {where}{one} in {names[0]}, {other} in {names[number]}",
            why="without collate_fn the samples of a batch are stacked, so they need one shape",
            fix="a collate_fn that pads the samples",
        ) from error


def cut(batch: Any, num_samples: int, first: int, last: int) -> tuple[Any, list[bool]]:
    """Rows `first` to `last` of each tensor with `num_samples` rows; and which leaves are cut."""
    leaves, form = flattened(batch)
    marks = [isinstance(x, Tensor) and x.ndim > 0 and len(x) == num_samples for x in leaves]
    parts = [x[first:last].clone() if m else x for x, m in zip(leaves, marks, strict=True)]
    return tree_unflatten(parts, form), marks
