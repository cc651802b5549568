"""The exchanges of replicas: a line for each kind of round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tutti.comm.collectives.compression import NBYTES
from tutti.partition.partition import Program
from tutti.pipeline.timed import Timed
from tutti.quantities import format_nbytes
from tutti.replicas import strategies
from tutti.replicas.strategy import AVERAGED, CENTRE, MEAN, PAIR, PUSH, Round, Strategy
from tutti.report.text_table import columns

_HOW = {
    MEAN: "mean",
    PUSH: "half goes, half stays",
    CENTRE: "pulls the centre, without waiting",
    PAIR: "averages with one, without waiting",
}


@dataclass(frozen=True)
class Exchange:
    """One kind of round.

    steps: those after which it begins, in some periods. num_weights: number of weights in it. message_nbytes:
    of a rank's message; of several pipeline ranks the most. nbytes: the bytes that a rank sends in it,
    without its answers to others. a_step: how often it begins, after the warm-up, for each step.
    """

    due: Round
    steps: tuple[int, ...]
    num_weights: int
    message_nbytes: int
    nbytes: float
    a_step: float


def exchanges(program: Program, made: Timed | None = None) -> list[Exchange]:
    """Every kind of round of a layout's strategy, in the order in which they first happen."""
    strategy, count = strategies.parse(program.layout.sync), program.layout.num_replicas
    seen: dict[Round, list[int]] = {}
    begin = strategy.warm_up + 1
    warm = [strategy.warm_up] if strategy.warm_up else []
    # Hops repeat after log2 of the number of replicas.
    later = range(begin, begin + 2 * strategy.period * count.bit_length())
    for step in [*warm, *later]:
        for due in strategy.rounds(step, count):
            kind = replace(due, begins=min(0, step - begin), lands=due.lands - due.begins)
            seen.setdefault(kind, []).append(step)
    often = {k: sum(step >= begin for step in steps) / len(later) for k, steps in seen.items()}
    return [_exchange(program, strategy, k, seen[k], often[k], made) for k in seen]


def rounds_text(program: Program, made: Timed | None = None) -> str:
    """The table that `explain` shows."""
    strategy, count = strategies.parse(program.layout.sync), program.layout.num_replicas
    rows = []
    for one in exchanges(program, made):
        late = f", lands {one.due.lands} steps later" if one.due.lands else ""
        compressed = f" in {strategy.compression}" if strategy.compression != "fp32" else ""
        rows.append(
            (
                _when(one, strategy),
                f"{one.num_weights} weights",
                _HOW[one.due.kind] + compressed + late,
                format_nbytes(round(one.nbytes)),
                _to(one.due, count),
            )
        )
    head = ("after steps", "what", "how", "a rank sends", "to the ranks like it of")
    return f"replicas agree by {strategy}\n" + columns(head, rows) + _kept_text(program, made)


def kept_nbytes(program: Program, made: Timed | None = None) -> dict[str, int]:
    """The bytes of the strategy's state on a rank, by its kind; of several pipeline ranks the most."""
    strategy = strategies.parse(program.layout.sync)
    state = {s.name: s.tensor for s in program.captured.state}
    each: list[Counter[str]] = []
    for pipe_rank, owners in _pipe_ranks(made):
        weights = {
            n: torch.empty(
                program.storage[n].local_shape(program.mesh), dtype=state[n].dtype, device="meta"
            )
            for n in _trained(program)
            if pipe_rank in owners.get(n, (pipe_rank,))
        }
        found = Counter[str]()
        for name, x in strategy.init(weights).items():
            found[name.partition(".")[0]] += x.nbytes
        each.append(found)
    return dict(max(each, key=lambda found: found.total()))


def _kept_text(program: Program, made: Timed | None) -> str:
    kept = kept_nbytes(program, made)
    if not kept:
        return ""
    kinds = ", ".join(f"{kind} {format_nbytes(n)}" for kind, n in kept.items())
    return f"\na rank also keeps {format_nbytes(sum(kept.values()))} for it: {kinds}"


def _pipe_ranks(made: Timed | None) -> Iterable[tuple[int, Mapping[str, Container[int]]]]:
    """Each pipeline rank, with the pipeline ranks that keep a weight, by its name."""
    count = len(made.programs) if made else 1
    return ((p, made.owners if made and count > 1 else {}) for p in range(count))


def _trained(program: Program) -> list[str]:
    """The weights that replicas exchange, in the model's order."""
    updated = set(program.captured.updated)
    return [s.name for s in program.captured.state if s.kind == "parameter" and s.name in updated]


def _exchange(
    program: Program,
    strategy: Strategy,
    due: Round,
    steps: list[int],
    a_step: float,
    made: Timed | None,
) -> Exchange:
    count = program.layout.num_replicas
    names = strategy.fragment(_trained(program), due)
    statistics = [
        s.name for s in program.captured.state if s.kind == "buffer" and s.tensor.dtype in AVERAGED
    ]
    plain = statistics if due.kind == MEAN and due.fragment == 0 else []
    each = [
        _nbytes(program, [n for n in names if p in owners.get(n, (p,))], strategy.compression)
        + _nbytes(program, [n for n in plain if p in owners.get(n, (p,))], "fp32")
        for p, owners in _pipe_ranks(made)
    ]
    members = due.group or count
    share = {MEAN: 2 * (members - 1) / members, CENTRE: (count - 1) / count}.get(due.kind, 1.0)
    most = max(each)
    return Exchange(due, tuple(steps), len(names), most, most * share, a_step)


def _nbytes(program: Program, names: Iterable[str], compression: str) -> int:
    state = {s.name: s.tensor for s in program.captured.state}
    return sum(
        math.prod(program.storage[n].local_shape(program.mesh))
        * NBYTES.get(compression, state[n].element_size())
        for n in names
    )


def _when(one: Exchange, strategy: Strategy) -> str:
    if one.due.begins < 0 or one.steps[0] <= strategy.warm_up:
        return f"1 to {strategy.warm_up}"
    if len(one.steps) > 1 and one.steps[1] == one.steps[0] + 1:
        return "each"
    return ", ".join([*map(str, one.steps[:2]), "..."])


def _to(due: Round, count: int) -> str:
    if due.kind == PUSH:
        return f"the replica {due.hop} on"
    if due.kind == PAIR:
        return "one replica of the other side"
    return f"its group of {due.group}" if due.group else f"the other {count - 1}"
