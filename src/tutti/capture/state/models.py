"""The user's model as one module: a module, one in a wrapper, or several in a dict, a list or a tuple.

The state has the names of one module: of the module inside the wrappers, so that checkpoints do not depend on
them, or of a holder: `{"G": ..., "D": ...}` has `G.weight`. The step receives the user's model itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from tutti.capture.patch_table import WRAPPERS
from tutti.capture.substitutes.sparse import refuse_sparse_state
from tutti.errors import CaptureError, TuttiError
from tutti.graph.edits.patch import replaced
from tutti.torch_private.compiled_code import OptimizedModule, plain, plain_module
from tutti.torch_private.module_tables import children_of


class Models(nn.Module):
    """Several modules by name, as one module without a call."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        children_of(self).update(modules)


# Steps on the same modules share their state, and so their holder.
_HOLDERS: weakref.WeakValueDictionary[Any, Models] = weakref.WeakValueDictionary()


class OnGiven:
    """The user's step: a call with the holder module passes on the user's model.

    `__wrapped__` is the user's function.
    """

    def __init__(self, train_step: Callable[..., Any], given: Any, module: nn.Module) -> None:
        functools.update_wrapper(self, train_step)
        self._given, self._module = given, module

    def __call__(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        given = self._given if module is self._module else self._copied(module)
        return self.__wrapped__(given, *args, **options)  # type: ignore[attr-defined]

    def _copied(self, module: nn.Module) -> Any:
        """The user's model around a copy of the module."""
        memo = dict(zip(map(id, self._module.modules()), module.modules(), strict=True))
        return copy.deepcopy(self._given, memo)


def as_one_module(
    train_step: Callable[..., Any], given: Any
) -> tuple[Callable[..., Any], nn.Module]:
    """The step and the module that it trains, from the user's model `given`.

    Raises `TuttiError` for a model that is not a module, and has none.
    """
    train_step, module = plain(train_step), module_of(given)
    _refuse_frozen_code(module)
    _refuse_split(module)
    _refuse_lazy(module)
    refuse_sparse_state(module)
    if module is given:
        return train_step, module
    return OnGiven(train_step, given, module), module


# Classes of torch.distributed.fsdp and DeepSpeed, by name, which few programs import.
_SPLITTING = {
    "FSDPModule": "fully_shard (FSDP2)",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "DeepSpeedEngine": "deepspeed.initialize",
}


def module_of(given: Any) -> nn.Module:
    """The user's model `given` as one module; the same for the same model.

    Raises `TuttiError` for a model that is not a module, and has none.
    """
    module = _inside(given)
    return module if isinstance(module, nn.Module) else _held(given)


def _inside(given: Any) -> Any:
    """The module inside its wrappers."""
    if isinstance(given, OptimizedModule):
        return _inside(plain_module(given))
    if isinstance(given, DistributedDataParallel | DataParallel):
        return _inside(given.module)
    return given


def _held(given: Any) -> nn.Module:
    found = {name: _inside(x) for name, x in _leaves(given) if isinstance(x, nn.Module)}
    if not found:
        raise TuttiError(
            f"expected a torch.nn.Module as the model, got {type(given).__name__}",
            why="the state of a step is that of its modules and optimizers",
            fix='a module, or a dict, list or tuple of modules: {"G": generator, "D": critic}; '
            "for a plain function: torch.nn.Identity(), and the function reached by its name",
        )
    key = tuple((name, id(module)) for name, module in found.items())
    holder = _HOLDERS.get(key)
    if holder is None:
        holder = _HOLDERS[key] = Models(found)
    return holder


def _leaves(given: Any) -> Iterator[tuple[str, Any]]:
    """The entries of dicts, lists and tuples, by name."""
    if isinstance(given, Mapping):
        entries = [(str(key), x) for key, x in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        entries = [(str(i), x) for i, x in enumerate(given)]
    else:
        return
    for name, x in entries:
        if isinstance(x, nn.Module):
            yield name, x
        else:
            yield from ((f"{name}.{rest}", y) for rest, y in _leaves(x))


def _refuse_frozen_code(module: nn.Module) -> None:
    """Refuse a scripted module: its code is not Python, and has its own tables of parameters."""
    for name, one in module.named_modules():
        if isinstance(one, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a torch.jit.ScriptModule ({one.original_name})",
                why="it keeps its parameters outside of Python, where no other tensor can stand for them",
                fix="the module before torch.jit.script or torch.jit.trace; scripted functions may stay",
            )


def _refuse_split(module: nn.Module) -> None:
    """Refuse a module whose weights FSDP or DeepSpeed has split already."""
    for name, one in module.named_modules():
        bases = {kind.__name__ for kind in type(one).__mro__}
        if split := bases & _SPLITTING.keys():
            raise CaptureError(
                f"{name or 'the model'} has been given to {_SPLITTING[split.pop()]}",
                why="each rank has some of its weights, which a step captures whole; the layout splits them",
                fix="the module as it was before, and zero=3 in the layout",
            )


def _refuse_lazy(module: nn.Module) -> None:
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(p):
            raise CaptureError(
                f'"{name}" has no shape yet (a lazy module)',
                why="state and its slots have shapes before the step is captured",
                fix="call the model on a batch once before tutti.distribute(...)",
            )


@contextlib.contextmanager
def wrappers_open() -> Iterator[None]:
    """Inside, `DataParallel` and `DistributedDataParallel` only call the module inside them."""

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    with replaced(*((patch, forward) for patch in WRAPPERS)):
        yield
