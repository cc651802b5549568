"""A NaN or infinity that comes in: with which input, and into which result of the step it gets.

Inputs may hold NaN on purpose, such as marks of missing values that the step replaces. What the step removes
is no fault: only the results count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.errors import TuttiError
from tutti.graph.edits.edit import source_of
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.graph.players.move import Move
from tutti.graph.players.player import Player
from tutti.partition.partition import Program
from tutti.pipeline.micro_batches.over_time import MICRO
from tutti.torch_private.pytrees import tree_leaves

# The inputs from which a value comes.
Origins = frozenset[str]
ELSEWHERE = "a message of another stage"
_ROOM = 256  # bytes of a rank's origins on their way


def is_finite(value: Any) -> bool:
    """Attention masks hold -inf on purpose: NaN counts, and infinities that are not negative."""
    return not any(_marks(x).any() for x in tree_leaves(value) if isinstance(x, Tensor | float))


def _marks(x: Tensor | float) -> Tensor:
    """The elements that are not finite."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=torch.float64)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if not x.is_floating_point():
        return torch.zeros((), dtype=torch.bool)
    return x.isnan() | (x == float("inf"))


def of_all_ranks(
    origins: Origins, node: fx.Node, values: Mapping[fx.Node, Any], player: Player | None
) -> Origins:
    """The origins of the operands of a collective on any of its ranks, which call this together."""
    axes = tuple(a for a in collectives.axes_of(node) if a != MICRO)
    if player is None or not axes:
        return origins
    text = "\n".join(sorted(origins)).encode()[:_ROOM].ljust(_ROOM, b"\n")
    device = values[node.all_input_nodes[0]].device
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    (found,) = player.play(Move.alike("all_gather", axes, (0, 1)), [mine])
    lines = bytes(found.cpu().numpy()).decode(errors="ignore").split("\n")
    return frozenset(filter(None, lines))


def came_in(
    program: Program,
    origins: Mapping[fx.Node, Origins],
    inputs: Mapping[str, Any],
    updates: Sequence[Any],
    step: int,
) -> TuttiError | None:
    """The error of the first result that holds what an input brought; None without one.

    A buffer may hold NaN for what it does not have yet: there only new ones count.

    Args:
        program: with its captured step.
        origins: by node, of the values that are not finite.
        inputs: the values at the start, by name.
        updates: the new values of the state.
        step: the number of the step.
    """
    captured = program.captured
    results: Any = program.graph.output_node().args[0]
    leaves, new_state = results
    kinds = {s.name: s.kind for s in captured.state if s.name not in captured.outside}
    found = [(leaf, "what it returns") for i, leaf in enumerate(leaves) if _counts(captured, i)]
    for name, node, value in zip(captured.updated, new_state, updates, strict=True):
        kept = kinds.get(name) not in ("parameter", "slot") and name in inputs
        if not kept or not _as_before(value, inputs[name]):
            found.append((node, f"the new {name}"))
    reached = [(x, what) for x, what in found if isinstance(x, fx.Node) and origins.get(x)]
    if not reached:
        return None
    node, result = next((r for r in reached if ELSEWHERE not in origins[r[0]]), reached[0])
    names = origins[node]
    if ELSEWHERE in names:  # another stage may have it from this rank
        names = names.union(*(found for n, found in origins.items() if n.target is loop))
    return _error(names, result, _line_of(node), step)


def _line_of(node: fx.Node) -> str:
    """The user's line of a node, or of the last one before it that has one."""
    seen, near = {node}, [node]
    for x in near:
        if found := source_of(x):
            return found
        new = [y for y in x.all_input_nodes if y not in seen]
        seen.update(new)
        near.extend(new)
    return ""


def _counts(captured: Any, i: int) -> bool:
    """Whether leaf `i` is a result that the script sees, and not a value for its branches or inspection."""
    at = captured.num_returned
    for effect in captured.effects:
        if at <= i < at + effect.num_leaves:
            return not effect.inspected
        at += effect.num_leaves
    return i < at or not captured.reads


def _as_before(new: Any, old: Any) -> bool:
    """Whether nothing is not finite now that was finite before."""
    if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.shape != old.shape:
        return False
    return not bool((_marks(new) & ~_marks(old)).any())


def _error(origins: Origins, result: str, at: str, step: int) -> TuttiError:
    names = sorted(origins - {ELSEWHERE})
    said = names[:3] + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
    why = "no node of the step removes it; the state is as before this step"
    if not names:
        why, fix = f"the rank of that stage names the input; {why}", ""
    elif any(n.startswith(("batch.", "number.")) for n in names):
        fix = "leave out such samples, or replace NaN in the step: torch.nan_to_num"
    else:
        fix = "restore a checkpoint from before it, or initialize what holds it"
    ways = [", ".join(said)] if said else []
    ways += [ELSEWHERE] if ELSEWHERE in origins else []
    return TuttiError(
        f"NaN or infinity came in with {' or '.join(ways)} and reached {result} at step {step}",
        at=at,
        why=why,
        fix=fix,
    )
