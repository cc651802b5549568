"""A package of tutti imports only what stands below it, and no file imports itself by a detour."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sources import tree_of

SOURCE = Path(__file__).parents[1] / "src" / "tutti"

# From the bottom to the top. Names of one layer stand side by side: neither imports the other.
LAYERS = (
    ("errors",),
    ("argument_types",),
    ("remote_paths",),  # paths behind a URL
    # The variables that users set; which lines are theirs; bytes and seconds as text; names kept on disk.
    ("durable", "environment", "quantities", "user_lines", "version"),
    ("torch_private",),  # the private names of PyTorch
    ("layout",),  # mesh, sharding, layout, shards, topology
    ("graph",),  # text form, grammar, virtual ranks
    ("hardware",),  # devices and links as data
    ("costs",),  # the time of ops and collectives on them
    ("rules", "capture"),
    ("propagate",),
    ("job",),  # what a user gives: a step, what it trains, its layout
    ("partition",),
    ("passes",),
    ("pipeline",),
    ("planner",),  # nothing up to here needs a process group
    ("comm",),
    ("replicas", "server", "checkpoint"),
    ("recording",),  # keeps the records of a run while it trains
    ("launch",),  # starts ranks, says how they ended
    ("state", "data"),  # where it lives between calls; batches and the position in a dataset
    ("calls", "execution"),  # what a trace depends on; generated code
    ("saving", "verification", "serving"),
    ("report",),
    ("modes",),  # the ways to run a job
    ("planning",),  # the plan of a user's step
    ("distributed_step",),  # what a user calls
    ("api", "resuming"),  # the calls of distribute; the checkpoints of a run
    ("calibration",),  # measures this machine
    ("__init__",),  # the public names
    ("cli",),
    ("__main__",),
)


def find_modules(root: Path) -> dict[str, Path]:
    """The files below a package's root by dotted name; a package's own file ends in `__init__`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")
    }


def resolve(name: str, modules: dict[str, Path]) -> str | None:
    """The module that the dotted name stands for, if any: a file or a package's `__init__`."""
    candidates = (name, f"{name}.__init__".lstrip("."))
    return next((candidate for candidate in candidates if candidate in modules), None)


