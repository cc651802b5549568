"""The signature of a call: the dependencies of a trace beside its graph's inputs; a new one needs a trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.calls.hooks import Hooks
from tutti.calls.sharded_batch import kind_of
from tutti.calls.surroundings import surroundings
from tutti.calls.tables import Table, are_same, values_of
from tutti.capture.state.free_numbers import FreeInt, is_free_number
from tutti.capture.state.kept_gradients import Answers, Question
from tutti.capture.unread import UnreadValue, is_unread, unread_kind
from tutti.graph.text import SHORT
from tutti.torch_private.module_tables import buffers_of, children_of, parameters_of


class Signatures:
    """The signatures of calls of one step on `model`.

    Args:
        asked: the questions of its traces about gradients that earlier calls have left; more may follow.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        asked: Collection[Question] = frozenset(),
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self.version = 0  # of the set of modules
        self._numbers: dict[Any, int] = {}
        self._keys: list[str] = []
        self._rest: Any = None
        self._gradients = Answers(model, asked)
        self._walk()

    def of(self, leaves: Sequence[Any], form: Any, python: int, *, sized: bool = True) -> Any:
        """A hashable key: the batch's form, its shapes and constants, the number of parameters of each group,
        the modules, the names of parameters and buffers, which are trained, their dtypes, the shapes of
        buffers, the hooks, the surroundings of the call, and the gradients of earlier calls as far as traces
        depend on them.

        `python` stands for the Python values of the step (`PythonValues.now`). Without `sized`, calls whose
        tensors differ only in sizes have one key.
        """
        other = any(self._empty) or not are_same(_entries(self._children), self._below)
        if other or self._are_of_other_classes():
            self.version += 1
            self._walk()
        groups = tuple(len(g["params"]) for one in self._optimizers for g in one.param_groups)
        weights, buffers = values_of(self._parameters), values_of(self._buffers)
        there = [*map(is_not, [*weights, *buffers], repeat(None))]
        trained = tuple(map(_form, compress(weights, there)))
        others = tuple(map(_form_of_buffer, compress(buffers, there[len(weights) :])))
        made = tuple(map(_leaf if sized else _unsized, leaves))
        around = surroundings(trains=bool(self._optimizers))
        names, forms = self._names(there), (trained, others)
        hooks, kept = self._hooks.now(), self._gradients.now()
        return made, form, groups, self.version, names, python, forms, hooks, around, kept

    def _names(self, there: list[bool]) -> int:
        """A number for the names of parameters and buffers, by module, and for those that are not None."""
        held = [*self._parameters, *self._buffers]
        keys, sizes = [*chain.from_iterable(held)], [*map(len, held)]
        if not are_same(keys, self._keys) or (sizes, there) != self._rest:
            self._keys, self._rest = keys, (sizes, there)
            named = self.version, (*keys,), (*sizes,), (*there,)
            self._named = self._numbers.setdefault(named, len(self._numbers))
        return self._named

    def _are_of_other_classes(self) -> bool:
        """Whether a module has another class than at the last walk."""
        return not are_same([*map(type, self.modules)], self._classes)

    def _walk(self) -> None:
        """Find the current modules, and the tables in which they hold each other, parameters and buffers."""
        self.modules = list(self._model.modules())
        self._classes = list(map(type, self.modules))
        children = [children_of(m) for m in self.modules]
        parameters, buffers = map(parameters_of, self.modules), map(buffers_of, self.modules)
        every = children, [*parameters], [*buffers]
        self._children, self._parameters, self._buffers = ([t for t in x if t] for x in every)
        self._empty = [t for t in chain(*every) if not t]
        self._below = _entries(self._children)
        self._hooks = Hooks(self.modules, self._optimizers)
        self._gradients.renew()


def _entries(tables: Sequence[Table]) -> list[Any]:
    """The keys of all `tables`, and their values."""
    return [*chain.from_iterable(tables), *values_of(tables)]


_form = attrgetter("requires_grad", "dtype")
_form_of_buffer = attrgetter("dtype", "shape")


def _unsized(x: Any) -> Any:
    return (x.ndim, x.dtype, x.device, kind_of(x)) if isinstance(x, Tensor) else _leaf(x)


def _leaf(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.dtype, x.device, kind_of(x))
    if is_free_number(x):
        return FreeInt if type(x) is FreeInt else float
    if isinstance(x, float):
        return repr(x)
    if is_unread(x):
        return (UnreadValue, unread_kind(x))
    return (type(x), x)


_PYTHON = "another Python value of the step, or attribute of a module"
# The parts of a signature after the batch's leaves, in words.
_PARTS = (
    "another structure of the batch",
    "another number of parameters in the optimizer's groups",
    "other modules in the model",
    "other names of parameters or buffers",
    _PYTHON,
    "other parameters that are trained, parameters of another dtype, or buffers of another form",
    "other hooks",
    "another autocast, mode of gradients or default dtype around the call",
    "other parameters that have a gradient of an earlier call",
)


def difference_between(now: Any, known: Sequence[Any], python: str = "") -> str:
    """Why a call with signature `now` needs a program beside those of `known` signatures: its differences
    from the closest one; "" if there is none. `python` names the Python value that differs."""
    if not known:
        return ""
    closest = min(known, key=lambda one: sum(a != b for a, b in zip(now, one, strict=True)))
    parts = [f"another value of {python}" if x is _PYTHON and python else x for x in _PARTS]
    found = [text for text, a, b in zip(parts, now[1:], closest[1:], strict=True) if a != b]
    if now[0] != closest[0]:
        found = [*_leaf_differences(now[0], closest[0]), *found]
    return "; ".join(found) or "a branch on a number or on a tensor's value goes another way"


def _leaf_differences(now: Sequence[Any], before: Sequence[Any]) -> list[str]:
    if len(now) != len(before):
        return [f"{len(now)} values in the batch instead of {len(before)}"]
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(now, before, strict=True)) if a != b]
    return [f"batch value {i}: {_told(a)} instead of {_told(b)}" for i, a, b in differing]


def _told(leaf: Any) -> str:
    """One leaf's part of a signature in words."""
    if leaf in (float, FreeInt):
        return "a float" if leaf is float else "an integer in formulas"
    if leaf[0] is UnreadValue:
        return f"a {leaf[1].__name__} that no code reads"
    if len(leaf) == 2:
        return repr(leaf[1])[:40]
    shape, dtype, device = leaf[:3]
    return f"{SHORT.get(dtype, str(dtype))}{list(shape)} on {device}"
