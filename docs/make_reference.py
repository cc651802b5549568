"""Writes docs/reference.md from the docstrings of the public names.

python docs/make_reference.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tutti
from tutti.environment import VARIABLES

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference

The public names of `tutti`, from their docstrings. Made by `python docs/make_reference.py`.
"""
_OWN = "; `tutti run` and `tutti serve` set it for their processes"
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ITEM = re.compile(r"    (\w[\w, .]*): (.*)")


def page() -> str:
    """The whole page."""
    entries = (part for name in tutti.__all__ for part in _entry(name))
    return "\n".join([HEAD, *entries, _environment()])


def _environment() -> str:
    """The variables, a row each."""
    rows = [
        f"| `{one.name}` | {_default(one)} | {one.meaning}{_OWN if one.own else ''} |"
        for one in VARIABLES
    ]
    return "\n".join(
        ["## Environment\n", "| variable | default | meaning |", "| --- | --- | --- |", *rows, ""]
    )


def _default(one: Any) -> str:
    if isinstance(one.default, bool):
        return "on" if one.default else "off"
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def _entry(name: str) -> Iterator[str]:
    thing = getattr(tutti, name)
    yield f"## `tutti.{name}`\n"
    if not inspect.isclass(thing):
        yield f"```python\n{_signature(name, thing)}\n```\n"
    elif issubclass(thing, Exception):
        base = "Exception" if thing is tutti.TuttiError else "tutti.TuttiError"
        yield f"An exception; its base is `{base}`.\n"
    else:
        yield f"```python\nclass {_signature(name, thing)}\n```\n"
    yield _text(thing)
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        yield from _members(thing)


def _members(cls: Any) -> Iterator[str]:
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, property | cached_property):
            yield f"### `{cls.__name__}.{name}`\n\n{_text(member)}"
        elif inspect.isfunction(function):
            yield f"### `{cls.__name__}.{name}`\n"
            yield f"```python\n{_signature(name, function)}\n```\n\n{_text(function)}"


def _signature(name: str, function: Any) -> str:
    """`name(a: int, *, b: str = "x") -> int`, a parameter a line where it is long."""
    found = inspect.signature(function)
    parts, starred = [], False
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        parts.append(str(p.replace(annotation=p.empty, default=p.empty)) + _annotated(p))
    returns = found.return_annotation
    tail = "" if returns is found.empty or inspect.isclass(function) else f" -> {_name(returns)}"
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= 90:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def _annotated(p: inspect.Parameter) -> str:
    text = "" if p.annotation is p.empty else f": {_name(p.annotation)}"
    if p.default is p.empty:
        return text
    return f"{text} = {'...' if '<factory>' in repr(p.default) else repr(p.default)}"


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "None")


def _text(thing: Any) -> str:
    """A docstring as Markdown: sections bold, arguments a list, examples fenced."""
    lines: list[str] = []
    listed = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if section := _SECTION.fullmatch(line):
            lines += [f"**{section[1]}**", ""]
            listed = True
        elif listed and (item := _ITEM.fullmatch(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif listed and line.strip():
            lines.append(line.strip() if not line.startswith(" " * 8) else f"  {line.strip()}")
        else:
            listed = listed and not line.strip()
            lines.append(line)
    text = "\n".join(lines) + "\n"
    return re.sub(r"((?:^>>> .*\n(?:^(?!>>>).+\n)*)+)", r"```pycon\n\1```\n", text, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(page())
