"""`Checkpoints`: saves a run while it trains, stops it well, and restores it."""

from __future__ import annotations

import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Self

from torch import Tensor

from tutti.argument_types import check_type
from tutti.capture.default_device import own_default_in
from tutti.checkpoint.unanimous import ranks_of
from tutti.environment import ROLE
from tutti.errors import CheckpointError, CommError, TuttiError
from tutti.launch.ranks import ensure_process_group
from tutti.launch.roles import SERVER, WORKER, Role
from tutti.launch.telling import tell, tell_last_save
from tutti.recording.run_writer import note
from tutti.remote_paths import path_of
from tutti.resuming import restoring, run_folder
from tutti.resuming.agreement import Agreement
from tutti.resuming.background_saves import BUSY, FAILED
from tutti.resuming.due import Due
from tutti.resuming.history import STEP, History
from tutti.resuming.parts import RunParts
from tutti.resuming.retention import Retention
from tutti.resuming.saver import Saver
from tutti.resuming.stop_signals import SIGNAL_BITS, SIGNALS, StopSignals, leave_as_told
from tutti.user_lines import users_level

# The bits of a vote after those of the signals: the time of `every` is over; a background save has failed, or
# is being written.
_TIME, _FAILED, _BUSY = (1 << len(SIGNALS) + k for k in range(3))
# A save begins after the vote of its round: the next votes tell of it, and are read in the round after.
_ROUNDS_TO_KNOW = 2


