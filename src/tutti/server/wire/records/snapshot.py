"""Writes a ledger to a file and restores it: its numbers, then the state, then pushes not applied yet."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tutti.comm.collectives.payload import DTYPES, octets
from tutti.server.protocol.ledger import KnownWorker, Ledger
from tutti.server.protocol.messages import Add, Done, Push
from tutti.server.wire.records.journal import DamageError, Found, entry, read_entries, record_of
from tutti.server.wire.records.push_segments import Segments

# Text and bytes of an entry.
Content = list[tuple[dict[str, Any], list[memoryview]]]


def frozen(ledger: Ledger, segments: Segments, *, copy: bool) -> Content:
    """The entries of a ledger; with `copy` later changes of the ledger do not affect them."""
    found: Content = [({"ledger": _numbers(ledger)}, [])]
    for key, slots in ledger.state.items():
        for slot, x in slots.items():
            kept = x.clone() if copy else x
            place = {"key": key, "slot": slot, "dtype": DTYPES.index(x.dtype)}
            found.append(({"state": place | {"shape": list(x.shape)}}, [octets(kept)]))
    waiting = [*ledger.pending.values(), *ledger.added.values()]
    for record in (record for by_worker in waiting for record in by_worker.values()):
        text, body, _ = entry(record, segments)
        found.append((text, [memoryview(bytes(view)) for view in body]))
    found.append(({"end": len(found)}, []))
    return found


def restore(path: Path, number: int, ledger: Ledger, segments: Segments) -> None:
    """Restore `ledger` from a file.

    Raises:
        DamageError: the file is incomplete or damaged.
    """
    count, ended = 0, False
    for found in read_entries(path, number):
        if ended:
            raise DamageError(
                path, found.offset, "the file continues after its last entry", found.position
            )
        if "end" in found.text:
            ended = found.text["end"] == count
            continue
        try:
            _take(ledger, found, path, segments)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DamageError(path, found.offset, str(error), found.position) from error
        count += 1
    if not ended:
        raise DamageError(path, path.stat().st_size, f"it ends after {count} entries", count)


def _take(ledger: Ledger, found: Found, path: Path, segments: Segments) -> None:
    if "ledger" in found.text:
        _restore_numbers(ledger, found.text["ledger"])
    elif "state" in found.text:
        place = found.text["state"]
        values = found.body.view(DTYPES[place["dtype"]]).view(place["shape"])
        own = ledger.state[place["key"]][place["slot"]]
        if own.shape != values.shape or own.dtype != values.dtype:
            raise KeyError(f"{place['slot']} of block {place['key']} has another shape")
        own.copy_(values)
    else:
        record = record_of(found, path, segments)
        if isinstance(record, Push):
            ledger.pending.setdefault(record.clock, {})[record.worker] = record
        elif isinstance(record, Add):
            ledger.added.setdefault((record.clock, record.name), {})[record.worker] = record
        else:
            raise KeyError("a record that does not wait")


def _numbers(ledger: Ledger) -> dict[str, Any]:
    return {
        "version": ledger.version,
        "begun": ledger.begun,
        "members": [_member(w, x) for w, x in ledger.members.items()],
        "closed": [[clock, name, list(ws)] for (clock, name), ws in ledger.closed.items()],
        "settled": {n: x.tolist() for n, x in ledger.settled.items()},
        "numbers": dict(ledger.numbers),
        "lag": ledger.lag,
        "staleness": [list(pair) for pair in ledger.staleness.items()],
    }


def _restore_numbers(ledger: Ledger, found: dict[str, Any]) -> None:
    ledger.version, ledger.begun = found["version"], found["begun"]
    ledger.members = dict(_of_member(x) for x in found["members"])
    ledger.closed = {(clock, name): tuple(ws) for clock, name, ws in found["closed"]}
    ledger.settled = {n: torch.tensor(x, dtype=torch.float64) for n, x in found["settled"].items()}
    ledger.numbers, ledger.lag = found["numbers"], found["lag"]
    ledger.staleness = Counter(dict(found["staleness"]))


def _member(worker: int, x: KnownWorker) -> list[Any]:
    answer = x.answer and [x.answer.version, x.answer.sequence, x.answer.staleness]
    return [worker, x.incarnation, x.clock, x.active, x.sequence, answer]


def _of_member(found: list[Any]) -> tuple[int, KnownWorker]:
    worker, incarnation, clock, active, sequence, raw = found
    answer = raw and Done(version=raw[0], sequence=raw[1], staleness=raw[2])
    return worker, KnownWorker(incarnation, clock, active, sequence, answer)
