"""Writes tensors of all ranks into the folder of a checkpoint, and reads them again."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from tutti.checkpoint import folder as folders
from tutti.checkpoint.allow_list import CheckedReader, TensorPlanner
from tutti.checkpoint.digest import FileDigest, digest_of, find_damage
from tutti.checkpoint.manifest import (
    USE_EARLIER,
    Manifest,
    TensorForm,
    parse_manifest,
    read_manifest,
)
from tutti.checkpoint.plans import plan_of, plan_text, results_of, results_text, within
from tutti.checkpoint.unanimous import Unanimous
from tutti.errors import CheckpointError, CommError
from tutti.remote_paths import is_remote
from tutti.torch_private.checkpoint_parts import remote_writer
from tutti.user_lines import users_level

# Another run may replace a checkpoint while this one reads it.
_MOST_TRIES = 3


def write_checkpoint(
    path: Path,
    planner: DefaultSavePlanner,
    manifest: Manifest,
    ranks: Unanimous,
) -> None:
    """Save the tensors of the ranks' planners; the last checkpoint stays whole until this one is.

    All ranks call together, the first one with the lock of the folder. `manifest` has all but the files.

    Raises:
        CheckpointError: on every rank; the last checkpoint remains, or this one if it was visible already.
        CommError: a rank is lost; the same holds.
    """
    what = f"cannot write the checkpoint {path}"
    folder = ranks.lead(what, lambda: folders.new_state_folder(path))
    try:
        writing = _Writing(path / folder, planner, ranks, what)
        results = writing.write()
        files = {n: FileDigest(*f) for n, f in _merged(writing.digests()).items()}
        ranks.lead(what, lambda: _finish(path, folder, writing, results, files, manifest))
    except (CheckpointError, CommError):
        if ranks.leads:
            folders.abandon(path, folder)
        raise


@dataclass
class _Writing:
    """One save, from the plan of each rank to its files."""

    folder: Path
    planner: DefaultSavePlanner
    ranks: Unanimous
    what: str

    def __post_init__(self) -> None:
        self._writer = _storage(self.folder)
        self._own: list[WriteResult] = []
        self.metadata: Metadata | None = None

    def write(self) -> list[list[WriteResult]]:
        """Write this rank's share; the locations of all ranks' shards."""
        plans = [plan_of(text) for text in self.ranks.each(self.what, self._plan)]
        found = self.ranks.each(self.what, lambda: self._write(plans))
        return [results_of(text) for text in found]

    def _plan(self) -> str:
        self._writer.set_up_storage_writer(self.ranks.leads)
        return plan_text(self.planner.create_local_plan())

    def _write(self, plans: list[Any]) -> str:
        shared, self.metadata = self.planner.create_global_plan(plans)
        mine = self._writer.prepare_global_plan(shared)[self.ranks.position]
        mine = self.planner.finish_plan(mine)
        if mine.items:
            self._own = self._writer.write_data(mine, self.planner).value()
        return results_text(self._own)

    def digests(self) -> list[str]:
        """Sizes and checksums of the files of every rank."""
        return self.ranks.each(self.what, self._digests)

    def _digests(self) -> str:
        names = sorted({one.storage_data.relative_path for one in self._own})
        found = {n: digest_of(self.folder / n) for n in names}
        return json.dumps({n: [f.nbytes, f.sha256] for n, f in found.items()})

    def index(self, results: list[list[WriteResult]], folder: Path) -> Path:
        """Write the index of the shards into `folder`."""
        assert self.metadata is not None
        _storage(folder).finish(self.metadata, results)
        return folder / folders.INDEX


def _storage(folder: Path) -> FileSystemWriter:
    return remote_writer(str(folder)) if is_remote(folder) else FileSystemWriter(folder)


def _finish(
    path: Path,
    folder: str,
    writing: _Writing,
    results: list[list[WriteResult]],
    files: dict[str, FileDigest],
    manifest: Manifest,
) -> str:
    """The first rank's work after all have written."""
    outer = writing.index(within(folder, results), path / folder)
    index, digest = outer.read_bytes(), digest_of(outer)
    inner = writing.index(results, path / folder)
    files = {**files, inner.name: digest_of(inner)}
    text = replace(manifest, folder=folder, files=files, index=digest).text()
    folders.commit(path, folder, text, index)
    return ""


def _merged(texts: list[str]) -> dict[str, Any]:
    return {
        n: (nbytes, tuple(sha256)) for t in texts for n, (nbytes, sha256) in json.loads(t).items()
    }


class Reading:
    """A checkpoint that all ranks read together, by the first rank's manifest.

    Raises:
        CheckpointError: on every rank, there is none or its manifest is damaged.
    """

    def __init__(self, path: Path, ranks: Unanimous) -> None:
        self.path, self._ranks = path, ranks
        self._what = f"cannot read the checkpoint {path}"
        self._checked = False
        self.manifest = self._read()

    def _read(self) -> Manifest:
        text = self._ranks.lead(self._what, lambda: read_manifest(self.path))
        self._text = text
        return parse_manifest(text, self.path)

    def is_replaced(self) -> bool:
        """Whether another save has replaced the checkpoint since; all ranks call together."""
        text = self._ranks.lead(self._what, lambda: read_manifest(self.path))
        return text != self._text

    def check(self) -> None:
        """Compare sizes and checksums of all files; ranks and threads divide the work.

        Raises:
            CheckpointError: on every rank, a file is damaged; names it, and the damage.
        """
        if not self._checked:
            self._ranks.each(self._what, self._check)
            self._checked = True

    def _check(self) -> str:
        shares = {"share": self._ranks.position, "shares": self._ranks.size}
        damage = find_damage(self._folder, self.manifest.files, **shares)
        if damage:
            raise CheckpointError(
                f"{self.path} is damaged: {damage}",
                why="the file changed after it was written",
                fix=USE_EARLIER,
            )
        if self._ranks.leads and (damage := folders.index_damage(self.path, self.manifest)):
            warnings.warn(
                f"{self.path}: {damage}; tutti does not read it", stacklevel=users_level()
            )
        return ""

    def forms(self, prefix: str) -> dict[str, TensorForm]:
        """The tensors whose names begin with `prefix`, those too that the manifest does not list.

        Raises:
            CheckpointError: on every rank, a file is damaged.
        """
        found: dict[str, TensorForm] = {}

        def look() -> str:
            reader = CheckedReader(self._folder, self.manifest.files)
            for name, form in reader.read_metadata().state_dict_metadata.items():
                if name.startswith(prefix) and isinstance(form, TensorStorageMetadata):
                    found[name] = TensorForm(tuple(form.size), form.properties.dtype)
            return ""

        self.check()
        self._ranks.each(self._what, look)
        return found

    def fill(self, state: dict[str, Any]) -> None:
        """Read into the tensors of `state`, by name: each rank its own names, from any layout.

        Raises:
            CheckpointError: on every rank, a file is damaged or does not match the manifest.
        """
        self.check()
        self._ranks.each(self._what, lambda: self._fill(state))

    def _fill(self, state: dict[str, Any]) -> str:
        reader, planner = CheckedReader(self._folder, self.manifest.files), TensorPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return ""

    @property
    def _folder(self) -> Path:
        return self.path / self.manifest.folder
