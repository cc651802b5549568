"""Contracts of `torch_private/pytrees.py`."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from unittest import mock

import pytest
import torch
from torch import fx

from tutti.torch_private import pytrees
from tutti.torch_private.pytrees import (
    NO_SEARCH,
    SEARCH_OF_ARGUMENTS,
    SUPPORTED_NODES,
    TreeSpec,
    register_pytree_node,
    searches_arguments,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

TREE = {"b": [1, (2.0, None)], "a": OrderedDict(x="s")}


def test_a_tree_is_taken_apart_and_put_together_with_none_as_a_leaf() -> None:
    leaves, form = tree_flatten(TREE)
    assert isinstance(form, TreeSpec)
    assert leaves == tree_leaves(TREE) == [1, 2.0, None, "s"]
    assert tree_unflatten(leaves, form) == TREE
    assert form == tree_flatten(tree_map(lambda x: 0, TREE))[1]
    assert tree_flatten([1])[1] != tree_flatten((1,))[1]


def test_a_map_goes_over_leaves_or_those_of_a_type() -> None:
    assert tree_map(str, [1, (2,)]) == ["1", ("2",)]
    assert tree_map_only(int, lambda x: -x, [1, 2.0]) == [-1, 2.0]


class _Box(UserDict): ...


def test_a_type_is_known_once_it_is_registered() -> None:
    box = _Box(x=1)
    assert _Box not in SUPPORTED_NODES and tree_leaves(box) == [box]
    register_pytree_node(
        _Box, lambda b: (list(b.values()), list(b)), lambda v, k: _Box(zip(k, v, strict=True))
    )
    assert _Box in SUPPORTED_NODES
    assert tree_map(lambda x: x + 1, box) == _Box(x=2)


def test_a_new_node_s_arguments_are_not_searched_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    plain = pytrees._pytree.tree_iter
    monkeypatch.setattr(
        pytrees._pytree, "tree_iter", lambda x, **given: searched.append(x) or plain(x, **given)
    )
    monkeypatch.setattr(*SEARCH_OF_ARGUMENTS, pytrees._pytree)  # as outside of the suite
    assert searches_arguments()
    with mock.patch.object(*SEARCH_OF_ARGUMENTS, NO_SEARCH):
        assert not searches_arguments()
        made = fx.Graph().call_function(torch.add, (1, 2))
    assert made.args == (1, 2) and searched == [] and searches_arguments()
