"""The arguments of `tutti.distribute` and `tutti.verify`: a step, its model and optimizer, and its layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tutti.argument_types import check_type
from tutti.capture.state.models import as_one_module
from tutti.errors import LayoutError, ShardingError, TuttiError
from tutti.graph.randomness.seed import checked_seed
from tutti.layout import Layout
from tutti.propagate.batch_dim import BatchDim, Dims, dims_of
from tutti.propagate.empty_batch import refuse_empty

_WITH_OPTIMIZER = "train_step(model, optimizer, *batch)"


@dataclass(frozen=True, eq=False)
class Job:
    """A training step under a layout.

    Args:
        train_step: called as `train_step(model, optimizer, *batch)`; without an optimizer as
            `train_step(model, *batch)`.
        model: one module, which contains all modules that the user gave as the model.
        optimizer: an optimizer, a list, tuple or dict of them, or None.
        layout: such as `data=2 tensor=2`.
        place: compute shardings by parameter-name pattern.
        cut: names of modules at which the stages of a pipeline begin.
        batch_dim: the dims of samples, as the user gave them.
        seed: of random ops such as dropout; 64 bits.
        found: compute shardings that a plan has found for parameters without one in `place`; without it the
            first call searches.
        by_hand: the step trains weights without an optimizer.
    """

    train_step: Callable[..., Any]
    model: nn.Module
    optimizer: Any
    layout: Layout
    place: Mapping[str, str]
    cut: tuple[str, ...]
    batch_dim: BatchDim
    seed: int
    found: Mapping[str, str] | None = None
    by_hand: bool = False

    @classmethod
    def of(
        cls,
        train_step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        layout: Layout,
        *,
        place: Mapping[str, str] | None = None,
        cut: str | Sequence[str] = (),
        batch_dim: BatchDim = None,
        seed: int = 0,
        found: Mapping[str, str] | None = None,
    ) -> Job:
        """The job of a user's arguments.

        Raises:
            LayoutError: for a `batch_dim` under a layout with replicas, or a `cut` that is no names.
            ShardingError: for a `place` that is no mapping of texts.
            TuttiError: for a step that cannot be called with a model and an optimizer, a model without a
                module, or a seed that is not an integer of 64 bits.
        """
        _refuse_other_steps(train_step, model, optimizer)
        _refuse_batch_dim(batch_dim, layout)
        train_step, module = as_one_module(train_step, model)
        numbers = batch_dim, checked_seed(seed)
        rest = _checked_place(place), _checked_cut(cut), *numbers, found
        return cls(train_step, module, optimizer, layout, *rest)

    @property
    def trained(self) -> tuple[Callable[..., Any], nn.Module, Any]:
        """The step, the model and the optimizer."""
        return self.train_step, self.model, self.optimizer

    @property
    def step_name(self) -> str:
        """The name of the training step, or of its class."""
        return _name_of(self.train_step)

    def dims(self, batch: Sequence[Any]) -> Dims | None:
        """The entries of `batch_dim` for the tensors of a batch; None if the user did not give it.

        Raises `ShardingError` for a missing argument, or a dim that a tensor does not have.
        """
        if self.batch_dim is None:
            return None
        return dims_of(self.batch_dim, self.train_step, batch, first=self._num_before)

    def refuse_empty(self, batch: Sequence[Any]) -> None:
        """Raise `ShardingError` for a batch of 0 samples."""
        refuse_empty(batch, self.batch_dim, self.train_step, first=self._num_before)

    @property
    def _num_before(self) -> int:
        """The number of arguments of the step before the batch."""
        return 2 if self.optimizer else 1


def _refuse_other_steps(train_step: Any, model: Any, optimizer: Any) -> None:
    """Raise `TuttiError` for a step that no call can reach with these arguments."""
    expected = "train_step(model, *batch)" if optimizer is None else _WITH_OPTIMIZER
    if not callable(train_step) or train_step is model:
        given = "the model" if train_step is model else repr(train_step)
        raise TuttiError(
            f"the training step is {given}, where a function belongs",
            why=f"it is called as {expected}, and holds the forward, the loss, the backward and the update",
            fix="def train_step(model, optimizer, x, y): ...; tutti.distribute(train_step, model, optimizer)",
        )
    called = train_step.forward if isinstance(train_step, nn.Module) else train_step
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of an extension module
        return
    given = (model,) if optimizer is None else (model, optimizer)
    try:
        signature.bind_partial(*given)
    except TypeError as error:
        raise TuttiError(
            f"the training step {_name_of(train_step)}{signature} does not take these arguments: {error}",
            why=f"it is called as {expected}",
            fix=f"def {expected.replace('*batch', 'x, y')}: ...",
        ) from None


def _checked_place(place: Any) -> dict[str, str]:
    if place is None:
        return {}
    fix = 'a text for each pattern of names, such as place={"*.q_proj.weight": "tensor, -"}'
    wrong: Any = {"fix": fix, "error": ShardingError}
    check_type("place", place, Mapping, wanted="a mapping", **wrong)
    for name, text in place.items():
        check_type("a name in place", name, str, wanted="a text", **wrong)
        check_type(
            f"place[{name!r}]", text, str, wanted="a text with an entry for each dim", **wrong
        )
    return dict(place)


def _checked_cut(cut: Any) -> tuple[str, ...]:
    wrong: Any = {"fix": 'cut=["layers.4"], or leave cut out', "error": LayoutError}
    if isinstance(cut, str):
        return (cut,)
    check_type("cut", cut, Sequence, wanted="a name of a module or a sequence of them", **wrong)
    for k, name in enumerate(cut):
        check_type(f"cut[{k}]", name, str, wanted="a name of a module", **wrong)
    return tuple(cut)


def _refuse_batch_dim(told: BatchDim, layout: Layout) -> None:
    """Refuse `batch_dim` with replicas, which take their rows of dim 0 before capture."""
    if told is not None and layout.num_replicas > 1:
        raise LayoutError(
            f'batch_dim cannot be told under layout "{layout}"',
            why="each replica takes its rows of dim 0 of the batch",
            fix="leave batch_dim out, and the replicas, or give the step the samples as dim 0",
        )


def _name_of(train_step: Any) -> str:
    return getattr(train_step, "__name__", type(train_step).__name__)
