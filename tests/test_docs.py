"""What the documentation says is so: links lead somewhere, code runs, tables and pages are up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from sources import tree_of
from tutti.layout import Layout
from tutti.layout.layout import AXES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *(README, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
WORDS = {*AXES, *(f.name for f in fields(Layout) if f.name != "axes")}


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date() -> None:
    made = generator()
    assert made.PAGE.read_text() == made.page(), "run: python docs/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [t for t in targets if "://" not in t]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_every_page_is_linked_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    docs = [p for p in PAGES if p.is_relative_to(ROOT / "docs")]
    pages = [p.relative_to(ROOT / "docs") for p in docs if p.name != "index.md"]
    assert [str(p) for p in pages if f"({p})" not in index] == []


def test_every_page_is_on_the_site() -> None:
    names = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    records = (ROOT / "benchmarks").glob("*.md")
    pages += [p.relative_to(ROOT) for p in records if p.name != "README.md"]
    assert [str(p) for p in pages if str(p) not in names] == []


def test_every_promise_has_its_test() -> None:
    text = (ROOT / "docs/promises.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    found = [(f, t) for f, t in named if f"def {t}(" in (ROOT / f).read_text()]
    assert found == named
    rows = [x for x in text.split("## Who may do what")[0].splitlines() if x.startswith("| ")]
    heads = ("| fault |", "| input |", "| --- |")
    assert [x for x in rows if "::" not in x and not x.startswith(heads)] == []


def test_what_the_index_says_where_it_is_is_there() -> None:
    rows = (ROOT / "docs/index.md").read_text().split("## Where is ...")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", rows)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "src/tutti" / name).exists()] == []


def test_every_package_has_a_page() -> None:
    packages = {p.parent.name for p in (ROOT / "src/tutti").glob("*/*.py")}
    assert packages == {p.stem for p in (ROOT / "docs/concepts").glob("*.md")}


def test_the_pages_name_every_file_of_their_package() -> None:
    def named(package: str, file: str) -> bool:
        page = (ROOT / "docs/concepts" / f"{package}.md").read_text()
        return f"`{file}`" in page or ("_samples" in file and "`*_samples.py`" in page)

    source = ROOT / "src/tutti"
    files = [p.relative_to(source) for p in sorted(source.glob("*/**/*.py"))]
    known = [p for p in files if p.stem not in ("__init__", "main")]
    assert [str(p) for p in known if not named(p.parts[0], p.name)] == []


def test_the_code_of_the_readme_runs_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "\n".join(code_blocks(README))
    shorter = code.replace("view(-1, 65)", "view(-1, 65)[:16]").replace("% 50 == 0", "% 2 == 0")
    assert shorter.count("[:16]") == 1 and shorter.count("% 2 == 0") == 1
    for name in ("TUTTI_LAYOUT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(shorter)
    runpy.run_path("train.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert re.match(r"step 2  loss \d\.\d{4}\n", printed)
    assert "no collectives" in printed
    assert (tmp_path / "model.safetensors").exists()


def test_the_layout_table_has_the_words_of_the_language() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", README.read_text(), re.MULTILINE)
    assert {word for word, _ in rows} == WORDS


def _names_of(path: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in tree_of(path).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {x.id for x in targets if isinstance(x, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(a.asname or a.name).split(".")[0] for a in names}
    return found


def test_docstrings_name_modules_that_exist() -> None:
    """Of references such as `comm.host.board.Board`, the module and its name."""
    source = ROOT / "src" / "tutti"
    paths = {
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p
        for p in source.rglob("*.py")
    }
    packages = "|".join(sorted({m.split(".")[0] for m in paths if "." in m}))
    wrong: list[str] = []
    for module, path in paths.items():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for name in re.findall(rf"`((?:{packages})(?:\.\w+)+)`", ast.get_docstring(node) or ""):
                inside = [m for m in paths if m and name.startswith(m + ".")]
                deepest = max(inside, key=len, default=name)
                rest = name[len(deepest) + 1 :].split(".")[0]
                if name not in paths and rest not in _names_of(paths[deepest]):
                    wrong.append(f"{module}: {name}")
    assert wrong == []
