"""The tables that travel by row, between the calls of a worker: absent until the script uses them.

    step(tokens); model(tokens)        a worker has pulled rows for the step: a use brings the whole table

Between calls such a parameter has a class of its own. The first function of torch that reads or writes it
brings the table; it is an ordinary parameter then, until the next call. Its memory holds NaN meanwhile, for
readers past torch's functions. The ranks of a worker pull a table together: a use by one alone is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tutti.capture.state.lift import StateTensor
from tutti.errors import ServerError
from tutti.state.onlookers import warn_of_onlookers
from tutti.state.residence import local_of, set_local
from tutti.torch_private.dispatch_modes import no_torch_function
from tutti.torch_private.module_tables import TENSOR_HOOKS
from tutti.torch_private.pytrees import tree_leaves
from tutti.user_lines import program_line, quoted

# Functions and attributes that neither read nor write values, beside those that begin with "is_".
_FORMS = frozenset(
    {"shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "get_device"}
    | {"requires_grad", "grad", "grad_fn", "retains_grad", "output_nr", "requires_grad_"}
    | {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"}
    | {"element_size", "register_hook", "register_post_accumulate_grad_hook", *TENSOR_HOOKS}
    | {"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones", "new_full"}
)


class _Absent:
    """Before the class of a table that is absent."""

    tables: AbsentTables

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the table for all functions but those of its form."""
        given = kwargs or {}
        if _is_of_forms(func):
            with no_torch_function():
                return func(*args, **given)
        for x in tree_leaves((args, given)):
            if isinstance(x, _Absent):
                x.tables.bring_for(x)
        return func(*args, **given)

    def _brought(self) -> Any:
        self.tables.bring_for(self)
        return self

    @property
    def data(self) -> Any:
        """That of the table."""
        return self._brought().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self._brought().data = value

    def full_tensor(self, **options: Any) -> Tensor:
        """That of a table in shards."""
        return self._brought().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        """That of a table in shards."""
        return self._brought().redistribute(*args, **options)

    def to_local(self, **options: Any) -> Tensor:
        """That of a table in shards."""
        return self._brought().to_local(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._brought(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._brought().__reduce_ex__(protocol)


def _is_of_forms(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name in _FORMS or (name.startswith("is_") and name != "is_nonzero")


def is_absent(x: Tensor) -> bool:
    """Whether a state tensor is a table without values."""
    return isinstance(x, _Absent)


class AbsentTables:
    """The tables by row of one worker's rank.

    Args:
        names: of all of them, in the model's order.
        bring: pulls them whole into the model, which `show` has made ordinary; None for a worker of several
            ranks.
    """

    def __init__(self, names: Collection[str], bring: Callable[[], None] | None) -> None:
        self.names, self._bring = names, bring
        self._hidden: dict[int, str] = {}
        self._kinds: dict[type, Any] = {}
        self._process = os.getpid()

    def absent(self, state: Mapping[str, Tensor]) -> list[str]:
        """The names of those without values."""
        return [name for name in self.names if is_absent(state[name])]

    def hide(self, state: Mapping[str, Tensor]) -> None:
        """Forget the values of all that are here: servers change them."""
        for name in self.names:
            x = state[name]
            if is_absent(x):
                continue
            if warn_of_onlookers([StateTensor(name, "parameter", x)], [name]):
                set_local(x, torch.full_like(local_of(x), torch.nan))
            else:
                local_of(x).fill_(torch.nan)
            self._hide(name, x)

    def show(self, state: Mapping[str, Tensor], names: Collection[str] | None = None) -> None:
        """Make them (or those given) ordinary parameters, which the caller fills."""
        for name in self.names if names is None else names:
            self._show(state[name])

    def _show(self, x: Tensor) -> None:
        if isinstance(x, _Absent):
            self._hidden.pop(id(x), None)
            x.__class__ = type(x).__bases__[1]

    @contextmanager
    def opened(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, those that are absent are ordinary parameters without values."""
        absent = self.absent(state)
        self.show(state, absent)
        try:
            yield
        finally:
            for name in absent:
                self._hide(name, state[name])

    def _hide(self, name: str, x: Tensor) -> None:
        kind = type(x)
        if kind not in self._kinds:
            parts = {"__slots__": (), "tables": self}
            self._kinds[kind] = type(f"Absent{kind.__name__}", (_Absent, kind), parts)
        self._hidden[id(x)] = name
        x.__class__ = self._kinds[kind]

    def bring_for(self, x: Any) -> None:
        """Bring all tables for a use of `x`.

        Raises:
            ServerError: this rank alone cannot pull them.
        """
        if self._bring is None or os.getpid() != self._process:
            alone = "a worker's ranks pull it together"
            name = self._hidden.get(id(x), "a table")
            raise ServerError(
                f'"{name}" travels by row: between steps a worker has no values of it',
                at=quoted(program_line()),
                why=alone if self._bring is None else "another process than the worker's uses it",
                fix="with tutti.whole(model): ... on all ranks, to read or change it",
            )
        self._bring()
        self._show(x)  # one that is no longer in the model keeps its NaN
