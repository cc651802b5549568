"""What a program is about to run on, as far as passes ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Where and how one rank will run a program; the same on every rank.

    donated: names of the state whose old value the step may overwrite: what it updates, where its
        memory belongs to it alone.
    shared: the tuples of mesh axes whose groups lie on one host and share memory.
    onednn: matmuls of oneDNN are faster than PyTorch's own (`graph.ops.matmul.is_faster`).
    """

    donated: frozenset[str] = frozenset()
    shared: frozenset[tuple[str, ...]] = frozenset()
    onednn: bool = False
