"""What one rank saves of a step's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.checkpoint.manifest import Manifest
from tutti.torch_private.dtensors import local_part


@dataclass(frozen=True)
class StateShare:
    """This rank's tensors by name, and the manifest of all ranks' without files."""

    tensors: Mapping[str, Tensor]
    manifest: Manifest

    def spread(self, position: int, count: int) -> StateShare:
        """The share without the tensors that an equal rank saves; all ranks choose alike, without exchanges.

        The largest come first, each to the rank with the least so far.

        Args:
            position, count: of this rank among those with the same plain tensors.
        """
        found: dict[str, Tensor] = {}
        loads: dict[Any, list[int]] = {}
        for name in sorted(self.tensors, key=lambda n: (-_nbytes(self.tensors[n]), n)):
            x = self.tensors[name]
            kind, mine, several = _holders(x) if isinstance(x, DTensor) else ("", position, count)
            load = loads.setdefault(kind, [0] * several)
            chosen = load.index(min(load))
            load[chosen] += _nbytes(x)
            if chosen == mine:
                found[name] = x
        return replace(self, tensors=found)

    def with_more(self, tensors: Mapping[str, Tensor]) -> StateShare:
        """The share with further tensors, which the manifest does not list."""
        return replace(self, tensors={**self.tensors, **tensors})

    def part(self, name: str) -> Tensor:
        """This rank's part of a tensor."""
        x = self.tensors[name]
        return local_part(x) if isinstance(x, DTensor) else x

    def form(self) -> object:
        """All that a plan of the share depends on, to compare."""
        return [
            (
                name,
                x.dtype,
                x.shape,
                (x.device_mesh, x.placements) if isinstance(x, DTensor) else None,
            )
            for name, x in self.tensors.items()
        ]


def _holders(x: DTensor) -> tuple[Any, int, int]:
    """The kind of a sharding; this rank's index among the ranks with the same shard, and their number."""
    mesh, index, count = x.device_mesh, 0, 1
    coordinates = mesh.get_coordinate()
    dims = tuple(d for d, placement in enumerate(x.placements) if placement.is_replicate())
    for d in dims:
        index = index * mesh.size(d) + (coordinates[d] if coordinates is not None else 0)
        count *= mesh.size(d)
    return (tuple(mesh.shape), dims), index, count


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
