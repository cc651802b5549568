"""Reads the words of a layout line, and says what a wrong one should be."""

from __future__ import annotations

import difflib
import re

from tutti.errors import LayoutError

# What other libraries call the axes.
_OTHER_NAMES = {
    **dict.fromkeys(("dp", "ddp"), "data={}"),
    **dict.fromkeys(("fsdp", "fsdp2", "hsdp"), "data={} zero=3"),
    **dict.fromkeys(("tp", "mp", "model"), "tensor={}"),
    **dict.fromkeys(("cp", "sp", "ulysses", "ring"), "seq={}"),
    "ep": "expert={}",
    "pp": "pipe={}",
}

_EXAMPLES = {
    "precision": "bf16",
    "schedule": "1f1b",
    "sync": "average(every=16)",
    "remat": "full",
}

_SEPARATOR = r"\s*[,;]\s*(?=\w+=|$)"  # not within the name of a file


def number(name: str, value: str, least: int, text: object) -> int:
    """The value of `name` as a whole number. Raises `LayoutError` for another, or one below `least`."""
    if not value.isdigit() or int(value) < least:
        raise LayoutError(
            f'"{name}={value}" in layout "{text}" is not a whole number from {least}',
            fix=f"{name}={max(least, 2)}",
        )
    return int(value)


def check_marks(text: str) -> None:
    """Raise `LayoutError` for spaces beside "=", commas between words, and a bracket without its other."""
    opened, closed = text.count("("), text.count(")")
    if opened != closed:
        one, other = ("(", ")") if opened > closed else (")", "(")
        raise LayoutError(
            f'a "{one}" in layout "{text}" is without its "{other}"',
            fix=f'"{text})"' if opened == closed + 1 else f'as many "{other}" as "{one}"',
        )
    outside = re.sub(r"\([^)]*\)", lambda m: "x" * len(m[0]), text)
    if re.search(r"\s=|=\s", outside.rstrip()):
        joined = re.sub(r"\s*=\s*", "=", text)
        raise LayoutError(f'a space beside "=" in layout "{text}"', fix=f'"{joined}"')
    if found := re.search(_SEPARATOR, outside):
        ends = [0, *(end for m in re.finditer(_SEPARATOR, outside) for end in m.span()), len(text)]
        words = " ".join(text[i:j].strip() for i, j in zip(ends[::2], ends[1::2], strict=True))
        raise LayoutError(
            f'a "{found[0].strip()}" between words of layout "{text}"',
            why="spaces separate words",
            fix=f'"{words.strip()}"',
        )


def unknown(word: str, name: str, value: str, text: object, known: tuple[str, ...]) -> LayoutError:
    """The error for a word with a name that is not `known`, or without a value."""
    if word == "auto":
        return LayoutError(
            f'"auto" in layout "{text}": a layout must be chosen already here',
            why='tutti run and distribute(..., layout="auto") choose one, for the ranks of a run',
            fix='"data=2 zero=3", say; tutti plan --devices "..." script.py ranks the layouts of a step',
        )
    if name in known:
        example = _EXAMPLES.get(name, "2")
        return LayoutError(f'"{word}" in layout "{text}" has no value', fix=f"{name}={example}")
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    size = value if value.isdigit() else "2"
    if name.lower() in known:
        fix = f"did you mean {name.lower()}={value or 2}?"
    elif name.lower() in _OTHER_NAMES:
        fix = f"did you mean {_OTHER_NAMES[name.lower()].format(size)}?"
    elif near:
        fix = "did you mean " + " or ".join(near) + "?"
    else:
        fix = 'axis=size words: "data=2 zero=3"'
    why = "the words are " + " ".join(known)
    return LayoutError(f'unknown word "{word}" in layout "{text}"', why=why, fix=fix)
