"""The folder of a run: one whole checkpoint for each saved step, and what a killed save has left.

runs/gpt/
    step-00000100/           a checkpoint; made under another name, and visible by one rename
        part-critic/         the checkpoint of a second step
    step-00000200/
    .step-00000300.new/      a save in progress, or of a killed run: the next save removes it
    .step-00000050.old/      a removal in progress
    lock                     held by the run that saves here
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutti.checkpoint.digest import FileDigest, find_damage
from tutti.checkpoint.folder import index_damage, refuse_dangling
from tutti.checkpoint.manifest import (
    MANIFEST,
    STATE_FOLDER,
    STEP_FOLDER,
    Manifest,
    parse_manifest,
    read_manifest,
)
from tutti.durable import sync_folder
from tutti.errors import CheckpointError
from tutti.remote_paths import is_remote, remove_tree

_LEFTOVER = re.compile(r"\.step-\d{8,}\.(new|old)")
RUN = "tutti.run"
FORMAT = 1


@dataclass(frozen=True)
class RunRecord:
    """The run's entry in the manifest of a checkpoint.

    step: the number of steps.  time: of the save, seconds since 1970, for people.  best: the metric of
    `keep_best`, or "".  metrics: the latest values.  steps: the names of steps, the first
    one's state is in this checkpoint.  trees: the other states, by kind and name.
    """

    step: int
    time: float
    best: str
    metrics: Mapping[str, float]
    steps: tuple[str, ...]
    trees: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """The fields, as JSON keeps them."""
        return {**vars(self), "metrics": dict(self.metrics), "steps": list(self.steps)}

    def extra(self) -> dict[str, Any]:
        """The `extra` of the manifest."""
        return {RUN: {"format": FORMAT, **self.values()}}

    @classmethod
    def of(cls, manifest: Manifest, path: Path) -> RunRecord:
        """Parse the entry. Raises `CheckpointError`: there is none, or a newer tutti wrote it."""
        found: Any = manifest.extra.get(RUN)
        try:
            if found["format"] > FORMAT:
                raise CheckpointError(
                    f"{path} has run format {found['format']}; this version of tutti reads {FORMAT}",
                    why="a newer tutti wrote it",
                    fix="upgrade tutti",
                )
            return cls(
                step=int(found["step"]),
                time=float(found["time"]),
                best=str(found["best"]),
                metrics={str(n): float(x) for n, x in found["metrics"].items()},
                steps=tuple(str(name) for name in found["steps"]),
                trees=dict(found["trees"]),
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no checkpoint of tutti.Checkpoints",
                why=f"the entry {RUN} in its manifest is missing or damaged",
                fix="load it with step.load",
            ) from error


@dataclass(frozen=True)
class SavedStep:
    """One saved step, as far as it can be read; `damage` is "" for a whole one.

    `index` is the damage of an index that tutti does not read, but plain PyTorch does.
    """

    step: int
    path: Path
    nbytes: int = 0
    layout: str = ""
    record: RunRecord | None = None
    damage: str = ""
    index: str = ""


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:08d}"


def draft_of(folder: Path, step: int) -> Path:
    """Where a save writes that checkpoint; in a remote folder, where it stays: its manifest comes last."""
    return path_of(folder, step) if is_remote(folder) else folder / f".step-{step:08d}.new"


def part_path(path: Path, steps: tuple[str, ...], name: str) -> Path:
    """The checkpoint of one of several steps in that of the run at `path`."""
    return path if name == steps[0] else path / f"part-{name}"


def numbers(folder: Path) -> list[int]:
    """The saved steps, in order; none where there is no folder.

    Raises:
        CheckpointError: the folder is a link to nothing.
        OSError: it cannot be read.
    """
    refuse_dangling(folder)
    if is_remote(folder) and not folder.exists():
        return []
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for name in names if (found := STEP_FOLDER.fullmatch(name)))


def refuse_other_step(path: Path, record: RunRecord) -> None:
    """Refuse a checkpoint under the name of another step: steps would not be in order.

    Raises:
        CheckpointError: the folder is a copy, or has been renamed.
    """
    right = path_of(path.parent, record.step)
    if right.name != path.name:
        raise CheckpointError(
            f"{path} is a copy, or was renamed",
            why=f"it holds step {record.step}, not the one of its name",
            fix=f"remove it, or name it {right.name}",
        )


def look_at(folder: Path, step: int, *, check: bool = False) -> SavedStep:
    """Compare the sizes of a saved step's files, with `check` also their checksums."""
    found = SavedStep(step, path_of(folder, step))
    try:
        manifest = _manifest(found.path)
        record = RunRecord.of(manifest, found.path)
        found = replace(found, layout=manifest.layout, record=record)
        refuse_other_step(found.path, record)
        for name in record.steps or ("",):
            path = part_path(found.path, record.steps, name) if name else found.path
            manifest = _manifest(path)
            nbytes = sum(file.nbytes for file in manifest.files.values())
            found = replace(found, nbytes=found.nbytes + nbytes)
            digests = {
                n: file if check else FileDigest(file.nbytes, ())
                for n, file in manifest.files.items()
            }
            if damage := find_damage(path / manifest.folder, digests):
                return replace(found, damage=damage)
            if index := index_damage(path, manifest, check=check):
                found = replace(found, index=index)
    except CheckpointError as error:
        return replace(found, damage=f"{error.what}: {error.why}" if error.why else error.what)
    except OSError as error:
        return replace(found, damage=f"{error.strerror or error}: {error.filename or found.path}")
    return found


def whole_steps(
    folder: Path, *, without: set[int] | frozenset[int] = frozenset()
) -> list[SavedStep]:
    """The saved steps with all files, in order."""
    found = [look_at(folder, step) for step in numbers(folder) if step not in without]
    return [one for one in found if not one.damage]


def commit_step(folder: Path, step: int) -> None:
    """Make the draft of a step its checkpoint; a damaged one of that step makes room. Raises `OSError`."""
    final = path_of(folder, step)
    if is_remote(folder):
        return
    if final.exists() or final.is_symlink():
        _set_aside(final)
    draft_of(folder, step).rename(final)
    sync_folder(folder)


def remove_step(saved: SavedStep) -> None:
    """Remove a checkpoint: none of its parts is ever visible alone. Raises `OSError`."""
    if is_remote(saved.path):
        (saved.path / MANIFEST).unlink()
        remove_tree(saved.path)
    else:
        remove_tree(_set_aside(saved.path))  # the next save removes the rest


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished saves and removals; only the owner of the lock calls this."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) or (is_remote(path) and _is_unfinished(path)):
            remove_tree(path)


def _is_unfinished(path: Path) -> bool:
    """Whether a remote step has files of a save, and no manifest."""
    if not STEP_FOLDER.fullmatch(path.name):
        return False
    names = {one.name for one in path.iterdir()}
    return MANIFEST not in names and any(map(STATE_FOLDER.fullmatch, names))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.old")
    if aside.exists():
        remove_tree(aside)
    path.rename(aside)
    with contextlib.suppress(OSError):
        sync_folder(path.parent)
    return aside


def _manifest(path: Path) -> Manifest:
    return parse_manifest(read_manifest(path), path)
