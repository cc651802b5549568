"""Checks that a checkpoint is of the same model and optimizer, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tutti.errors import CheckpointError


def check_names(
    found: Mapping[str, tuple[int, ...]], mine: Mapping[str, Tensor], where: str
) -> None:
    """Raise `CheckpointError` unless `found` has the names and global shapes of `mine`."""
    missing, extra = sorted(set(mine) - set(found)), sorted(set(found) - set(mine))
    wrong = [n for n in mine if n in found and tuple(mine[n].shape) != tuple(found[n])]
    if not (missing or extra or wrong):
        return
    why = []
    if missing:
        why.append(f"it lacks {len(missing)} tensors of this one, such as {missing[0]}")
    if extra:
        why.append(f"it has {len(extra)} that this one lacks, such as {extra[0]}")
    if wrong:
        n = wrong[0]
        why.append(f"{n} is {list(found[n])} there and {list(mine[n].shape)} here")
    raise CheckpointError(
        "the checkpoint is of another model or optimizer",
        at=where,
        why="; ".join(why),
        fix="build the same model and optimizer as when it was saved",
    )
