"""An op and its counterpart of another name, `mul` and `mul_`; the arguments of a call by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tutti.torch_private.op_tables import OpOverload, overload_name, schema_of


def counterpart(target: OpOverload, name: str) -> OpOverload | None:
    """The overload of `name`, in the namespace of `target`, with the same arguments; None without one."""
    namespace = schema_of(target).name.partition("::")[0]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or overload_name(target) not in packet.overloads():
        return None
    found = getattr(packet, overload_name(target))
    return found if _takes(found) == _takes(target) else None


def name_of(target: OpOverload) -> str:
    """The name of an op without its namespace and overload."""
    return schema_of(target).name.partition("::")[2]


def _takes(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema_of(target).arguments]


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by name; those not given have their defaults."""
    taken = schema_of(target).arguments
    defaults = {a.name: a.default_value for a in taken if a.has_default_value()}
    return defaults | dict(zip((a.name for a in taken), args, strict=False)) | dict(kwargs)
