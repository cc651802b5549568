"""An op and the one that does the same under another name: `mul` and `mul_`."""

from __future__ import annotations

from typing import Any

import torch


def counterpart(target: torch._ops.OpOverload, name: str) -> torch._ops.OpOverload | None:
    """The overload of `name`, in the namespace of `target`, with the same arguments; None without one."""
    namespace = target._schema.name.partition("::")[0]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or target._overloadname not in packet.overloads():
        return None
    found = getattr(packet, target._overloadname)
    return found if _takes(found) == _takes(target) else None


def name_of(target: torch._ops.OpOverload) -> str:
    """The name of an op without its namespace and overload."""
    return target._schema.name.partition("::")[2]


def _takes(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]
