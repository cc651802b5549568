"""The keyword arguments of a call, as a part of its batch."""

from __future__ import annotations

from typing import Any

from tutti.torch_private.pytrees import register_pytree_node


class Keywords(dict[str, Any]):
    """The keyword arguments of a step, at the end of its batch."""


def _apart(keywords: Keywords) -> tuple[list[Any], tuple[str, ...]]:
    return [keywords[k] for k in sorted(keywords)], tuple(sorted(keywords))


register_pytree_node(
    Keywords, _apart, lambda parts, names: Keywords(zip(names, parts, strict=True))
)
