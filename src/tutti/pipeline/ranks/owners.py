"""The pipeline ranks that keep each state tensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from tutti.graph.analysis.order import ancestors
from tutti.partition.partition import Program
from tutti.pipeline.stages.stage_parts import Parts


def stages_of_homes(
    homes: Mapping[str, frozenset[int]], pipe_rank_of: list[int]
) -> dict[str, frozenset[int]]:
    """For each state tensor that one pipeline rank keeps, the stages of that rank."""
    return {
        name: frozenset(s for s, at in enumerate(pipe_rank_of) if at in pipe_ranks)
        for name, pipe_ranks in homes.items()
        if len(pipe_ranks) == 1
    }


def owners_of(
    program: Program,
    parts: Parts,
    pipe_rank_of: list[int],
    homes: Mapping[str, frozenset[int]],
) -> dict[str, frozenset[int]]:
    """The first stage that reads state keeps it; every reader keeps constant state, and every rank the state
    outside of the model, which the user's Python may read."""
    everywhere = frozenset(pipe_rank_of)
    readers: dict[str, set[int]] = {}
    for (stage, _), given in parts.given.items():
        for x in given:
            for name in _state_behind(x):
                readers.setdefault(name, set()).add(stage)
    captured, found = program.captured, dict[str, frozenset[int]]()
    for entry in captured.state:
        stages = readers.get(entry.name, set())
        if entry.name in captured.outside:
            found[entry.name] = everywhere
        elif entry.name in homes:
            found[entry.name] = homes[entry.name]
        elif entry.name not in captured.updated:
            found[entry.name] = frozenset(pipe_rank_of[s] for s in stages) or everywhere
        else:
            found[entry.name] = frozenset({pipe_rank_of[min(stages, default=0)]})
    for entry in captured.state:
        if entry.kind == "slot" and entry.owner in found:
            found[entry.name] = found[entry.owner]
    return found


def _state_behind(x: fx.Node) -> set[str]:
    """The names of the inputs on which `x` depends."""
    return {y.meta["name"] for y in ancestors([x]) if y.op == "placeholder" and "name" in y.meta}
