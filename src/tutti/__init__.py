"""tutti: one plain training step, played on many ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tutti.version import VERSION

if TYPE_CHECKING:
    from tutti.api import distribute, loader, verify
    from tutti.data.loader import Loader
    from tutti.data.token_windows import tokens
    from tutti.distributed_step import Step
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
    from tutti.graph.ops.boundary import shard_as
    from tutti.layout import Layout, Mesh, Sharding
    from tutti.resuming.run_checkpoints import Checkpoints
    from tutti.rules import add_rule as rule
    from tutti.state.whole import whole
    from tutti.verification.verdict import Verdict

__version__ = VERSION

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Checkpoints",
    "CommError",
    "Layout",
    "LayoutError",
    "Loader",
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
    "loader",
    "rule",
    "shard_as",
    "tokens",
    "verify",
    "whole",
]

# The module of each public name, imported at the first use of the name: the launcher and other processes
# without a capture start twice as fast.
_HOMES = {
    "Checkpoints": "tutti.resuming.run_checkpoints",
    "Loader": "tutti.data.loader",
    "Step": "tutti.distributed_step",
    "Verdict": "tutti.verification.verdict",
    "distribute": "tutti.api",
    "loader": "tutti.api",
    "rule": "tutti.rules",
    "shard_as": "tutti.graph.ops.boundary",
    "tokens": "tutti.data.token_windows",
    "verify": "tutti.api",
    "whole": "tutti.state.whole",
}
_OTHER_NAMES = {"rule": "add_rule"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "tutti.errors" if name.endswith("Error") else "tutti.layout")
    value = globals()[name] = getattr(import_module(home), _OTHER_NAMES.get(name, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
