"""A page read back: its elements, nested as they must be, its tables, its colors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}
# Elements of HTML in which a paragraph ends by itself; one inside of a <p> is an error.
BLOCKS = {"div", "table", "figure", "section", "ul", "dl", "pre", "p", "h1", "h2", "details"}


@dataclass
class Element:
    """An element, its attributes, its parent's name, and its own text."""

    tag: str
    attributes: dict[str, str]
    parents: tuple[str, ...]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all_text(self) -> str:
        """Its text and that of all elements inside."""
        return self.text + "".join(c.all_text() for c in self.children)

    def find(self, tag: str) -> list[Element]:
        """All elements of a name inside, in order."""
        own = [c for c in self.children if c.tag == tag]
        return own + [x for c in self.children for x in c.find(tag)]


class Page(HTMLParser):
    """Parses a page strictly: an end without its begin, or a begin without its end, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {}, ())
        self._open = [self.root]
        self.every: list[Element] = []
        self.feed(text)
        self.close()
        assert len(self._open) == 1, [e.tag for e in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        parents = tuple(e.tag for e in self._open[1:])
        assert not (tag in BLOCKS and "p" in parents), (tag, parents)
        made = Element(tag, {k: v or "" for k, v in attrs}, parents)
        self._open[-1].children.append(made)
        self.every.append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, (tag, [e.tag for e in self._open])
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def find(self, tag: str) -> list[Element]:
        """All elements of a name, in order of the page."""
        return [e for e in self.every if e.tag == tag]

    def section(self, name: str) -> Element:
        """The section with an anchor."""
        return next(e for e in self.find("section") if e.attributes["id"] == name)

    def tables(self, name: str) -> dict[str, list[dict[str, str]]]:
        """By caption, the rows of the tables of a section, by the words of their heads."""
        found = {}
        for table in self.section(name).find("table"):
            head, *rows = table.find("tr")
            keys = [cell.all_text() for cell in head.children]
            cells = [[c.all_text() for c in row.children] for row in rows]
            assert all(len(row) == len(keys) for row in cells)
            found[table.find("caption")[0].all_text()] = [
                {
                    f"{i}" if keys.count(k) > 1 else k: c
                    for i, (k, c) in enumerate(zip(keys, r, strict=True))
                }
                for r in cells
            ]
        return found


def themes(css: str) -> dict[str, dict[str, str]]:
    """The variables of color of each theme."""
    light, dark, print_ = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = {
        name: dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", block))
        for name, block in (("light", light), ("dark", dark), ("print", print_))
    }
    return {name: found["light"] | own for name, own in found.items()}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, by WCAG 2."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
