"""Contracts of `torch_private/default_group.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from tutti.graph.edits.patch import Patch, replaced
from tutti.torch_private.default_group import DEFAULT_GROUP


def test_one_thread_finds_no_group_while_others_do() -> None:
    group = Patch(*DEFAULT_GROUP, "a test")
    nothing = property(lambda _: None, group.original.fset)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with replaced((group, nothing)), ThreadPoolExecutor(1) as pool:
            assert not dist.is_initialized()
            assert pool.submit(dist.is_initialized).result()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