@own_default_in("tick", "save", "restore")
class Checkpoints:
    """The checkpoints of a run: saved while it trains and when a signal ends it, restored in any layout.

        run = tutti.Checkpoints("runs/gpt", every=100, step=step, loader=loader, schedule=schedule)
        run.restore()
        for tokens, targets in loader:
            loss = step(tokens, targets)
            schedule.step()
            if run.tick(loss=loss):
                break

    Each checkpoint holds the state of all parts, the optimizers' hyper-parameters, the metrics, and the
    states of the global random generators of Python, NumPy and torch where all ranks have the same.
    It becomes visible as a whole, in `folder/step-00000100`, which `step.load` reads, too. All ranks make
    the same calls.

    Args:
        folder: of this run alone; a local path, or a URL of fsspec, such as "s3://bucket/run".
        every: steps between saves, or a time such as "10 min"; None saves on signals and `save` only.
        keep: how many of the newest checkpoints stay; None for all. If a metric given to `tick` is NaN in all
            of these, the newest one before stays, too.
        keep_best: a metric given to `tick`: the checkpoint with its least value stays, too; "-accuracy" for
            the greatest. A warning tells if no `tick` has had it when the first checkpoints go.
        asynchronous: whether `tick` waits only for a copy of the state, in memory taken at its first call,
            and a process beside each rank writes it. None: if the state has 16 MB or more. Replicas
            and servers save at once.
        parts: by name: one or several steps of `distribute`, the first of which counts the steps of the run,
            and anything else with a state: objects with `state_dict` and `load_state_dict`, dicts,
            `torch.Generator`s. Their states may hold numbers, texts, lists, tuples, dicts, sets, NumPy values
            and tensors; rank 0's are saved.

    Raises:
        TuttiError: no step, a part without a state, or an argument that is not as above.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int | str | None = None,
        keep: int | None = 3,
        keep_best: str | None = None,
        asynchronous: bool | None = None,
        **parts: Any,
    ) -> None:
        self._folder = path_of(folder, "folder")
        given, kinds = "a truth value or None", (bool, NoneType)
        check_type("asynchronous", asynchronous, kinds, wanted=given, fix="asynchronous=True")
        if keep_best == "":
            raise TuttiError('keep_best="" names no metric', fix='keep_best="loss", or None')
        self._due, self._parts = Due(every), RunParts(parts)
        self._retention = Retention(keep, "" if keep_best is None else keep_best)
        self._saver = Saver(self._folder, self._parts, self._retention)
        self._history, self._signals = History(), StopSignals()
        self._agreement: Agreement | None = None
        self._asynchronous = asynchronous if every is not None else False
        self._restored: int | None = None
        self._saved: int | None = None
        self._saved_before: int | None = None  # while a background save is not known to be whole
        self._end = weakref.finalize(self, _end, self._saver)
        self._stop = 0  # the vote that ended the run
        self._rounds_since_save = 0
        self._warned_of_nan = False
        self._saves_without_best = 0
        self._due.begin(self._parts.num_steps)
        if Role.parse(ROLE.read() or f"{WORKER} 0").kind == SERVER:
            self._signals.install()  # it serves until the workers have saved and left

    def restore(self, *, strict: bool = True) -> int | None:
        """Go on from the newest whole checkpoint, under whatever layout it was saved.

        A warning names each damaged checkpoint, and the next older one is taken. Afterwards the learning
        rates, and other numbers of the optimizers' groups, are those of the save.

        Args:
            strict: whether checkpoint and run must have the same parts; else the common ones are restored.

        Returns:
            The number of steps that it holds; None if the folder has no checkpoint.

        Raises:
            CheckpointError: on every rank: all are damaged, or it does not fit this run. No step has changed.
        """
        ensure_process_group()
        self._saver.settle()
        ranks = ranks_of()
        saved = restoring.newest_whole(self._folder, ranks, self._saver.damaged)
        if saved is None:
            return None
        self._history.load(restoring.restore(saved, self._parts, ranks, strict=strict))
        self._restored = self._saved = saved.record.step
        self._due.begin(self._parts.num_steps)
        note("restore", step=self._restored, folder=str(self._folder))
        return self._restored

    def tick(self, **metrics: Any) -> bool:
        """Count one training step; save if it is time, or if SIGINT or SIGTERM has come.

        Call it after each step. The first call locks the folder and takes over the two signals, in the main
        thread. A signal is noted; all ranks save after the same step, usually the next one, and `tick`
        returns True. If the script goes on nevertheless, the next call does what the signal would have done:
        it raises `KeyboardInterrupt`, or `SystemExit` with code 143.

        Args:
            metrics: numbers, or tensors of one number, for `history`. Tensors on a GPU are read at the next
                save: no step waits for them.

        Returns:
            Whether the script should end now.

        Raises:
            CheckpointError: on every rank: this save failed, or the one written in the background. The state
                and the last checkpoint are whole, and the next save begins anew.
        """
        if self._stop:
            leave_as_told(self._stop)
        agreement = self._begun()
        self._saver.prepare(self._asynchronous)
        step = self._parts.num_steps
        self._history.add(step, metrics)
        due, vote = self._due.by_steps(step), self._signals.vote
        if agreement.leads and self._due.by_time():
            vote |= _TIME
        background = self._saver.background_state()
        if background == FAILED:
            vote |= _FAILED
        rounds = agreement.num_votes
        agreed = agreement.agreed(vote, _BUSY if background == BUSY else 0)
        if agreement.num_votes > rounds:
            self._rounds_since_save += 1
            if self._rounds_since_save >= _ROUNDS_TO_KNOW and not agreed & (_BUSY | _FAILED):
                self._saver.is_settled()
        self._stop = agreed & SIGNAL_BITS
        try:
            if self._stop:
                self._save_last()
            elif agreed & _FAILED:
                self._settle()
            elif due or agreed & _TIME:
                self._settle()
                self._save(self._saver.save_soon)
                self._rounds_since_save = 0
        finally:
            if self._stop:
                self._signals.restore()
        return self.stopping

    def save(self) -> Path:
        """Save now, unless the checkpoint of this step is there; returns its path once it is visible."""
        self._begun()
        self._settle()
        self._save(self._saver.save)
        return run_folder.path_of(self._folder, self._parts.num_steps)

    def _save_last(self) -> None:
        """Save before the end, also if the last save has failed."""
        try:
            self._settle()
        except CheckpointError as error:
            warnings.warn(f"an earlier save has failed: {error}", stacklevel=users_level())
        self._save(self._saver.save)
        if self._saver.writes:
            tell_last_save(self._parts.num_steps)

    def _save(self, save: Callable[[int, Mapping[str, float], Mapping[str, Tensor]], None]) -> None:
        step = self._parts.num_steps
        if step == self._saved:
            return
        metrics = self._history.latest(self._saved if self._saved is not None else -1)
        self._signals.saving = True
        began = time.perf_counter()
        try:
            save(step, metrics, self._history.state())
        except CheckpointError as error:
            note("save failed", step=step, text=str(error))
            raise
        finally:
            self._signals.saving = False
        note("save", step=step, folder=str(self._folder), seconds=time.perf_counter() - began)
        self._saved_before, self._saved = self._saved, step
        self._warn_of_nan(step, metrics)
        self._warn_of_no_best()
        self._due.saved()

    def _warn_of_nan(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once that a checkpoint may hold NaN."""
        lost = [name for name, value in metrics.items() if math.isnan(value)]
        if lost and not self._warned_of_nan:
            self._warned_of_nan = True
            warnings.warn(
                f"the checkpoint of step {step} has {lost[0]}=nan, and its weights may hold NaN: the newest "
                f"one without stays in {self._folder}; remove those behind it to go on from there",
                stacklevel=users_level(),
            )

    def _warn_of_no_best(self) -> None:
        """Warn once, before a checkpoint goes, that none is the best: `tick` has not got its metric."""
        metric, known = self._retention.metric, self._history.columns()
        if not metric or metric in known:
            return
        self._saves_without_best += 1
        if self._saves_without_best == (self._retention.keep or 1):
            names = sorted(known.keys() - {STEP})
            given = f"it has got {', '.join(names)}" if names else "it has got no metrics"
            warnings.warn(
                f'no checkpoint stays as the best: tick has not got the metric of keep_best="{metric}" yet '
                f"({given}): run.tick({metric}=...)",
                stacklevel=users_level(),
            )

    def _settle(self) -> None:
        """Wait for a background save. Raises `CheckpointError` on every rank if it failed."""
        try:
            self._saver.settle()
        except CheckpointError as error:
            note("save failed", step=self._saved, text=str(error))
            self._saved = self._saved_before
            raise

    def close(self) -> None:
        """Wait for a background save, and give the signals back; leaving a `with` block does so, too.

        Raises:
            CheckpointError: the save failed.
        """
        self._signals.restore()
        error = self._saver.close(wait=True)
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, raised: object, _trace: object) -> None:
        if raised is None:
            return self.close()
        self._signals.restore()
        error = self._saver.close(wait=not isinstance(raised, CommError))
        if error is not None:
            warnings.warn(str(error), stacklevel=users_level())

    @property
    def stopping(self) -> bool:
        """Whether a signal has ended the run: its state is saved, and the script should end."""
        return bool(self._stop)

    @property
    def history(self) -> dict[str, list[Any]]:
        """The metrics since the first step, a list for each; "step" has the numbers of the steps."""
        return self._history.columns()

    def steps(self) -> list[int]:
        """The saved steps whose files are all there, in order."""
        return [one.step for one in run_folder.whole_steps(self._folder)]

    @property
    def latest(self) -> Path | None:
        """The newest of them."""
        steps = self.steps()
        return run_folder.path_of(self._folder, steps[-1]) if steps else None

    def _begun(self) -> Agreement:
        """The agreement of the ranks; at first lock the folder and take over the signals."""
        if self._agreement is None:
            ensure_process_group()
            self._saver.open(self._restored)
            self._agreement = Agreement(self._parts.main.mode.running)
            self._signals.install()
        return self._agreement


def _end(saver: Saver) -> None:
    """At the end of the script, or once it has forgotten its `Checkpoints`."""
    error = saver.close(wait=not isinstance(getattr(sys, "last_value", None), CommError))
    if error is not None:
        # A rank that prints nothing may be the only one that is left to say so.
        tell(f"a save in the background is lost: {error}")
