"""Finds the newest whole checkpoint of a run, and puts it back into all parts."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.checkpoint.files import Reading
from tutti.checkpoint.manifest import USE_EARLIER
from tutti.checkpoint.unanimous import Unanimous
from tutti.errors import CheckpointError
from tutti.resuming import random_states, run_folder
from tutti.resuming.parts import RunParts
from tutti.resuming.run_folder import RunRecord
from tutti.resuming.state_trees import TreeReader, forms_in, tensors_beside, unreadable
from tutti.saving.hyper_parameters import check_groups, put_groups
from tutti.saving.step_checkpoint import check_fit, read_state
from tutti.state.shards import plain_dtensor
from tutti.user_lines import users_level


@dataclass(frozen=True)
class WholeStep:
    """A saved step whose files are whole: its record, and the readings of its steps by name."""

    path: Path
    record: RunRecord
    readings: dict[str, Reading]

    @property
    def main(self) -> Reading:
        """The reading of the first step, with the tensors of the run."""
        return self.readings[self.record.steps[0]]


def newest_whole(folder: Path, ranks: Unanimous, damaged: set[int]) -> WholeStep | None:
    """The newest whole saved step; None if there is none at all. All ranks call together.

    Warns of each damaged one, and notes it in `damaged`.

    Raises:
        CheckpointError: on every rank: all are damaged; has the reasons.
    """
    what = f"cannot read the checkpoints in {folder}"
    steps = json.loads(ranks.lead(what, lambda: json.dumps(run_folder.numbers(folder))))
    reasons = []
    for step in reversed(steps):
        try:
            return _checked(run_folder.path_of(folder, step), ranks)
        except CheckpointError as error:
            damaged.add(step)
            said = f"{error.what}: {error.why}" if error.why else error.what
            reasons.append(f"{said}; {error.fix}" if error.fix not in ("", USE_EARLIER) else said)
            if ranks.leads:
                name = run_folder.path_of(folder, step).name
                warnings.warn(f"{name} is left out: {reasons[-1]}", stacklevel=users_level())
    if not reasons:
        return None
    raise CheckpointError(
        f"no checkpoint in {folder} is whole",
        why="; ".join(reasons),
        fix="another folder starts anew; a copy of one of these may be whole",
    )


def _checked(path: Path, ranks: Unanimous) -> WholeStep:
    first = Reading(path, ranks)
    record = RunRecord.of(first.manifest, path)
    run_folder.refuse_other_step(path, record)
    if not record.steps:
        raise unreadable("its record names no step")
    readings = {
        name: first if k == 0 else Reading(run_folder.part_path(path, record.steps, name), ranks)
        for k, name in enumerate(record.steps)
    }
    for reading in readings.values():
        reading.check()
    return WholeStep(path, record, readings)


def restore(
    saved: WholeStep, parts: RunParts, ranks: Unanimous, *, strict: bool
) -> Mapping[str, Tensor]:
    """Put a saved step back into all parts, after all checks; returns the columns of the history.

    Raises:
        CheckpointError: on every rank: it has other parts, or is of another model or optimizer.
    """
    what = f"cannot restore {saved.path}"
    trees = saved.record.trees
    steps = {n: one for n, one in parts.steps.items() if n in saved.readings}
    others = [n for n in parts.others if n in trees["parts"]]
    ranks.each(what, lambda: _check_parts(saved, parts, strict))
    with contextlib.ExitStack() as replaced:
        for one in steps.values():
            replaced.enter_context(one.mode.state_replaced())
        for name, one in steps.items():
            _check_fit(one, saved.readings[name], ranks, strict)
        reader = TreeReader(_tensors(saved, parts, others))
        states = {n: reader.read(trees["parts"][n]) for n in others}
        groups = {n: reader.read(trees["groups"][n]) for n in steps}
        random, history = (reader.read(trees[kind]) for kind in ("random", "history"))

        def check() -> str:
            for name, one in steps.items():
                check_groups(one.optimizer, name, groups[name])
            return ""

        ranks.each(what, check)
        for name, one in steps.items():
            read_state(one.mode.running, saved.readings[name], ranks)
        for name, state in states.items():
            ranks.each(
                f'cannot restore the part "{name}"', lambda n=name, x=state: _load(parts, n, x)
            )
        for name, one in steps.items():
            put_groups(one.optimizer, groups[name])
        random_states.put(random)
    return history


def _check_parts(saved: WholeStep, parts: RunParts, strict: bool) -> str:
    trees = saved.record.trees
    try:
        there = {*saved.record.steps, *trees["parts"]}
        known = trees["groups"].keys() >= {*saved.record.steps} and trees.keys() >= {
            "random",
            "history",
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable(f"its record lacks {error}") from error
    if not known:
        raise unreadable("its record lacks states")
    here = {*parts.steps, *parts.others}
    more, less = sorted(there - here), sorted(here - there)
    if strict and (more or less):
        why = [f"it has {_named(more)}, which this run lacks"] if more else []
        why += [f"it lacks {_named(less)}"] if less else []
        raise CheckpointError(
            f"{saved.path} has other parts than this run",
            why="; ".join(why),
            fix="Checkpoints with the same parts, or restore(strict=False) for those that both have",
        )
    return ""


def _check_fit(step: Any, saved: Reading, ranks: Unanimous, strict: bool) -> None:
    """As `check_fit`; without `strict` the error says what that is about."""
    try:
        check_fit(step.mode.running, saved, ranks)
    except CheckpointError as error:
        if strict:
            raise
        why = f"{error.why}; " if error.why else ""
        raise CheckpointError(
            error.what,
            at=error.at,
            why=f"{why}strict=False leaves out parts of the run, and no tensors of a step",
            fix=error.fix or "the model and the optimizer of the save",
        ) from error


def _tensors(saved: WholeStep, parts: RunParts, others: list[str]) -> dict[str, Tensor]:
    """The tensors of all trees, read; shards where the part here has shards."""
    trees = saved.record.trees
    wanted = {kind: trees[kind] for kind in ("groups", "random", "history")}
    fresh = forms_in([wanted, *(trees["parts"][n] for n in others)])
    beside: dict[str, Tensor] = {}
    for name in others:
        if forms_in(trees["parts"][name]):
            tensors_beside(trees["parts"][name], parts.state_of(name), beside)
    for name, x in beside.items():
        if isinstance(x, DTensor) and x.dtype == fresh[name].dtype:
            fresh[name] = torch.empty_like(plain_dtensor(x))
    saved.main.fill(fresh)
    return fresh


def _load(parts: RunParts, name: str, state: Any) -> str:
    parts.load(name, state)
    return ""


def _named(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
