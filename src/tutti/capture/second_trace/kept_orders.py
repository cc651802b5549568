"""Writes that keep the order of a tensor in memory, whatever order the functional form of the op gives.

`functionalize` puts the result of the functional form in the tensor's place, and makes the other views of its
memory from that:

    d = aten.permute(product, [0, 3, 1, 2])
    aten.masked_fill_(d, mask, -1e9)      # masked_fill(d) is contiguous; d is not, and views depend on it
    becomes
    new = aten.clone(d)
    aten.masked_fill_(new, mask, -1e9)
    aten.copy_(d, new)                    # the result of `copy` has the strides of d

The canonical form drops the clone and the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.torch_private.op_tables import OpOverload, schema_of

aten = torch.ops.aten


def order_may_change(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> bool:
    """Whether a call writes a tensor for which the functional form may give another order.

    made: the recorded result. A call that also resizes the tensor leaves no order to keep.
    """
    if not isinstance(target, OpOverload) or target is aten.copy_.default:
        return False
    if not schema_of(target).is_mutable or torch.Tag.inplace_view in target.tags:
        return False
    operands = _written(target, args, kwargs)
    results = made if isinstance(made, list | tuple) else [made]
    if any(x.shape != y.shape for x, y in zip(operands.values(), results, strict=False)):
        return False
    return any(name in kwargs or not x.is_contiguous() for name, x in operands.items())


def written_in_order(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that writes into new tensors, which then overwrite the given ones."""
    operands = _written(target, args, kwargs)
    new = {name: aten.clone.default(x) for name, x in operands.items()}
    names = [a.name for a in schema_of(target).arguments]
    given = [new.get(name, x) for name, x in zip(names, args, strict=False)]
    made = target(*given, **{name: new.get(name, x) for name, x in kwargs.items()})
    old = {id(new[name]): x.copy_(new[name]) for name, x in operands.items()}
    if isinstance(made, list | tuple):
        return tuple(old.get(id(x), x) for x in made)
    return old.get(id(made), made)


def _written(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors that a call writes, by name; those by keyword receive the result (`out`)."""
    arguments = schema_of(target).arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    marked = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return {name: given[name] for name in marked if isinstance(given.get(name), Tensor)}
