"""A plan as a small file: the layout, what it was chosen for, and what was predicted.

    tutti plan --save gpt.plan.json train.py
    tutti run --plan gpt.plan.json train.py

The file names the model by its tensors, so a plan for another model, version or number of ranks is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from tutti.errors import LayoutError, PlanError
from tutti.layout import Layout
from tutti.planner.search.ranking import RankedLayout
from tutti.quantities import format_nbytes

FORMAT = 2
_UNITS = {"tb": 1e12, "gb": 1e9, "mb": 1e6, "kb": 1e3, "b": 1.0, "": 1.0}
_UNITS |= {"tib": 2.0**40, "gib": 2.0**30, "mib": 2.0**20, "kib": 2.0**10}
_LEAST_BARE = 1e6  # nobody means 70 bytes


@dataclass(frozen=True)
class Plan:
    """A chosen layout.

    layout: its text. place: compute shardings by pattern, as given. devices: text of the cluster. num_ranks:
    that run it. rows: samples of the global batch. model: `fingerprint` of the model. version: of
    tutti. found: shardings that the memory of a device needs; None: the run finds its own. seconds,
    peak_nbytes: predicted. layouts: every layout of the choice, best first, as `as_records`.
    """

    layout: str
    place: Mapping[str, str]
    devices: str
    num_ranks: int
    rows: int
    model: str
    version: str
    seconds: float
    peak_nbytes: int
    layouts: Sequence[Mapping[str, Any]]
    found: Mapping[str, str] | None = None
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            PlanError: the folder is not there, or the file cannot be written.
        """
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}", why=str(error.strerror)) from None

    @staticmethod
    def read(path: Path) -> Plan:
        """The plan of a file.

        Raises:
            PlanError: there is no such file, or it is not a plan of this version of the format; a field has a
                value of another kind, and the message names it.
            LayoutError: its layout is none.
        """
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}", why=str(error.strerror)) from None
        except (ValueError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} is no plan", why=str(error), fix="tutti plan --save") from None
        names = {f.name for f in fields(Plan)}
        if not isinstance(values, dict) or values.get("format", FORMAT) != FORMAT:
            raise PlanError(
                f"{path} is no plan of this version", fix="make it again: tutti plan --save"
            )
        for what, keys in (("lacks", names - values.keys()), ("has", values.keys() - names)):
            if keys:
                raise PlanError(
                    f"{path} is no plan: it {what} {', '.join(sorted(keys))}",
                    fix="make it again: tutti plan --save",
                )
        _check_fields(values, path)
        made = Plan(**values)
        _check_layout(made, path)
        return made

    def check(self, model: nn.Module, version: str, world_size: int, *, at: str = "") -> None:
        """Refuse another model, version or number of ranks than the plan's.

        Raises:
            PlanError: names both.
        """
        again = "make the plan again: tutti plan --save"
        if self.version != version:
            raise PlanError(
                f"the plan was made by tutti {self.version}, this is {version}", at=at, fix=again
            )
        if self.num_ranks != world_size:
            raise PlanError(
                f"the plan is for {ranks_text(self.num_ranks)}, and {world_size} are running",
                at=at,
                fix=f"-n {self.num_ranks}, or {again}",
            )
        if (own := fingerprint(model)) != self.model:
            raise PlanError(
                "the plan is for another model",
                at=at,
                why=f"the plan's model is {self.model}, this one is {own}",
                fix=again,
            )


def ranks_text(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _check_layout(made: Plan, path: Path) -> None:
    """Refuse a layout that is none, or of another number of ranks: somebody has edited the file."""
    try:
        layout = Layout.parse(made.layout)
    except LayoutError as error:
        raise LayoutError(error.what, at=f"{path}, layout", why=error.why, fix=error.fix) from None
    needed = layout.num_ranks + layout.server
    if needed != made.num_ranks:
        raise PlanError(
            f'layout "{made.layout}" needs {ranks_text(needed)}, and num_ranks is {made.num_ranks}',
            at=str(path),
            fix=f"num_ranks of {needed}, or make the plan again: tutti plan --save",
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    """A finite number from 0 on, such as of seconds or bytes."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_TEXT, _SIZE, _COUNT = (_is_text, "a text"), (_is_size, "a number from 0"), (_is_count, "a count")
_FIELDS = {
    **dict.fromkeys(("layout", "devices", "model", "version", "bound_by"), _TEXT),
    **dict.fromkeys(("seconds", "peak_nbytes", "hidden_seconds"), _SIZE),
    **dict.fromkeys(("num_ranks", "rows"), _COUNT),
    "fits": (lambda value: isinstance(value, bool), "true or false"),
}
# Objects whose values are all of a kind.
_OBJECTS = {"place": _TEXT, "found": _TEXT, "kinds": _SIZE, "sent_nbytes": _SIZE}


def _check_fields(values: Any, path: Path, at: str = "") -> None:
    """Refuse fields of another kind, those of `layouts` too."""

    def refuse(name: str, value: Any, kind: str) -> None:
        raise PlanError(
            f"{path} is no plan: {at}{name} is {json.dumps(value)[:60]}, not {kind}",
            fix="make it again: tutti plan --save",
        )

    for name, value in values.items():
        if name in _FIELDS and not _FIELDS[name][0](value):
            refuse(name, value, _FIELDS[name][1])
        if name in _OBJECTS and not (name == "found" and value is None):
            if not isinstance(value, dict):
                refuse(name, value, "an object")
            is_kind, kind = _OBJECTS[name]
            for key, one in value.items():
                if not is_kind(one):
                    refuse(f"{name}[{json.dumps(key)}]", one, kind)
    if "layouts" in values:
        if not isinstance(values["layouts"], list):
            refuse("layouts", values["layouts"], "a list")
        for number, one in enumerate(values["layouts"]):
            if not isinstance(one, dict):
                refuse(f"layouts[{number}]", one, "an object")
            _check_fields(one, path, f"layouts[{number}].")


def fingerprint(model: nn.Module) -> str:
    """A model in words and a hash: of the names, shapes and dtypes of its tensors."""
    digest, count = hashlib.sha256(), 0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
    count = sum(p.numel() for p in model.parameters())
    return f"{type(model).__name__}, {count} parameters, {digest.hexdigest()[:16]}"


def as_records(rows: Sequence[RankedLayout]) -> list[dict[str, Any]]:
    """Layouts as plain values, in the order of the rows."""
    return [_record(row) for row in rows]


def _record(row: RankedLayout) -> dict[str, Any]:
    one = row.estimate
    return {
        "layout": row.layout,
        "seconds": one.seconds,
        "peak_nbytes": one.peak_nbytes,
        "fits": row.fits,
        "kinds": one.kinds,
        "hidden_seconds": one.hidden_seconds,
        "sent_nbytes": one.nbytes,
        "bound_by": one.bound_by,
    }


def parse_nbytes(text: str) -> float:
    """Bytes of a text such as `70GB`, `64 GiB` or `512 MB`; a number alone counts bytes, a million at least.

    Raises:
        PlanError: it is no number with a unit.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)\s*", text)
    try:
        nbytes = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
        if found and not found[2] and nbytes < _LEAST_BARE:
            nbytes = 0.0
    except (ValueError, KeyError):
        nbytes = 0.0
    if not 0 < nbytes < 1e15:
        raise PlanError(
            f'cannot read "{text}" as bytes',
            why="a memory is a number and a unit: TB, GB, MB, kB, TiB, GiB, MiB, KiB or B",
            fix=f"such as {format_nbytes(7e10)}",
        )
    return nbytes
