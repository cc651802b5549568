"""How the files of the suite are shared out among its workers.

A file whose tests mostly wait (for a lease, a time-out, the end of processes) leaves the processor to others.
Such files go to the last of three workers, one after the other, while the first two compute:

    worker 0    computes . . . . . . . . . . . .
    worker 1    computes . . . . . . . . . . . .
    worker 2    waits . . . . . . . . .

A third worker that computed beside them would make ranks late in tests that count seconds.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# The longest files, longest first: a worker must not be left with one of them at the end.
FIRST = (
    "benchmarks/test_fuzz.py",
    "state/test_memory.py",
    "test_examples.py",
    "verification/test_models.py",
    "verification/test_pipeline.py",
    "planner/test_memory.py",
    "execution/test_training.py",
    "execution/test_cuda_graph.py",
    "verification/test_rounding.py",
    "launch/test_supervise.py",
    "calls/test_read_values.py",
    "launch/test_launch.py",
    "passes/test_remat.py",
    "execution/test_pipeline.py",
    "calls/test_python_values.py",
    "saving/test_checkpoint.py",
    "execution/test_precision.py",
    "capture/test_sizes.py",
    "execution/test_allocator.py",
    "verification/test_other_forms.py",
    "verification/test_pipeline_faults.py",
    "verification/test_servers.py",
)
# Those that mostly wait.
WAIT = frozenset(
    {
        "tests/comm/collectives/test_lone_ranks.py",
        "tests/faults/test_faults.py",
        "tests/replicas/test_lost.py",
        "tests/launch/test_causes.py",
        "tests/launch/test_killed.py",
        "tests/launch/test_launch.py",
        "tests/launch/test_listening.py",
        "tests/saving/test_saves.py",
        "tests/launch/test_supervise.py",
        "tests/launch/test_suspended.py",
        "tests/launch/test_waits.py",
    }
)


class Waiting(LoadFileScheduling):
    """Gives files that wait to the last worker; the others take them once nothing else is left."""

    def _assign_work_unit(self, node: Any) -> None:
        nodes = sorted(n.gateway.id for n in self.nodes)
        wanted = len(nodes) > 2 and node.gateway.id == nodes[-1]
        fitting = (file for file in self.workqueue if (file in WAIT) == wanted)
        if (file := next(fitting, None)) is not None:
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
