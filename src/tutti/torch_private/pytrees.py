"""Flattens nested containers into leaves, and rebuilds them: `torch.utils._pytree`.

Why: batches, results and arguments of nodes are such containers, and `make_fx` and `register_pytree_node`
share one table of their types. Public: none; `torch.utils.pytree`, once PyTorch has it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.fx import graph as fx_graph
from torch.utils import _pytree
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "NO_SEARCH",
    "SEARCH_OF_ARGUMENTS",
    "SUPPORTED_NODES",  # the table of types; public: a function that asks whether a type is known
    "TreeSpec",
    "register_pytree_node",
    "searches_arguments",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

# The place of the functions by which `fx` searches the arguments of each new node for symbols to warn of:
# a module and a name, to patch; and functions that find nothing.
# Why: time; tutti makes no such warning. Public: an option of `fx.Graph`.
SEARCH_OF_ARGUMENTS: tuple[Any, str] = (fx_graph, "pytree")
NO_SEARCH: Any = SimpleNamespace(**(vars(_pytree) | {"tree_iter": lambda *_: ()}))


def searches_arguments() -> bool:
    """Whether `fx` searches the arguments of each new node by `_pytree`, without a replacement.

    Why: a check before `NO_SEARCH` replaces it. Public: none.
    """
    return getattr(fx_graph, "pytree", None) is _pytree
