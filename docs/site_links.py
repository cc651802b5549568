"""A hook of mkdocs: pages from outside of docs/, and the links between all pages.

On a page of the repository, links lead from file to file. The site holds the pages of docs/ and of `OUTSIDE`.
The hook turns each link between two of them into one between pages of the site, and a link to any other file
into its path. `mkdocs build --strict` fails on a link that leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files outside of docs/ that are pages or images of the site, each with its place there.
OUTSIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/results/README.md": "benchmarks/results/index.md",
}
PATTERNS = ("benchmarks/*.md", "benchmarks/results/*.md", "benchmarks/results/*.png")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def places() -> dict[str, str]:
    """Of each file of the site, relative to the repository: where it lies on the site."""
    docs = (p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
    found = {path: path.removeprefix("docs/") for path in docs}
    for pattern in PATTERNS:
        found |= {p: p for p in (q.relative_to(ROOT).as_posix() for q in ROOT.glob(pattern))}
    return found | {path: place for path, place in OUTSIDE.items() if (ROOT / path).exists()}


def on_files(files: Any, config: Any) -> Any:
    """Add the files from outside of docs/."""
    for path, place in places().items():
        if not path.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page, outside of its blocks of code."""
    known = places()
    (source,) = [path for path, place in known.items() if place == page.file.src_uri]

    def mended(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        if path in known:
            there = os.path.relpath(known[path], os.path.dirname(page.file.src_uri))
            return f"{image}[{text}]({there}{anchor or ''})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it
        return text if path in text else f"{text} (`{path}`)"

    fences = FENCE.findall(markdown)
    parts = [LINK.sub(mended, part) for part in FENCE.split(markdown)]
    return "".join(p + f for p, f in zip(parts, [*fences, ""], strict=True))
