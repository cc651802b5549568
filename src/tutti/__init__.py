"""tutti: one plain training step, played on many ranks."""

from tutti.api import Step, distribute, verify
from tutti.errors import (
    CaptureError,
    CheckpointError,
    CommError,
    LayoutError,
    PlanError,
    ScheduleError,
    ServerError,
    ShardingError,
    TuttiError,
)
from tutti.graph.boundary import shard_as
from tutti.layout import Layout, Mesh, Sharding
from tutti.rules import add_rule as rule
from tutti.runtime.verify import Verdict

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CommError",
    "Layout",
    "LayoutError",
    "Mesh",
    "PlanError",
    "ScheduleError",
    "ServerError",
    "Sharding",
    "ShardingError",
    "Step",
    "TuttiError",
    "Verdict",
    "distribute",
    "rule",
    "shard_as",
    "verify",
]
