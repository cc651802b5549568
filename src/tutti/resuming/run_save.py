"""One save of a run, from the folder's preparation to the removal of older ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.checkpoint.unanimous import Unanimous
from tutti.errors import CheckpointError, CommError
from tutti.remote_paths import path_of, remove_tree
from tutti.resuming import random_states, run_folder
from tutti.resuming.retention import Retention
from tutti.resuming.run_folder import RunRecord
from tutti.user_lines import users_level

# Writes the checkpoint of a step by its name: at a path, with the `extra` of its manifest.
WritePart = Callable[[str, Path, dict[str, Any]], None]


@dataclass(frozen=True)
class RunSave:
    """All that a save writes on one rank, but the tensors.

    folder: of the run.  record: with the states of all random generators of this rank.  random: a text with
    their checksums.  keep: how many of the newest stay.  damaged: saved steps that count for nothing.
    """

    folder: Path
    record: RunRecord
    random: str
    keep: int | None
    damaged: frozenset[int]

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(
            {
                "folder": str(self.folder),
                "record": self.record.values(),
                "random": self.random,
                "keep": self.keep,
                "damaged": sorted(self.damaged),
            }
        )

    @classmethod
    def of(cls, text: str) -> RunSave:
        """Parse a text."""
        found = json.loads(text)
        record, damaged = RunRecord(**found.pop("record")), frozenset(found.pop("damaged"))
        return cls(path_of(found.pop("folder")), record, damaged=damaged, **found)

    @property
    def what(self) -> str:
        """The description of a failure."""
        return f"cannot write the checkpoint {run_folder.path_of(self.folder, self.record.step)}"

    def write(self, write_part: WritePart, ranks: Unanimous) -> None:
        """Write the checkpoint: durable, then visible, then remove older ones. All ranks call together.

        Raises:
            CheckpointError: on every rank; no part of the new one is visible, older ones stay.
            CommError: a rank is lost; the same holds.
        """
        step, steps = self.record.step, tuple(self.record.steps)
        same = random_states.common(ranks.each(self.what, lambda: self.random))
        trees = dict(self.record.trees)
        trees["random"] = {n: trees["random"][n] for n in sorted(same)}
        extra = RunRecord(**{**self.record.values(), "trees": trees}).extra()
        draft = run_folder.draft_of(self.folder, step)
        ranks.lead(self.what, self._prepare)
        try:
            for name in reversed(steps):  # the first step's checkpoint has the record
                path = run_folder.part_path(draft, steps, name)
                write_part(name, path, extra if name == steps[0] else {})
            ranks.lead(self.what, self._commit)
        except (CheckpointError, CommError):
            if ranks.leads:
                remove_tree(draft)
            raise

    def _prepare(self) -> str:
        run_folder.remove_leftovers(self.folder)
        return ""

    def _commit(self) -> str:
        folder, step = self.folder, self.record.step
        run_folder.commit_step(folder, step)
        try:
            run_folder.remove_leftovers(folder)
            whole = run_folder.whole_steps(folder, without=self.damaged - {step})
            for one in Retention(self.keep, self.record.best).superfluous(whole):
                run_folder.remove_step(one)
        except OSError as error:
            warnings.warn(f"older checkpoints in {folder} stay: {error}", stacklevel=users_level())
        return ""
