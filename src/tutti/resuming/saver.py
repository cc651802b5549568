"""Saves all parts of a run as one checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.calls.running import Running
from tutti.checkpoint.owner_lock import OwnerLock
from tutti.checkpoint.unanimous import Unanimous, ranks_of
from tutti.errors import CheckpointError, CommError
from tutti.launch.roles import is_first_worker
from tutti.launch.telling import tell
from tutti.remote_paths import is_of_one_process
from tutti.resuming import random_states, run_folder
from tutti.resuming.background_saves import DONE, BackgroundSaves, Made
from tutti.resuming.parts import RunParts
from tutti.resuming.retention import Retention
from tutti.resuming.run_folder import RunRecord
from tutti.resuming.run_save import RunSave
from tutti.resuming.state_trees import TreeWriter
from tutti.saving.hyper_parameters import groups_of
from tutti.saving.state_share import StateShare
from tutti.saving.step_checkpoint import (
    by_ranks_left,
    open_for,
    refuse_unequal,
    state_share,
    write_state,
)

# The names of tensors beside those of the first step; no module has such a name.
PREFIX = "run/"
# A smaller state, of all ranks together, is written in less time than its hand-over to a process takes.
SMALL_NBYTES = 2**24
_BEHIND = "{folder} holds step {newest} of a worker that was ahead and has left: saves go on after that step"


class Saver:
    """Saves into one folder. All ranks call each method together.

    Attributes:
        damaged: steps that a load has found damaged; a new save of such a step replaces it.
    """

    def __init__(self, folder: Path, parts: RunParts, retention: Retention) -> None:
        self._folder, self._parts, self._retention = folder, parts, retention
        self._lock: OwnerLock | None = None
        self._background: BackgroundSaves | None = None
        self._prepared = False  # whether it is decided how to save
        self.damaged: set[int] = set()

    @property
    def writes(self) -> bool:
        """Whether this process takes part in a save: with servers, only the first remaining worker does."""
        return self._parts.main.mode.writes()

    def open(self, restored: int | None) -> None:
        """Lock the folder, before the first save; a worker that takes over locks it for each save.

        Args:
            restored: the step from which the run goes on, if it does.

        Raises:
            CheckpointError: on every rank: another run saves there, or has saved later steps.
        """
        if is_first_worker():
            what = f"cannot save into {self._folder}"
            ranks_of().lead(what, lambda: self._open(restored))

    def _open(self, restored: int | None) -> str:
        self._own()
        steps = run_folder.whole_steps(self._folder, without=self.damaged)
        newest, count = steps[-1].step if steps else -1, self._parts.num_steps
        if newest >= count and newest != restored:
            later = ", ".join(
                run_folder.path_of(self._folder, x.step).name for x in steps if x.step >= count
            )
            fix = (
                "call restore() before the first step to go on from there, or choose another folder"
            )
            if restored is not None:
                fix = f"remove {later}, or choose another folder"
            raise CheckpointError(
                f"{self._folder} holds step {newest} of another run; this one is at step {count}",
                why="the newest step would not be the newest of this run",
                fix=fix,
            )
        return ""

    def _own(self) -> None:
        self._lock = open_for(self._parts.main.mode.running, self._folder)

    def prepare(self, asynchronous: bool | None) -> None:
        """Take memory for background saves, where the run can have them: once all of its steps have begun.

        Args:
            asynchronous: as that of `Checkpoints`.
        """
        if not self._prepared and all(one.begun for one in self._runnings):
            self._background = self._made_background(asynchronous)
            self._prepared = True

    def _made_background(self, asynchronous: bool | None) -> BackgroundSaves | None:
        if asynchronous is False or not self._each_alone():
            return None
        ranks = ranks_of()
        shares = self._shares({}, ranks)
        nbytes = sum(share.manifest.nbytes for share in shares.values())
        if asynchronous is None and nbytes < SMALL_NBYTES:
            return None
        made = BackgroundSaves(ranks, self._lock.fd if self._lock is not None else -1)

        def reserve() -> str:
            made.reserve(shares)
            return ""

        try:
            ranks.each(f"cannot take memory for saves into {self._folder}", reserve)
        except (CheckpointError, CommError):
            made.close(wait=False)
            raise
        return made

    @property
    def _runnings(self) -> list[Running]:
        return [one.mode.running for one in self._parts.steps.values()]

    def _each_alone(self) -> bool:
        """Whether a process can write the share of each rank: no servers, no replicas."""
        if self._parts.main.mode.served is not None or is_of_one_process(self._folder):
            return False
        return all(one.job.layout.num_replicas == 1 for one in self._runnings)

    def _shares(self, more: Mapping[str, Tensor], ranks: Unanimous) -> dict[str, StateShare]:
        """This rank's share of each step, where of equal ranks one saves a tensor."""
        found: dict[str, StateShare] = {}
        for name, step in self._parts.steps.items():
            running = step.mode.running
            mesh, stage = running.job.layout.mesh, running.job.layout.stage_mesh
            rank = dist.get_rank() if dist.is_initialized() else 0
            position = mesh.index(stage, mesh.coordinates(rank))
            share = state_share(running, {}, {}, leads=ranks.leads)
            found[name] = share.spread(position, stage.num_ranks)
        main = next(iter(found))
        found[main] = found[main].with_more(share_of(more, ranks))
        return found

    def save_soon(
        self, step: int, metrics: Mapping[str, float], history: Mapping[str, Tensor]
    ) -> None:
        """Save everything as the checkpoint of `step`, beside the training if `prepare` found that possible.

        Then a failure is one of `settle`; else as `save`.
        """
        background = self._background
        if background is None:
            return self.save(step, metrics, history)
        ranks = ranks_of()

        self._refuse_unequal(step, ranks)

        def make() -> Made:
            if ranks.leads:
                self._own()
            save, tensors = self._made(step, metrics, history)
            return save, self._shares(tensors, ranks)

        background.begin(self._what(step), make)
        self._note_saved(step)

    def background_state(self) -> str:
        """The state of this rank's background save: `DONE`, `BUSY`, or `FAILED`."""
        return DONE if self._background is None else self._background.state()

    def is_settled(self) -> None:
        """Note that the background save is written on all ranks."""
        if self._background is not None:
            self._background.is_open = False

    def settle(self) -> None:
        """Wait for the background save in progress. Raises as `save`."""
        if self._background is not None:
            self._background.settle()

    def close(self, *, wait: bool) -> CheckpointError | None:
        """End background saves; with `wait` that of this rank is written first. The error of a failed one."""
        background, self._background = self._background, None
        return None if background is None else background.close(wait=wait)

    def _what(self, step: int) -> str:
        return f"cannot write the checkpoint {run_folder.path_of(self._folder, step)}"

    def _refuse_unequal(self, step: int, ranks: Unanimous) -> None:
        for running in self._runnings:
            refuse_unequal(running, ranks, self._what(step))

    def _note_saved(self, step: int) -> None:
        self.damaged.discard(step)
        for running in self._runnings:
            running.divergence.note_equal(step)

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
                try:
                    by_ranks_left(running, lambda ranks: self._save(step, metrics, history, ranks))
                finally:
                    if not is_first_worker():  # an earlier one may be heard of again
                        self._lock = None

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float],
        history: Mapping[str, Tensor],
        ranks: Unanimous,
    ) -> None:
        self._refuse_unequal(step, ranks)
        steps = self._parts.steps
        made: list[tuple[RunSave, Mapping[str, Tensor]]] = []

        def make() -> str:
            made.append(self._made(step, metrics, history))
            return ""

        what = self._what(step)
        ranks.each(what, make)
        ((save, tensors),) = made
        if newest := ranks.lead(what, lambda: self._owned(step)):
            if int(newest) > step and ranks.leads:
                tell(_BEHIND.format(folder=self._folder, newest=newest))
            return

        def write_part(name: str, path: Path, extra: dict[str, Any]) -> None:
            more = share_of(tensors, ranks) if self._parts.main is steps[name] else {}
            write_state(steps[name].mode.running, path, extra, ranks, more)

        save.write(write_part, ranks)
        self._note_saved(step)

    def _made(
        self, step: int, metrics: Mapping[str, float], history: Mapping[str, Tensor]
    ) -> tuple[RunSave, Mapping[str, Tensor]]:
        """The save of now, and the tensors of all parts but the steps."""
        writer, parts = TreeWriter(PREFIX), self._parts
        random = random_states.states()
        trees = {
            "parts": {n: writer.write(parts.state_of(n), n) for n in parts.others},
            "groups": {
                n: writer.write(groups_of(one.optimizer), f"{n}.optimizer.param_groups")
                for n, one in parts.steps.items()
            },
            "random": {n: writer.write(state, n) for n, state in random.items()},
            "history": writer.write(dict(history), "history"),
        }
        keep, best = self._retention.keep, self._retention.best
        record = RunRecord(step, time.time(), best, metrics, tuple(parts.steps), trees)
        digests, damaged = random_states.digests(random), frozenset(self.damaged)
        return RunSave(self._folder, record, digests, keep, damaged), writer.tensors

    def _owned(self, step: int) -> str:
        """Lock the folder; its newest step if that forbids a save of `step` by a worker that takes over."""
        self._own()
        if is_first_worker():
            return ""
        steps = run_folder.whole_steps(self._folder, without=self.damaged)
        return str(steps[-1].step) if steps and steps[-1].step >= step else ""


def share_of(tensors: Mapping[str, Tensor], ranks: Unanimous) -> dict[str, Tensor]:
    """Those of `tensors`, of all parts but the steps, that this rank writes."""
    return {n: x for n, x in tensors.items() if ranks.leads or isinstance(x, DTensor)}
