"""Saves all parts of a run as one checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.checkpoint.owner_lock import OwnerLock
from tutti.checkpoint.unanimous import Unanimous, ranks_of
from tutti.errors import CheckpointError, CommError
from tutti.resuming import random_states, run_folder
from tutti.resuming.parts import RunParts, groups_of
from tutti.resuming.retention import Retention
from tutti.resuming.run_folder import RunRecord
from tutti.resuming.state_trees import TreeWriter
from tutti.saving.step_checkpoint import by_ranks_left, open_for, write_state

# The names of tensors beside those of the first step; no module has such a name.
PREFIX = "run/"


@dataclass(frozen=True)
class _Written:
    """The states of all parts but the steps, encoded."""

    trees: dict[str, Any]
    tensors: Mapping[str, Tensor]
    random: str  # checksums of the random states

    def share(self, ranks: Unanimous) -> dict[str, Tensor]:
        """The tensors that this rank writes."""
        return {n: x for n, x in self.tensors.items() if ranks.leads or isinstance(x, DTensor)}


class Saver:
    """Saves into one folder. All ranks call each method together.

    Attributes:
        damaged: steps that a load has found damaged; a new save of such a step replaces it.
    """

    def __init__(self, folder: Path, parts: RunParts, retention: Retention) -> None:
        self._folder, self._parts, self._retention = folder, parts, retention
        self._lock: OwnerLock | None = None
        self.damaged: set[int] = set()

    @property
    def writes(self) -> bool:
        """Whether this process takes part in saves: with servers, only the first worker does."""
        return self._parts.main.mode.writes()

    def open(self, restored: int | None) -> None:
        """Lock the folder, before the first save.

        Args:
            restored: the step from which the run goes on, if it does.

        Raises:
            CheckpointError: on every rank: another run saves there, or has saved later steps.
        """
        if self.writes:
            what = f"cannot save into {self._folder}"
            ranks_of().lead(what, lambda: self._open(restored))

    def _open(self, restored: int | None) -> str:
        self._own()
        steps = run_folder.whole_steps(self._folder, without=self.damaged)
        newest, count = steps[-1].step if steps else -1, self._parts.num_steps
        if newest >= count and newest != restored:
            raise CheckpointError(
                f"{self._folder} holds step {newest} of another run; this one is at step {count}",
                why="the newest step would not be the newest of this run",
                fix="call restore() before the first step to go on from there, or choose another folder",
            )
        return ""

    def _own(self) -> None:
        self._lock = open_for(self._parts.main.mode.running, self._folder)

    def save(self, step: int, metrics: Mapping[str, float], history: Mapping[str, Tensor]) -> None:
        """Save everything as the checkpoint of `step`: durable, then visible, then remove older ones.

        Raises:
            CheckpointError: on every rank; no part of the new one is visible, older ones stay.
            CommError: a rank is lost; the same holds.
        """
        with contextlib.ExitStack() as here:
            for one in self._parts.steps.values():
                here.enter_context(one.mode.state_here())
            if self.writes:
                running = self._parts.main.mode.running
                by_ranks_left(running, lambda ranks: self._save(step, metrics, history, ranks))

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float],
        history: Mapping[str, Tensor],
        ranks: Unanimous,
    ) -> None:
        draft, steps = run_folder.draft_of(self._folder, step), tuple(self._parts.steps)
        what = f"cannot write the checkpoint {run_folder.path_of(self._folder, step)}"
        written: list[_Written] = []

        def encode() -> str:
            written.append(self._encoded(history))
            return written[-1].random

        same = random_states.common(ranks.each(what, encode))
        (found,) = written
        trees = {**found.trees, "random": {n: found.trees["random"][n] for n in sorted(same)}}
        record = RunRecord(step, time.time(), self._retention.best, metrics, steps, trees)
        ranks.lead(what, self._prepare)
        try:
            for name in reversed(steps):  # the first step's checkpoint has the record
                main, path = name == steps[0], run_folder.part_path(draft, steps, name)
                extra = record.extra() if main else {}
                more = found.share(ranks) if main else {}
                running = self._parts.steps[name].mode.running
                write_state(running, path, extra, ranks, more)
            ranks.lead(what, lambda: self._commit(step))
        except (CheckpointError, CommError):
            if ranks.leads:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def _encoded(self, history: Mapping[str, Tensor]) -> _Written:
        writer, parts = TreeWriter(PREFIX), self._parts
        random = random_states.states()
        trees = {
            "parts": {n: writer.write(parts.state_of(n), n) for n in parts.others},
            "groups": {
                n: writer.write(groups_of(one), f"{n}.optimizer.param_groups")
                for n, one in parts.steps.items()
            },
            "random": {n: writer.write(state, n) for n, state in random.items()},
            "history": writer.write(dict(history), "history"),
        }
        return _Written(trees, writer.tensors, random_states.digests(random))

    def _prepare(self) -> str:
        self._own()
        run_folder.remove_leftovers(self._folder)
        return ""

    def _commit(self, step: int) -> str:
        run_folder.commit_step(self._folder, step)
        self.damaged.discard(step)
        try:
            run_folder.remove_leftovers(self._folder)
            whole = run_folder.whole_steps(self._folder, without=self.damaged)
            for one in self._retention.superfluous(whole):
                run_folder.remove_step(one)
        except OSError as error:
            warnings.warn(f"older checkpoints in {self._folder} stay: {error}", stacklevel=2)
        return ""
