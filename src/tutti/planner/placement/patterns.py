"""Parameters of equal layers as one pattern: `model.layers.*.mlp.up_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def template(name: str) -> str:
    """A name with `*` for each of its parts that is a number."""
    return _NUMBER.sub("*", name)


def patterns_of(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Entries of `place` that give each parameter its text, and no other parameter one.

    Args:
        texts: the sharding by parameter.
        names: of all parameters.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if name in texts:
            groups.setdefault((template(name), texts[name]), []).append(name)
    # The first match counts: narrow patterns come first.
    narrow = sorted(groups, key=lambda key: -len(key[0].replace("*", "")))
    found: dict[str, str] = {}
    for pattern, text in narrow:
        found.setdefault(pattern, text)
    wrong = [n for n in names if _first(n, found) != texts.get(n)]
    if not wrong:
        return found
    broken = {pattern for pattern in found if any(fnmatchcase(n, pattern) for n in wrong)}
    own = {n: text for n, text in texts.items() if template(n) in broken or n in wrong}
    return own | {p: text for p, text in found.items() if p not in broken}


def short_patterns(names: Iterable[str]) -> list[str]:
    """The distinct templates of names, in order, for people."""
    return list(dict.fromkeys(map(template, names)))


def _first(name: str, place: Mapping[str, str]) -> str | None:
    return next((text for pattern, text in place.items() if fnmatchcase(name, pattern)), None)
