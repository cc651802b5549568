"""No file outside of `tutti.torch_private` uses a private name of PyTorch.

Three rules, for each file of `src`:

1. An import, or a chain of attributes from `torch`, has no part that starts with `_`, and none is of
   `torch.fx.experimental`. Chains from `torch.ops` are names of ops, which graphs are made of.
2. An attribute that starts with one `_` is defined by a class of `src`, and no object of `OBJECTS` has one of
   that name. Of `self`, `cls` and a class of the same file the first is enough.
3. A string is no private name of PyTorch's modules and objects, unless an op or `src` has one of that name.

What a file reads of a module that is not PyTorch's (`sys._getframe`) is Python's.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tutti.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tutti.torch_private.op_tables import all_op_names

SOURCE = Path(__file__).parents[2] / "src" / "tutti"
ROOM = "torch_private"
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
# Private names that are not PyTorch's, on objects whose kind the source does not show.
OTHERS = {"_data": "the table of `os.environ`"}

EXPERIMENTAL = "torch.fx.experimental"


def _scheduled() -> torch.optim.Optimizer:
    """An optimizer with all marks that PyTorch writes on one."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


def _function() -> None: ...


_PARAMETER = nn.Parameter(torch.zeros(1))
OBJECTS: tuple[Any, ...] = (
    *(torch.Tensor, _PARAMETER, _PARAMETER.untyped_storage(), FakeTensor, DTensor),
    *(FakeTensorMode, ShapeEnv, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(nn.Linear(1, 1), nn.LSTM(1, 1), nn.Transformer, _scheduled(), _scheduled().step),
    *(torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor),
    *(torch.fx.Graph(), torch.fx.Node, torch.fx.GraphModule, torch.fx.Interpreter, torch.fx.Tracer),
    *((_PARAMETER + 1).grad_fn, torch.amp.grad_scaler.GradScaler, torch.Generator()),
    *(torch.compile(_function, backend="eager"), torch.compile(nn.Linear(1, 1), backend="eager")),
)


# Classes whose private attributes strings may name.
_KINDS = (nn.Module, torch.optim.Optimizer, torch.distributions.Distribution, torch.Tensor)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def of_objects() -> frozenset[str]:
    """The private attributes of PyTorch's objects that the code meets."""
    return frozenset(name for one in OBJECTS for name in dir(one) if is_private(name))


@functools.cache
def of_torch() -> frozenset[str]:
    """All private names that PyTorch's modules and their classes define, but for those that are ops too."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "torch"]
    found = {*of_objects()}
    for module in (m for m in modules if isinstance(m, ModuleType)):
        for name, value in vars(module).items():
            found.add(name)
            found.update(
                vars(value) if isinstance(value, type) and issubclass(value, _KINDS) else ()
            )
    ops = {name.partition("::")[2].partition(".")[0] for name in all_op_names()}
    return frozenset(name for name in found - ops if is_private(name))


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names of functions and classes, and of attributes that classes define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (x.id for part in node.body for x in _stored(part))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node):
            yield node.attr


def _stored(part: ast.stmt) -> Iterator[ast.Name]:
    if isinstance(part, ast.Assign | ast.AnnAssign):
        found = (x for x in ast.walk(part) if isinstance(x, ast.Name))
        yield from (x for x in found if isinstance(x.ctx, ast.Store))


def _own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


class File:
    """One file of the source: what its names stand for."""

    def __init__(self, tree: ast.AST) -> None:
        self.tree = tree
        self.classes = {x.name for x in ast.walk(tree) if isinstance(x, ast.ClassDef)}
        self.stands_for: dict[str, str] = {}
        self.imports: list[tuple[int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._note(node.lineno, alias.name, alias.asname or alias.name.split(".")[0])
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    self._note(node.lineno, full, alias.asname or alias.name)
        for node in ast.walk(tree):  # aten = torch.ops.aten
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                chain = self.chain(node.value)
                if chain.startswith("torch"):
                    new = (x.id for x in targets if isinstance(x, ast.Name))
                    self.stands_for.update(dict.fromkeys(new, chain))

    def _note(self, line: int, full: str, name: str) -> None:
        self.imports.append((line, full))
        self.stands_for[name] = full if full.split(".")[0] != name else name

    def chain(self, node: ast.AST) -> str:
        """The dotted name that an expression is, from what its first name stands for; "" if it is none."""
        if isinstance(node, ast.Name):
            return self.stands_for.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.chain(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""


def is_private_chain(full: str) -> bool:
    parts = full.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return False
    return any(map(is_private, parts)) or f"{full}.".startswith(f"{EXPERIMENTAL}.")


def problems(sources: dict[str, str]) -> list[str]:
    """The private names of PyTorch in sources by their names, as "file:line name"."""
    files = {name: File(ast.parse(text)) for name, text in sources.items()}
    ours = {x for file in files.values() for x in defined(file.tree) if is_private(x)}
    found = set()
    for name, file in files.items():
        found |= {(name, line, full) for line, full in file.imports if is_private_chain(full)}
        docs = {id(x.value) for x in ast.walk(file.tree) if isinstance(x, ast.Expr)}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and _is_private_attribute(node, file, ours):
                found.add((name, node.lineno, f".{node.attr}"))
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == EXPERIMENTAL:
                found.add((name, node.lineno, EXPERIMENTAL))
            elif id(node) not in docs and _is_private_text(node, ours):
                found.add((name, node.lineno, f'"{node.value}"'))
    return [f"{name}:{line} {what}" for name, line, what in sorted(found)]


def _is_private_attribute(node: ast.Attribute, file: File, ours: set[str]) -> bool:
    if not is_private(node.attr) or node.attr in OF_NAMED_TUPLES | OTHERS.keys():
        return False
    chain = file.chain(node)
    if chain:  # of a module, or of what was imported from one
        return is_private_chain(chain)
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", *file.classes)
    return node.attr not in ours or (node.attr in of_objects() and not own)


def _is_private_text(node: ast.AST, ours: set[str]) -> TypeGuard[ast.Constant]:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    text = node.value
    *before, last = text.split(".")
    if before:
        return all(x.isidentifier() for x in (*before, last)) and is_private_chain(text)
    if text.endswith("_") and is_private(text):  # the beginning of names, as in f"_sym_{name}"
        ops = {name.partition("::")[2] for name in all_op_names()}
        return not any(x.startswith(text) for x in ops) and any(
            x.startswith(text) for x in of_torch()
        )
    return text in of_torch() and text not in ours


def sources() -> dict[str, str]:
    paths = (p for p in sorted(SOURCE.rglob("*.py")) if p.relative_to(SOURCE).parts[0] != ROOM)
    return {str(p.relative_to(SOURCE)): p.read_text() for p in paths}


def test_private_names_of_pytorch_stand_in_one_room() -> None:
    assert len(sources()) > 200
    assert problems(sources()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch.utils._pytree import tree_map", ["a:1 torch.utils._pytree.tree_map"]),
        ("from torch.fx.experimental.proxy_tensor import make_fx", ["a:1 torch.fx.exp"]),
        ("import torch._dynamo", ["a:1 torch._dynamo"]),
        ("import torch\ntorch._C._set_grad_enabled(True)", ["a:2 ._C", "a:2 ._set_grad"]),
        ("import torch\nx: torch._ops.OpOverload", ["a:2 ._ops"]),
        ("import torch\nb = torch._C\nb.f()", ["a:2 ._C"]),
        ("import torch\ntorch.fx.experimental.proxy_tensor.make_fx", ["a:2 torch.fx.exp"]),
        ("from torch import distributed as d\nd._world", ["a:2 ._world"]),
        ("def f(x):\n    return x._version", ["a:2 ._version"]),
        ("def f(x):\n    x.node._expr = 1", ["a:2 ._expr"]),
        ("class A:\n    def f(self):\n        return self._spec", ["a:3 ._spec"]),
        ("class A:\n    def f(self, x):\n        self._spec = x._spec", ["a:3 ._spec"]),
        ("getattr(x, '_backward_hooks')", ['a:1 "_backward_hooks"']),
        ("getattr(x, f'_sym_{name}')", ['a:1 "_sym_"']),
        ("log('torch._subclasses.fake_tensor')", ['a:1 "torch._subclasses']),
        # What is none of PyTorch's.
        ("import torch\naten = torch.ops.aten\naten._to_copy.default", []),
        ("'_softmax', '_foreach_', '_ns', 'torch.fx.Graph'", []),
        ("import sys\nsys._getframe()", []),
        ("def f(x):\n    '''_version'''\n    return x._replace(a=1)", []),
        ("class A:\n    def f(self):\n        self._modules = 1\n        return self._modules", []),
        ("class A:\n    _ours: int\ndef f(x):\n    return x._ours", []),
    ],
)
def test_the_reading_finds_private_names(text: str, expected: list[str]) -> None:
    found = problems({"a": text})
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_the_room_imports_nothing_of_tutti_but_itself() -> None:
    for path in (SOURCE / ROOM).glob("*.py"):
        for _, full in File(ast.parse(path.read_text())).imports:
            assert not full.startswith("tutti") or full.startswith(f"tutti.{ROOM}."), path.name


def entries(path: Path) -> set[str]:
    """The public names of a file of the room."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(ast.literal_eval(node.value))
        else:
            found |= {x.id for x in _stored(node)}
    return {name for name in found if not name.startswith("_") and name != "Table"}


def test_each_entry_has_a_contract() -> None:
    for path in sorted((SOURCE / ROOM).glob("[a-z]*.py")):
        contract = ast.parse(Path(__file__).with_name(f"test_{path.name}").read_text())
        used = {x.id for x in ast.walk(contract) if isinstance(x, ast.Name)}
        assert entries(path) and entries(path) - used == set(), path.name
