"""Copies a model and its optimizers together, including attributes and hooks.

`copy.deepcopy` keeps only the values of a parameter, and does not copy functions: a step or a hook that
reaches the given model by its closure, or by the object of its method, still reaches that one. During a
comparison the copies replace it there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.python.held_values import MISSING, named
from tutti.capture.python.identities import Identities
from tutti.capture.python.python_state import Findings, PythonState
from tutti.capture.state.gradients import carry_hooks
from tutti.capture.state.lift import optimizers_of
from tutti.capture.state.optimizer_copies import Memo, copied, optimizers_copied_whole


@contextlib.contextmanager
def copies_in_place(
    train_step: Callable[..., Any], model: nn.Module, optimizer: Any
) -> Iterator[tuple[Callable[..., Any], nn.Module, Any]]:
    """Context with the step, and copies of the model and the optimizer, to run instead.

    Inside, the copies and their parts replace the given ones wherever `train_step` reaches these. The context
    undoes its other changes at the end.
    """
    memo: Memo = {}
    made = copies_of(model, optimizer, memo)
    python = PythonState(train_step, model, optimizers_of(optimizer), Findings())
    with python.restored(), warnings.catch_warnings():
        # The copy has its own `step`, without the wrapper by which a schedule notices its calls.
        warnings.filterwarnings("ignore", "Seems like `optimizer.step")
        for _, entry, value in list(named(python.tables)):
            held = entry.table.find()
            # its holder may have a copy, too, which holds the copies already
            if value is MISSING or id(held) in memo or not entry.table.writable:
                continue
            new = _stand_in(value, memo)
            if new is not value:
                entry.put(new)
        step = _stand_in(train_step, memo)
        tensors = {i: x for i, x in memo.items() if isinstance(x, Tensor)}
        of_copies = PythonState(step, made[0], optimizers_of(made[1]), Findings())
        with Identities(tensors).inside_of(of_copies.tables):
            yield step, *made


def _stand_in(value: Any, memo: Mapping[int, Any]) -> Any:
    """The copy of `value`, or `value` bound to copies; else `value` itself."""
    if isinstance(value, Optimizer | nn.Module | Tensor | dict | list):
        return memo.get(id(value), value)
    if type(value) is tuple:
        parts = tuple(_stand_in(x, memo) for x in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if isinstance(value, types.MethodType):
        holder = _stand_in(value.__self__, memo)
        return value if holder is value.__self__ else types.MethodType(value.__func__, holder)
    if type(value) is functools.partial:
        function, given = _stand_in(value.func, memo), _stand_in(value.args, memo)
        named = {key: _stand_in(x, memo) for key, x in value.keywords.items()}
        return functools.partial(function, *given, **named)
    return value


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
