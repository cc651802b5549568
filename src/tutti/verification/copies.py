"""Copies a model and its optimizers together, including attributes and hooks.

`copy.deepcopy` keeps only the values of a parameter, and does not copy functions: a step or a hook that
reaches the given model by its closure, or by the object of its method, still reaches that one. During a
comparison the copies replace it there.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.python.findings import Findings
from tutti.capture.python.held_values import MISSING, named
from tutti.capture.python.identities import Identities, replaced_inside
from tutti.capture.python.python_state import PythonState
from tutti.capture.state.gradient_hooks import carry_hooks
from tutti.capture.state.lift import called_optimizers
from tutti.capture.state.optimizer_copies import Memo, copied, optimizers_copied_whole


@contextlib.contextmanager
def copies_in_place(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[Callable[..., Any], nn.Module, Any]]:
    """Context with the step, and copies of the model and the optimizer, to run instead.

    Inside, the copies and their parts replace the given ones wherever `train_step` reaches these, also in
    the `arguments` that it gets as they are. The context undoes its other changes at the end.
    """
    memo: Memo = {}
    made = copies_of(model, optimizer, memo)

    def copy_of(value: Any) -> Any:
        copied_kind = isinstance(value, Optimizer | nn.Module | Tensor | dict | list)
        return memo.get(id(value), value) if copied_kind else value

    python = PythonState(train_step, model, called_optimizers(optimizer), Findings(), arguments)
    with python.restored(), warnings.catch_warnings():
        # The copy has its own `step`, without the wrapper by which a schedule notices its calls.
        warnings.filterwarnings("ignore", "Seems like `optimizer.step")
        for _, entry, value in list(named(python.tables)):
            held = entry.table.find()
            # its holder may have a copy, too, which holds the copies already
            if value is MISSING or id(held) in memo or not entry.table.writable:
                continue
            new = replaced_inside(value, copy_of)
            if new is not value:
                entry.put(new)
        step = replaced_inside(train_step, copy_of)
        tensors = {i: x for i, x in memo.items() if isinstance(x, Tensor)}
        of_copies = PythonState(step, made[0], called_optimizers(made[1]), Findings(), arguments)
        with Identities(tensors).inside_of(of_copies.tables):
            yield step, *made


def copies_of(model: nn.Module, optimizer: Any, memo: Memo | None = None) -> tuple[nn.Module, Any]:
    """Copies of both, whose mutual references are to the copies. `memo` gets all copies by id."""
    memo = {} if memo is None else memo
    memo |= _made_by_hooks(model)
    # so this also copies an optimizer of a scheduler, a model or another optimizer
    with optimizers_copied_whole():
        made = copy.deepcopy(model, memo)
        for old, new in zip(model.parameters(), made.parameters(), strict=True):
            for name, value in vars(old).items():
                vars(new).setdefault(name, copied(value, memo))
        optimizers = copy.deepcopy(optimizer, memo)
    carry_hooks(model, made)
    return made, optimizers


def _made_by_hooks(model: nn.Module) -> Memo:
    """Tensors of modules computed from parameters at each call (`weight_norm`), without their history.

    In the form of `deepcopy`'s memo: PyTorch copies no tensor with a history.
    """
    held = (x for module in model.modules() for x in vars(module).values())
    return {id(x): x.detach() for x in held if isinstance(x, Tensor) and not x.is_leaf}
