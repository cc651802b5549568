"""The target of a program, as far as passes need it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The place and the way in which a rank will run a program; the same on every rank.

    donated: names of the state whose old value the step may overwrite: updated state, with memory of its
        own.
    shared: the tuples of mesh axes whose groups are on one host and share memory.
    onednn: matmuls of oneDNN are faster than PyTorch's own (`graph.ops.matmul.is_faster`).
    gpus: of a plan for GPUs, whose step is captured with CPU tensors.
    """

    donated: frozenset[str] = frozenset()
    shared: frozenset[tuple[str, ...]] = frozenset()
    onednn: bool = False
    gpus: bool = False
