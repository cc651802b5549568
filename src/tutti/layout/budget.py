"""The memory budget of rematerialization: the value of `remat=`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tutti.errors import LayoutError

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(kB|MB|GB|TB)?")


@dataclass(frozen=True)
class Budget:
    """A value of `remat=`: `none`, `full`, bytes such as `2GB` or a share such as `0.5`.

    nbytes: the predicted peak of a call on one rank, state included, must not exceed it.
    share: the largest fraction of the forward's saved bytes that the backward may keep.
    Both None: the backward recomputes all that it can. Raises `LayoutError` for any other text.
    """

    nbytes: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        if self.nbytes is not None:
            return nbytes_text(self.nbytes)
        return "full" if self.share is None else f"{self.share:g}"

    @classmethod
    def parse(cls, text: str) -> Budget | None:
        """The budget that `remat=text` names; None for `none`."""
        if text in ("none", "full"):
            return None if text == "none" else cls()
        match = _NUMBER.fullmatch(text)
        if match is not None and match[2]:
            return cls(nbytes=round(float(match[1]) * UNITS[match[2]]))
        if match is not None and 0 < float(match[1]) <= 1:
            return cls(share=float(match[1]))
        raise LayoutError(
            f'"remat={text}" is no budget',
            why="it is none, full, the bytes that a rank may hold with their unit (kB, MB, GB, TB), "
            "or the share of the activations to keep, above 0 and up to 1",
            fix="remat=full, remat=2GB or remat=0.5",
        )


def nbytes_text(nbytes: float) -> str:
    """Bytes in the form of a budget, rounded up to four digits: `12.35MB`."""
    name, unit = next(((n, u) for n, u in reversed(UNITS.items()) if nbytes >= u), ("kB", 1000))
    digits = max(0, 3 - int(math.log10(max(1.0, nbytes / unit))))
    return f"{math.ceil(nbytes / unit * 10**digits) / 10**digits:g}{name}"
