"""Plans what one rank writes of a checkpoint: its own tensors, or copies of them in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from tutti.checkpoint.plans import plan_of

# The name of a tensor, and the offsets of a part of it.
Place = tuple[str, tuple[int, ...]]


def share_planner(state: Mapping[str, Any]) -> DefaultSavePlanner:
    """The planner of this rank's tensors by name: plain ones, and its parts of `DTensor`s."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state))
    return planner


def place_of(index: MetadataIndex) -> Place:
    """Where the part of an entry of a plan belongs."""
    return index.fqn, tuple(index.offset or ())


class CopiesPlanner(DefaultSavePlanner):
    """The planner of a rank's parts in a process without its process groups.

    Args:
        plan: of the rank, as text.
        copies: the parts by place.
    """

    def __init__(self, plan: str, copies: Mapping[Place, Tensor]) -> None:
        super().__init__()
        self._text, self._copies = plan, copies
        self.set_up_planner({})

    def create_local_plan(self) -> SavePlan:
        """The plan given."""
        self.plan = plan_of(self._text)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of a part."""
        return self._copies[place_of(index)]
