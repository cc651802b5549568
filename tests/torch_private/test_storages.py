"""Contracts of `torch_private/storages.py`."""

from __future__ import annotations

import torch

from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.storages import memory_id, num_uses, storage_id


def test_views_have_the_memory_of_their_base_and_copies_do_not() -> None:
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode:
            x = torch.zeros(4, 2)
            view, copy = x.t()[1:], x.clone()
        assert memory_id(x) == memory_id(view) != memory_id(copy)
        assert memory_id(x) == storage_id(x.untyped_storage())


def test_each_tensor_that_looks_at_a_memory_counts() -> None:
    x = torch.zeros(4)
    storage = x.untyped_storage()
    alone = num_uses(storage)
    view = x[1:]
    assert num_uses(storage) == alone + 1
    del view
    assert num_uses(storage) == alone == 2  # the tensor's own, and the Python object
