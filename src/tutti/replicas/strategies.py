"""The strategies by name, and their text: `sync=diloco(every=50, lr=0.7)`."""

from __future__ import annotations

import difflib
import re
from dataclasses import Field, fields
from typing import Any

from tutti.comm.collectives import compression
from tutti.errors import LayoutError
from tutti.replicas.average import Average
from tutti.replicas.diloco import DiLoCo
from tutti.replicas.elastic import Elastic
from tutti.replicas.gossip import Gossip
from tutti.replicas.pairs import Pairs
from tutti.replicas.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    made.__name__.lower(): made for made in (Average, DiLoCo, Gossip, Pairs, Elastic)
}
_READ = {"int": int, "float": float, "str": str}


def parse(text: str) -> Strategy:
    """Parse the strategy of `sync=text`: a name, and options in any order; omitted ones have defaults.

    Raises:
        LayoutError: for an unknown name, option or value, with the nearest known one.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    if match is None:
        raise LayoutError(f"cannot read sync={text}", fix="sync=average(every=16)")
    name, rest = match[1], match[2] or ""
    if name not in STRATEGIES:
        raise LayoutError(
            f"sync={name} is unknown",
            why="replicas agree by " + ", ".join(STRATEGIES),
            fix=_near(name, list(STRATEGIES)) or "sync=average(every=16)",
        )
    made = STRATEGIES[name]
    known = {f.name: f for f in fields(made)}
    options: dict[str, Any] = {}
    for word in filter(None, map(str.strip, rest.split(","))):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in known:
            having = [n for n, one in STRATEGIES.items() if key in {f.name for f in fields(one)}]
            elsewhere = f"; {key} is one of {' and '.join(having)}" if having else ""
            raise LayoutError(
                f'"{key}" is no option of sync={name}',
                why=f"its options are {', '.join(known)}{elsewhere}",
                fix=_near(key, list(known)) or str(made()),  # type: ignore[call-arg]
            )
        if key in options:
            raise LayoutError(f'"{key}" appears twice in sync={text}', fix="keep one of them")
        options[key] = _value(name, known[key], value)
    for key, needed in made.needs.items():
        if key in options and not options.get(needed):
            raise LayoutError(
                f"{key}={options[key]} in sync={text} has no effect",
                why=f"it says what happens with {needed}, which is not given",
                fix=f"leave {key} out, or add {needed}={4 * options.get('every', known['every'].default)}",
            )
    return made(**options)


def _value(name: str, option: Field[Any], value: str) -> Any:
    if option.name == "traffic" and value not in compression.NAMES:
        raise LayoutError(
            f"traffic={value} in sync={name} is unknown", fix=", ".join(compression.NAMES)
        )
    try:
        return _READ[str(option.type)](value)
    except ValueError:
        kind = "a whole number" if option.type == "int" else "a number"
        raise LayoutError(
            f'"{option.name}={value}" in sync={name} is not {kind}',
            fix=f"{option.name}={option.default}",
        ) from None


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return "did you mean " + " or ".join(near) + "?" if near else ""
