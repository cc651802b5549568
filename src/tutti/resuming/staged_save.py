"""A save of copies: what a rank hands to the process that writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tutti.checkpoint.files import write_checkpoint
from tutti.checkpoint.folder import open_folder
from tutti.checkpoint.manifest import Manifest, parse_manifest
from tutti.checkpoint.share_plans import CopiesPlanner
from tutti.checkpoint.unanimous import Unanimous
from tutti.resuming.run_save import RunSave
from tutti.resuming.staging import Copy


@dataclass(frozen=True)
class StagedStep:
    """The share of one step: its manifest without files, this rank's plan as text, and the copies."""

    manifest: Manifest
    plan: str
    copies: list[Copy]


@dataclass(frozen=True)
class StagedSave:
    """A save, and the shares of its steps by name."""

    save: RunSave
    steps: dict[str, StagedStep]

    def text(self) -> str:
        """All of it as JSON."""
        steps = {
            name: [one.manifest.text(), one.plan, [copy.values() for copy in one.copies]]
            for name, one in self.steps.items()
        }
        return json.dumps([self.save.text(), steps])

    @classmethod
    def of(cls, text: str) -> StagedSave:
        """Parse a text."""
        save, steps = json.loads(text)
        return cls(
            RunSave.of(save),
            {
                name: StagedStep(
                    parse_manifest(manifest, Path(name)), plan, [Copy.of(*one) for one in copies]
                )
                for name, (manifest, plan, copies) in steps.items()
            },
        )

    def write(self, memory: Tensor, ranks: Unanimous) -> None:
        """Write it from `memory`, bytes; raises as `RunSave.write`."""
        locks: list[Any] = []

        def write_part(name: str, path: Path, extra: dict[str, Any]) -> None:
            step = self.steps[name]

            def own() -> str:
                locks.append(open_folder(path))
                return ""

            ranks.lead(self.save.what, own)
            copies = {one.place: one.within(memory) for one in step.copies}
            planner = CopiesPlanner(step.plan, copies)
            write_checkpoint(path, planner, replace(step.manifest, extra=extra), ranks)

        self.save.write(write_part, ranks)
