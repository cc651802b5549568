"""`type(x) is torch.Tensor` in the user's code: a fake's own type is another one.

During a trace the globals of the user's functions that name `type` have another function of this name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tutti.torch_private.fake_tensors import FakeTensor


class _OfKinds(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """As `type(...)`; of a fake the type of the tensor that it stands for."""
        if len(args) == 1 and type(args[0]) is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        kind = type(*args, **options)
        return _Type if kind is type else kind  # `type(x) is type`


class _Type(type, metaclass=_OfKinds):
    """In place of `type`."""


@contextlib.contextmanager
def kinds_of_fakes(scopes: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, `type` in these globals does not tell a fake from a tensor."""
    put: list[dict[str, Any]] = []
    try:
        for scope in scopes:
            if "type" not in scope:
                put.append(scope)
                scope["type"] = _Type
        yield
    finally:
        for scope in put:
            scope.pop("type", None)
