"""Saves that processes beside the ranks write: all ranks begin one together, and learn of a failed one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tutti.checkpoint.plans import plan_text
from tutti.checkpoint.share_plans import Place, place_of, share_planner
from tutti.checkpoint.unanimous import Unanimous, error_of, error_parts, parts_of
from tutti.errors import CheckpointError, TuttiError
from tutti.resuming.background_writer import BackgroundWriter
from tutti.resuming.rendezvous import arrange
from tutti.resuming.run_save import RunSave
from tutti.resuming.staged_save import StagedSave, StagedStep
from tutti.resuming.staging import Copy, arranged
from tutti.saving.state_share import StateShare
from tutti.user_lines import users_level

# A rank that waits for its own save asks the others so often.
_ASK_SECONDS = 0.2
# A user hears of a longer wait of a step for the save before.
_LONG_SECONDS = 1.0
DONE, BUSY, FAILED = "done", "busy", "failed"

# A save, and the shares of its steps by name.
Made = tuple[RunSave, dict[str, StateShare]]


@dataclass(frozen=True)
class _Planned:
    """The plan of a share, as long as its tensors have the same forms."""

    form: object
    plan: str
    places: list[Place]


class BackgroundSaves:
    """The background saves of one folder. All ranks call the constructor, `begin` and `settle` together.

    Args:
        ranks: all of them.
        lock: as for `BackgroundWriter`.

    Attributes:
        is_open: whether a save has begun that is not known to have ended on all ranks; the same on all.
    """

    def __init__(self, ranks: Unanimous, lock: int) -> None:
        self._ranks = ranks
        rendezvous, self._store = arrange(ranks)  # the store lives as long as this
        self._writer = BackgroundWriter(rendezvous, ranks.position, lock)
        self._number = 0
        self._error: Sequence[str] | None = None
        self._plans: dict[str, _Planned] = {}
        self._what, self._warned = "cannot save", False
        self.is_open = False

    def reserve(self, shares: Mapping[str, StateShare]) -> None:
        """Take memory for copies of these shares now, and plan them."""
        nbytes = text = 0
        for name, share in shares.items():
            planned, parts = self._planned(name, share)
            nbytes = arranged(parts, nbytes)[1]
            text += 2 * len(planned.plan)
        self._writer.reserve(nbytes + text)

    def begin(self, what: str, make: Callable[[], Made]) -> None:
        """Copy what `make` returns, and have it written; a failure is one of this save.

        The last save has ended on all ranks.

        Args:
            what: a description of a failure.
        """
        assert not self.is_open
        self._number += 1
        self._what, self.is_open = what, True
        try:
            self._begin(*make())
        except TuttiError as error:
            self._error = parts_of(error)
        except Exception as error:  # every rank raises it, at the next vote
            self._error = error_parts(what, error)

    def _begin(self, save: RunSave, shares: Mapping[str, StateShare]) -> None:
        steps: dict[str, StagedStep] = {}
        every: list[Tensor] = []
        copies: list[Copy] = []
        begin = 0
        for name, share in shares.items():
            planned, parts = self._planned(name, share)
            here, begin = arranged(parts, begin)
            steps[name] = StagedStep(share.manifest, planned.plan, here)
            every, copies = [*every, *parts.values()], copies + here
        self._writer.begin(self._number, every, copies, StagedSave(save, steps).text())

    def _planned(self, name: str, share: StateShare) -> tuple[_Planned, dict[Place, Tensor]]:
        """The plan of a share, and its parts by place."""
        planned, form = self._plans.get(name), share.form()
        if planned is None or planned.form != form:
            plan = share_planner(share.tensors).create_local_plan()
            places = [place_of(item.index) for item in plan.items]
            planned = self._plans[name] = _Planned(form, plan_text(plan), places)
        return planned, {place: share.part(place[0]) for place in planned.places}

    def state(self) -> str:
        """The state of this rank's save: `DONE`, `BUSY` or `FAILED`; a look, without waiting."""
        if self._error is None and self._writer.writing:
            self._hear(wait=False)
        if self._error is not None:
            return FAILED
        return BUSY if self._writer.writing else DONE

    def settle(self) -> None:
        """Wait for the save in progress on all ranks.

        Raises:
            CheckpointError: on every rank, it failed.
        """
        if not self.is_open:
            return
        since = time.monotonic()
        try:
            while BUSY in self._ranks.each(self._what, self._state_soon):
                pass
        except CheckpointError:
            self._writer.abort()
            self._error, self.is_open = None, False
            raise
        self.is_open = False
        self._warn(time.monotonic() - since)

    def _state_soon(self) -> str:
        """`DONE`, or `BUSY` after a while. Raises `CheckpointError`: the save of this rank has failed."""
        until = time.monotonic() + _ASK_SECONDS
        while (found := self.state()) == BUSY and time.monotonic() < until:
            time.sleep(_ASK_SECONDS / 40)
        if self._error is not None:
            raise error_of(self._error)
        return found

    def close(self, *, wait: bool) -> CheckpointError | None:
        """End the process; with `wait` this rank's save is written first. The error of a failed one."""
        if wait and self._error is None and self._writer.writing:
            self._hear(wait=True)
        self._writer.close()
        return None if self._error is None else error_of(self._error)

    def _warn(self, seconds: float) -> None:
        if seconds > _LONG_SECONDS and self._ranks.leads and not self._warned:
            self._warned = True
            text = f"a step waited {seconds:.1f} s until the last save was written"
            warnings.warn(f"{text}: saves follow each other too soon", stacklevel=users_level())

    def _hear(self, *, wait: bool) -> None:
        try:
            for text in self._writer.outcome(self._what, wait=wait) or ():
                warnings.warn(text, stacklevel=users_level())
        except CheckpointError as error:
            self._error = parts_of(error)
