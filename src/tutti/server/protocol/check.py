"""Checks a request against the state; an invalid one is refused as a whole, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tutti.server.protocol.keys import VariableBlock
from tutti.server.protocol.ledger import KnownWorker, Ledger
from tutti.server.protocol.messages import (
    MEETING,
    WRONG,
    Add,
    Join,
    Load,
    Push,
    Refused,
    Settle,
    TensorPart,
)
from tutti.server.protocol.update import WEIGHT

MOST_WORKERS = 4096
_LAST_CLOCK = 2**53
_OPERATIONS = ("sum", "max", "min")
# The dtypes in which a gradient may travel: its own, or compressed ones.
_COMPRESSED = (torch.bfloat16, torch.int8)


def check_join(ledger: Ledger, join: Join) -> Refused | None:
    """A worker's number and clock must be valid; the script must be the same."""
    if join.fingerprint != ledger.updater.fingerprint:
        return wrong(
            "its step has another update than the one that the server runs (another script, other options of "
            "the optimizer, or other weights that it trains)"
        )
    if not 0 <= join.worker < MOST_WORKERS or join.incarnation < 1 or join.clock > _LAST_CLOCK:
        return wrong(f"worker {join.worker}, incarnation {join.incarnation}, clock {join.clock}")
    return None


def check_push(ledger: Ledger, push: Push, member: KnownWorker) -> Refused | None:
    """A push must follow the last one, have the worker's clock, and hold each block once."""
    problem = _sequence(push, member)
    if problem:
        pass
    elif push.clock != member.clock:
        problem = f"clock {push.clock}, where {member.clock} is due"
    elif ledger.consistency.alone(push.clock) != ledger.alone:
        problem = f"clock {push.clock} after {ledger.version} updates of sync={ledger.consistency}"
    elif push.version > ledger.version or push.version < 0:
        problem = f"computed with version {push.version}, which is not there yet"
    else:
        problem = _given(ledger, push) or _parts(ledger.blocks, push.parts)
    return wrong(problem) if problem else None


def check_load(ledger: Ledger, load: Load, member: KnownWorker) -> Refused | None:
    """Values of one slot must have its shapes and dtypes."""
    problem = _sequence(load, member)
    for key, part in load.parts.items():
        there = ledger.state.get(key, {}).get(load.slot)
        if there is None or part.rows is not None or _kind(there) != _kind(part.values):
            problem = problem or f"{load.slot} of block {key}"
    return wrong(problem) if problem else None


def check_rows(
    ledger: Ledger, slot: str, keys: Iterable[int], rows: Mapping[int, Tensor]
) -> Refused | None:
    """A pull may ask for this server's blocks, their slots, and existing rows."""
    for key in keys:
        if key not in ledger.blocks:
            return wrong(f"block {key} is not on this server")
        if slot not in ledger.state[key]:
            return wrong(f"{ledger.blocks[key].variable.name} has no {slot}")
    for key, own in rows.items():
        if key not in ledger.blocks or slot != WEIGHT or _rows(ledger.blocks[key], own):
            return wrong(f"rows of block {key} that are not there")
    return None


def check_settle(ledger: Ledger, settle: Settle) -> Refused | None:
    """A `Settle` must be for the closed clock that is due, of an update with sums."""
    if settle.clock != ledger.version or (settle.clock, "") not in ledger.closed:
        return wrong(f"clock {settle.clock} is not closed")
    names = {variable.name for variable in ledger.updater.variables}
    plain = all(x.dtype == torch.float64 and x.dim() == 1 for x in settle.sums.values())
    if not ledger.updater.coupled or settle.sums.keys() != names or not plain:
        return wrong("sums of other variables")
    workers = ledger.closed[settle.clock, ""]
    if not workers:
        return None
    lowest = ledger.pending[settle.clock][workers[0]]
    try:  # before the journal: a record that cannot be applied must not be in the log
        ledger.updater.scalars(settle.sums, lowest.given)
    except Exception as error:
        return wrong(f"sums that the update does not take: {error}")
    return None


def check_add(ledger: Ledger, add: Add, most: int) -> Refused | None:
    """A small sum must have the worker's own clock, or none, and one length for all."""
    meets = add.clock == MEETING
    if not meets and (ledger.alone or ledger.consistency.alone(add.clock)):
        return wrong(
            f"sums over workers do not go with sync={ledger.consistency} at clock {add.clock}"
        )
    if not add.name or not (meets or add.clock == ledger.members[add.worker].clock):
        return wrong(f"a sum for clock {add.clock}")
    there = ledger.added.get((add.clock, add.name), {})
    kinds = {(x.values.shape, x.operation) for x in (*there.values(), add)}
    names = sum(clock == add.clock for clock, _ in ledger.added)
    plain = add.values.dtype == torch.float64 and add.values.dim() == 1
    problem = f'sum "{add.name}" is not what others add'
    if not plain or names > most or add.operation not in _OPERATIONS:
        return wrong(problem)
    if len(kinds) > 1:
        alone = "one worker alone has changed weights between two calls, or loads them"
        return wrong(f"{problem}: {alone}")
    return None


def wrong(text: str) -> Refused:
    """The answer to a request that can never be right."""
    return Refused(reason=WRONG, text=text)


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _sequence(request: Push | Load, member: KnownWorker) -> str:
    right = request.sequence == member.sequence + 1
    return "" if right else f"sequence {request.sequence} after {member.sequence}"


def _given(ledger: Ledger, push: Push) -> str:
    """A worker alone in its update computes the numbers itself."""
    updater = ledger.updater
    names = updater.numbers if ledger.alone else updater.given
    return "" if set(names) == push.given.keys() else f"numbers {sorted(push.given)}"


def _parts(blocks: Mapping[int, VariableBlock], parts: Mapping[int, TensorPart]) -> str:
    """The problem of a push's parts; "" if they fit."""
    missing = [k for k, block in blocks.items() if k not in parts and not block.variable.rows]
    if missing or not parts.keys() <= blocks.keys():
        return "not the blocks of this server"
    for key, part in parts.items():
        block = blocks[key]
        if part.rows is not None and _rows(block, part.rows):
            return f"rows of block {key}"
        shape = block.shape if part.rows is None else (len(part.rows), *block.shape[1:])
        if tuple(part.values.shape) != shape:
            return f"block {key} has shape {list(part.values.shape)}, not {list(shape)}"
        if part.values.dtype not in (block.variable.dtype, *_COMPRESSED):
            return f"block {key} as {part.values.dtype}"
    return ""


def _rows(block: VariableBlock, rows: Tensor) -> bool:
    """Whether rows are invalid: outside of this block, not ascending, or repeated."""
    if not block.variable.rows or rows.dtype != torch.int64 or rows.dim() != 1:
        return True
    if not len(rows):
        return False
    ascending = bool((rows[1:] > rows[:-1]).all())
    return not ascending or int(rows[0]) < 0 or int(rows[-1]) >= block.shape[0]
