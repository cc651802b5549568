"""`type(x) is torch.Tensor` and `isinstance(x, float)` in the user's code.

A fake's own type is another one, and so is that of a symbol. During a trace the globals of the user's
functions that name `type` or `isinstance` have another function of this name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.capture.python.user_globals import in_place_of
from tutti.capture.unread import is_unread, unread_kind
from tutti.torch_private.fake_tensors import FakeTensor


class _OfKinds(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """As `type(...)`; of a fake, a symbol or an unread value the type of the value that it
        stands for."""
        if len(args) == 1 and type(args[0]) is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        if len(args) == 1 and is_unread(args[0]):
            return unread_kind(args[0])
        kind = type(*args, **options)
        kind = _PLAIN.get(kind, kind)
        return _Type if kind is type else kind  # `type(x) is type`


class _Type(type, metaclass=_OfKinds):
    """In place of `type`."""


_PLAIN: dict[type, type] = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}


def _is_instance(x: Any, kinds: Any) -> bool:
    """As `isinstance(x, kinds)`; a symbol is a number, too."""
    return isinstance(x, kinds) or (type(x) in _PLAIN and issubclass(_PLAIN[type(x)], kinds))


@contextlib.contextmanager
def kinds_of_fakes(scopes: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[None]:
    """Inside, `type` and `isinstance` in these globals, by name, do not tell a fake from a tensor, nor a
    symbol from a number.
    """
    with (
        in_place_of("type", _Type, scopes["type"]),
        in_place_of("isinstance", _is_instance, scopes["isinstance"]),
    ):
        yield
