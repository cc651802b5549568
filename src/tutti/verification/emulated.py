"""Emulates compressed messages beside a run: the oracles of `verify`.

Only the rounding of a tensor (`comm.collectives.compression`) and its cuts are the run's own code; this
module implements the error feedback a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.captured import Captured
from tutti.comm.collectives.compression import COMPRESSIONS, STEP
from tutti.replicas.pieces import cut, joined
from tutti.replicas.strategy import MEAN, Round, Strategy, Weights
from tutti.replicas.traffic import Message
from tutti.replicas.virtual_replicas import Replicas
from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.virtual_servers import Gradients
from tutti.server.split.replay import GIVEN
from tutti.verification.comparisons import Errors, add_state


def rounded(compression: str, x: Tensor) -> Tensor:
    """`x` after compression and decompression."""
    return COMPRESSIONS[compression].decompress(COMPRESSIONS[compression].compress(x), x.dtype)


class CompressedPushes:
    """One worker's pushes on the servers' side, block by block: `c = code(g + e)`, `e = g + e - c`.

    Args:
        compression: of `comm.collectives.compression`; another one for uncompressed gradients.
        blocks: of all variables. Rows of tables travel uncompressed.
    """

    def __init__(self, compression: str, blocks: Sequence[VariableBlock]) -> None:
        self.compression, self.blocks = compression, blocks
        self.errors: dict[str, Tensor] = {}

    def read(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole gradients, after compression."""
        due = {n: g.contiguous() + self.errors.get(n, 0.0) for n, g in gradients.items()}
        found = {n: x.clone() for n, x in due.items()}
        for block in self.blocks if self.compression in COMPRESSIONS else ():
            if not block.variable.rows:
                here = block.of(found[block.variable.name])
                sent = COMPRESSIONS[self.compression].compress(here)
                here.copy_(sent[""].to(here.dtype) * float(sent.get(STEP, torch.ones(()))))
        self.errors = {n: due[n] - x for n, x in found.items()}
        return found


class CompressedSums:
    """One device's inputs in place of its gradients: the sums of the workers' compressed gradients.

    Args:
        compression, blocks: as for `CompressedPushes`.
        captured: of `server.split.replay.given`; it returns its gradients after its own results.
    """

    def __init__(
        self,
        compression: str,
        blocks: Sequence[VariableBlock],
        num_workers: int,
        captured: Captured,
    ) -> None:
        self.captured = captured
        self.shapes = {b.variable.name: b.variable.shape for b in blocks}
        self._pushes = [CompressedPushes(compression, blocks) for _ in range(num_workers)]
        self._sums: dict[str, Tensor] = {}

    def go_on(self, before: CompressedSums) -> None:
        """Continue with the errors of the workers' earlier pushes."""
        self._pushes = before._pushes

    def arrived(self, pushed: Mapping[int, Gradients]) -> dict[str, Tensor]:
        """The inputs `gradient/NAME` for some workers' pushes."""
        found: dict[str, Tensor] = {}
        self._sums = {}
        for w, gradients in pushed.items():
            whole = {n: self._whole(n, g) for n, g in gradients.items()}
            for name, x in self._pushes[w].read(whole).items():
                found[GIVEN + name] = found.get(GIVEN + name, 0.0) + x
                self._sums[GIVEN + name] = self._sums.get(GIVEN + name, 0.0) + whole[name]
        return found

    def compare(self, errors: Errors, leaves: list[Any], k: int) -> list[Any]:
        """Compare the workers' gradients before compression with those of one device; its step's results."""
        names = [n for n in self.captured.inputs if n.startswith(GIVEN)]
        rest = len(leaves) - len(names)
        add_state(errors, self._sums, dict(zip(names, leaves[rest:], strict=True)), k)
        return leaves[:rest]

    def _whole(self, name: str, gradient: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(gradient, Tensor):
            return gradient
        rows, values = gradient
        return values.new_zeros(self.shapes[name]).index_add_(0, rows, values)


class CompressedReplicas(Replicas):
    """`Replicas` with an emulation of compressed means.

    Each of R replicas rounds the R - 1 parts of its numbers that it sends. A part's owner takes the mean with
    its own numbers unrounded, and rounds that for all; its error is R times this rounding error.
    """

    def __init__(
        self, strategy: Strategy, names: Sequence[str], weights: Sequence[Weights]
    ) -> None:
        super().__init__(strategy, names, weights)
        self.errors: list[dict[str, Tensor]] = [{} for _ in weights]

    def exchange(self, due: Round, sent: list[Message]) -> list[Message]:
        """The result of each replica's message: the mean, after compression."""
        assert due.kind == MEAN and not due.group, "no other round is compressed"
        parts, compressed = cut(sent[0], len(sent)), self.members[0].roster
        values: Message = {}
        for holder, pieces in enumerate(parts):
            for p in pieces:
                xs = [p.of(message) for message in sent]
                if p.name in compressed:
                    values[p.key] = self._mean(p.key, xs, holder)
                else:
                    values[p.key] = torch.stack(xs).mean(0)
        mean = joined([p for pieces in parts for p in pieces], values, sent[0])
        return [{n: x.clone() for n, x in mean.items()} for _ in sent]

    def _mean(self, key: str, xs: list[Tensor], holder: int) -> Tensor:
        compression = self.strategy.compression
        for i, own in enumerate(self.errors):
            xs[i] = xs[i] + own.get(key, 0.0)
            if i != holder:
                arrived = rounded(compression, xs[i])
                own[key], xs[i] = xs[i] - arrived, arrived
        mean = sum(xs[1:], xs[0]) / len(xs)
        arrived = rounded(compression, mean)
        self.errors[holder][key] = (mean - arrived) * len(xs)
        return arrived
