"""An op and its counterpart of another name: `mul` and `mul_`."""

from __future__ import annotations

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
