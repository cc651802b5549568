"""The memory for copies: they come back from another mapping, and forked children give it back."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from tutti.resuming.staging import Staging, arranged


def test_copies_come_back_from_another_mapping() -> None:
    parts = {
        ("a", (0, 0)): torch.randn(3, 5),
        ("b", (2,)): torch.arange(7, dtype=torch.int64)[::2],
        ("c", ()): torch.tensor(2.5, dtype=torch.bfloat16),
        ("d", (0,)): torch.empty(0, 4),
    }
    copies, nbytes = arranged(parts, 64)
    memory = Staging()
    memory.reserve(nbytes)
    memory.copy(list(parts.values()), copies)
    memory.put(nbytes - 1, b"x")
    there = torch.frombuffer(mmap.mmap(memory.fd, memory.nbytes), dtype=torch.uint8)
    for one, x in zip(copies, parts.values(), strict=True):
        assert one.within(there).equal(x)
    assert there[nbytes - 1] == ord("x")
    memory.close()


def test_a_forked_child_gives_it_back() -> None:
    memory = Staging()
    memory.reserve(2**20)
    memory.put(0, b"parent")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            others = [bytearray(2**20) for _ in range(4)]
            with pytest.raises(OSError):
                memory.reserve(10)
            memory.close()
            code = int(memory.fd != -1 or any(map(any, others)))
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    with mmap.mmap(memory.fd, 6) as there:
        assert there[:] == b"parent"
    memory.close()
