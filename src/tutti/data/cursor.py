"""The position of a loader in its run, and its form in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Cursor:
    """What loops have received: whole epochs, samples of this one, all of it if it has `ended`; the state of
    a stream."""

    epoch: int = 0
    sample: int = 0
    ended: bool = False
    stream: Any = None


def as_state(cursor: Cursor, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts, lists and dicts; `identity` names the order and the dataset."""
    return {
        "format": FORMAT,
        "epoch": cursor.epoch,
        "sample": cursor.sample,
        "ended": cursor.ended,
        "stream": cursor.stream,
        **identity,
    }


def of_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Cursor:
    """The cursor of `as_state`, for a loader of the same identity; raises `CheckpointError` for another."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise _refused("this is no state of a loader", fix="the dict that loader.state_dict() gave")
    if state["format"] != FORMAT:
        raise _refused(
            f"this state of a loader has format {state['format']}, not {FORMAT}",
            fix="the version of tutti that wrote it",
        )
    missing = [k for k in ("epoch", "sample", "ended", "stream", *identity) if k not in state]
    if missing:
        raise _refused(f'this state of a loader lacks "{missing[0]}"', fix="a complete state")
    for name, ours in identity.items():
        if state[name] != ours:
            raise _another(name, state[name], ours)
    for name in ("epoch", "sample"):
        if type(state[name]) is not int or state[name] < 0:
            raise _refused(
                f'"{name}" of this state is {state[name]!r}, no count', fix="a state unchanged"
            )
    return Cursor(state["epoch"], state["sample"], bool(state["ended"]), state["stream"])


def check_plain(state: Any, name: str) -> None:
    """Raise `CheckpointError` for a stream's state that JSON cannot hold."""
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise _refused(
            f"the state_dict of {name} cannot be saved: {error}",
            why="a loader's state holds numbers, texts, lists and dicts only",
            fix="a state_dict of these",
        ) from None


def refuse_stream(name: str) -> CheckpointError:
    """The error of a stream that cannot take over the state of one that could."""
    return _refused(
        f"this state holds that of a stream, and {name} has no load_state_dict",
        why=_DATASET,
        fix="the dataset of the run that is resumed",
    )


def between_batches(sample: int, batch_size: int) -> CheckpointError:
    """The error of a position at which no batch begins."""
    return _refused(
        f"no batch begins at sample {sample} of the epoch",
        fix=f"a state unchanged, of a loader with batch_size={batch_size}",
    )


def _another(name: str, theirs: Any, ours: Any) -> CheckpointError:
    what, why, fix = _DIFFERENT.get(name, _ARGUMENT)
    return _refused(what.format(name=name, theirs=theirs, ours=ours), why=why, fix=fix.format(
        name=name, theirs=theirs
    ))  # fmt: skip


_ARGUMENT = (
    "this state is of a loader with {name}={theirs}, this loader has {name}={ours}",
    "its position counts samples in another order",
    "{name}={theirs}",
)
_DATASET = "its samples would not be those that follow"
_DIFFERENT = {
    "length": (
        "this state is of a dataset of {theirs} samples, this one has {ours}",
        *(_DATASET, "the dataset of the run that is resumed"),
    ),
    "first_samples": (
        "this state is of another dataset: its first samples differ",
        *(_DATASET, "the dataset of the run that is resumed, with the same transforms"),
    ),
    "kind": (
        "this state is of a {theirs}, this loader reads a {ours}",
        *(_DATASET, "the dataset of the run that is resumed"),
    ),
}


def _refused(what: str, *, why: str = "", fix: str) -> CheckpointError:
    return CheckpointError(what, why=why, fix=fix)