def dotted_imports(tree: ast.AST, package: list[str], root: str) -> Iterator[tuple[int, str, str]]:
    """Every import below the root package: its line, the name after `from` (relative to the root,
    "" for the root itself), and the name imported from it ("" for a plain `import`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [root, *package][: len(package) + 2 - node.level] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            found = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in found:
            if base == root or base.startswith(f"{root}."):
                yield node.lineno, base[len(root) + 1 :], name


def imports(name: str, modules: dict[str, Path], root: str) -> dict[str, int]:
    """The modules that one module imports, wherever in it, each with the first line that does."""
    tree = tree_of(modules[name])
    edges: dict[str, int] = {}
    for line, base, item in dotted_imports(tree, name.split(".")[:-1], root):
        target = item and resolve(f"{base}.{item}".lstrip("."), modules)
        target = target or resolve(base, modules)
        edges.setdefault(target or f"{base}.{item}".strip("."), line)
    return edges


def problems(root: Path, layers: tuple[tuple[str, ...], ...] = LAYERS) -> list[str]:
    """What is wrong with the imports below a package's root, a line each."""
    height = {name: number for number, names in enumerate(layers) for name in names}
    modules = find_modules(root)
    graph = {name: imports(name, modules, root.name) for name in sorted(modules)}
    found = []
    for name, edges in graph.items():
        top = name.split(".")[0]
        if top not in height:
            found.append(f"{name}: {top} has no layer")
            continue
        for target, line in edges.items():
            below = target.split(".")[0]
            if below in height and below != top and height[below] >= height[top]:
                found.append(f"{name}:{line} imports {target}, which does not stand below {top}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("cycle: " + " <- ".join(error.args[1]))
    return found


def test_imports_point_downwards() -> None:
    assert find_modules(SOURCE), f"no source below {SOURCE}"
    assert problems(SOURCE) == []


# Rooms of one package, each with those of it that it may import.
ROOMS = {
    "server": {"protocol": (), "wire": ("protocol",), "split": ("protocol",)},
    "server.wire": {
        **{"frames": (), "connections": ("frames",)},
        **{"records": ("frames", "connections")},
    },
    "capture": {
        **{"spelling": (), "substitutes": (), "second_trace": ()},
        **{"state": ("second_trace", "substitutes"), "python": ("state",)},
    },
    "comm": {"host": (), "collectives": ("host",), "posts": ("host", "collectives")},
    "graph": {
        **{"ops": (), "randomness": (), "edits": ("ops",)},
        **{"analysis": ("edits", "ops", "randomness")},
        **{"players": ("analysis", "ops", "randomness")},
    },
    "pipeline": {
        **{"schedule": (), "micro_batches": (), "stages": ("micro_batches",)},
        **{"ranks": ("micro_batches", "schedule", "stages")},
    },
    "planner": {
        **{"estimates": (), "depth": ("estimates",), "search": ("estimates",), "runs": ()},
        **{"placement": ("estimates",)},
    },
    "report": {"page": ()},
    "rules": {"families": (), "samples": ("families",)},
}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_of_a_package_keep_apart(package: str) -> None:
    """Whoever works on the wire never meets a graph."""
    modules = find_modules(SOURCE)
    depth = package.count(".") + 1
    inside = {
        n: n.split(".")[depth]
        for n in modules
        if n.startswith(f"{package}.") and n.count(".") > depth
    }
    assert set(inside.values()) == set(ROOMS[package])
    found = [
        f"{name} imports {target}"
        for name, room in inside.items()
        for target in imports(name, modules, SOURCE.name)
        if target in inside and inside[target] not in (room, *ROOMS[package][room])
    ]
    assert found == []


def test_every_package_with_rooms_names_them() -> None:
    folders = {name.rpartition(".")[0] for name in find_modules(SOURCE)}
    assert {name.rpartition(".")[0] for name in folders if "." in name} == set(ROOMS)


def folder_cycles(root: Path) -> list[str]:
    """The cycles between the files and subfolders that lie side by side in one folder, a line each."""
    modules = find_modules(root)
    beside: dict[str, dict[str, set[str]]] = {}
    for name in modules:
        for target in imports(name, modules, root.name):
            ours, others = name.split("."), target.split(".")
            depth = next(
                (i for i, (a, b) in enumerate(zip(ours, others, strict=False)) if a != b), None
            )
            if depth is not None:
                edges = beside.setdefault(".".join(ours[:depth]), {})
                edges.setdefault(ours[depth], set()).add(others[depth])
    found = []
    for folder, edges in beside.items():
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            found.append(f"{folder}: " + " <- ".join(error.args[1]))
    return found


def test_no_cycle_between_folders() -> None:
    assert folder_cycles(SOURCE) == []


def test_a_cycle_between_folders_is_found(tmp_path: Path) -> None:
    for name, text in {
        "low/a/one.py": "from band.low.b.two import x",
        "low/b/two.py": "",
        "low/b/three.py": "from band.low.a.four import y",
        "low/a/four.py": "",
        "high.py": "import band.low.a.one",
    }.items():
        path = tmp_path / "band" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert problems(tmp_path / "band", FAKE_LAYERS) == []
    (found,) = folder_cycles(tmp_path / "band")
    assert found.startswith("low: ") and set("ab") <= set(found.split())


def test_no_two_files_have_one_name() -> None:
    names = [name.split(".")[-1] for name in find_modules(SOURCE)]
    assert sorted({n for n in names if names.count(n) > 1}) == ["__init__"]


def test_no_two_classes_have_one_name() -> None:
    """A name tells what the class holds, so a reader of an import or a traceback needs no file."""
    found: dict[str, list[str]] = {}
    for module, path in find_modules(SOURCE).items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert found["Layout"] == ["layout.layout"]
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def kinds_of_runs() -> set[str]:
    """The classes of `modes` and what they bind to a rank."""
    paths = [*(SOURCE / "modes").glob("*.py"), SOURCE / "execution/execute.py"]
    paths.append(SOURCE / "serving/worked.py")
    trees = [tree_of(path) for path in paths]
    return {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}


@pytest.mark.parametrize("name", ["api.py", "distributed_step.py", "modes/programs.py"])
def test_a_step_asks_for_no_kind_of_run(name: str) -> None:
    """What depends on the kind is a method of the mode or of its programs; the files stay short."""
    text = (SOURCE / name).read_text()
    assert len(text.splitlines()) < 300
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    asked = [c.args[1] for c in calls if isinstance(c.func, ast.Name) and c.func.id == "isinstance"]
    named = {n.id for x in asked for n in ast.walk(x) if isinstance(n, ast.Name)}
    kinds = kinds_of_runs()
    assert {"Plain", "Replicated", "Served", "Execution", "Worked"} <= kinds
    assert named & kinds == set()


def test_layers_name_each_package_once() -> None:
    names = [name for names in LAYERS for name in names]
    assert len(names) == len(set(names))


CLEAN = {
    "__init__.py": "from .high import run",
    "errors.py": "import ast",
    "low/__init__.py": "from band.low.mesh import Mesh",
    "low/mesh.py": "from ..errors import Wrong\nimport other.high",
    "high.py": "import band.low\nfrom band import errors\nfrom band.low import mesh, Mesh",
}
FAKE_LAYERS = (("errors",), ("low", "beside"), ("high",), ("__init__",))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"low/mesh.py": "import band.high"}, ["low.mesh:1 imports high", "cycle: "]),
        (
            {"low/mesh.py": "def f():\n    from ..high import run"},
            ["low.mesh:2 imports", "cycle: "],
        ),
        ({"errors.py": "from . import low"}, ["errors:1 imports low.__init__", "cycle: "]),
        ({"errors.py": "from band import run"}, ["errors:1 imports __init__", "cycle: "]),
        ({"beside.py": "import band.low.mesh"}, ["beside:1 imports low.mesh"]),
        ({"low/a.py": "from .b import x", "low/b.py": "from . import a"}, ["cycle: low."]),
        ({"low/a.py": "from band.low.a import x"}, ["cycle: low.a"]),
        ({"stray.py": ""}, ["stray: stray has no layer"]),
        ({"errors.py": "import band.high.gone"}, ["errors:1 imports high.gone"]),
    ],
)
def test_the_check_finds_what_is_wrong(tmp_path: Path, change: dict, expected: list[str]) -> None:
    for name, text in (CLEAN | change).items():
        path = tmp_path / "band" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = problems(tmp_path / "band", FAKE_LAYERS)
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found
