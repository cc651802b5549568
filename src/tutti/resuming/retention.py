"""Chooses the saved steps that stay: the newest, and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.argument_types import check_type
from tutti.checkpoint.owner_lock import lock_folder
from tutti.errors import CheckpointError, TuttiError
from tutti.resuming.run_folder import SavedStep, remove_leftovers, remove_step, whole_steps


@dataclass(frozen=True)
class Retention:
    """How many of the newest saved steps stay (None: all), and by which metric the best one.

    `best` is a metric of which less is better, or with a "-" before it, more; "" for none.

    Raises:
        TuttiError: `keep` is no number of steps, or `best` no name.
    """

    keep: int | None = 3
    best: str = ""

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise TuttiError(
                f"keep={self.keep!r} is no number of checkpoints to keep",
                fix="keep=3, or keep=None for all",
            )
        fix = 'keep_best="loss" for the least, "-accuracy" for the greatest, or None'
        check_type("keep_best", self.best, str, wanted="the name of a metric", fix=fix)
        if self.best == "-":
            raise TuttiError('keep_best="-" names no metric', fix=fix)

    @property
    def metric(self) -> str:
        """The name of the metric of the best."""
        return self.best.removeprefix("-")

    def best_of(self, whole: Sequence[SavedStep]) -> SavedStep | None:
        """The best of these; the first of several."""
        sign = -1.0 if self.best.startswith("-") else 1.0
        values = {
            one.step: sign * one.record.metrics.get(self.metric, math.nan)
            for one in whole
            if one.record is not None
        }
        known = [one for one in whole if not math.isnan(values.get(one.step, math.nan))]
        return min(known, key=lambda one: values[one.step], default=None)

    def superfluous(self, whole: Sequence[SavedStep]) -> list[SavedStep]:
        """Those of the whole saved steps, in order, that need not stay; never the last.

        If the metrics of all that stay have NaN, the newest one without NaN stays, too.
        """
        if self.keep is None:
            return []
        older, newest = whole[: -self.keep], whole[-self.keep :]
        best = self.best_of(whole) if self.best else None
        sound = (one for one in reversed(older) if not has_nan(one))
        kept = best or (next(sound, None) if all(map(has_nan, newest)) else None)
        return [one for one in older if one is not kept]


def has_nan(one: SavedStep) -> bool:
    """Whether a metric of a saved step is NaN: its weights may be lost."""
    return one.record is not None and any(map(math.isnan, one.record.metrics.values()))


def best_name(whole: Sequence[SavedStep]) -> str:
    """The `best` with which the newest of these was saved."""
    records = [one.record for one in whole if one.record is not None]
    return records[-1].best if records else ""


def prune_folder(folder: Path, keep: int) -> None:
    """Remove all whole saved steps but the newest and the best, and leftovers.

    Raises:
        CheckpointError: a run saves into the folder, or it cannot be changed.
    """
    try:
        held = lock_folder(folder)
        remove_leftovers(folder)
        whole = whole_steps(folder)
        for one in Retention(keep, best_name(whole)).superfluous(whole):
            remove_step(one)
        del held
    except OSError as error:
        raise CheckpointError(f"cannot remove checkpoints in {folder}", why=str(error)) from error
