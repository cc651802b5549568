"""What a capture replaces in PyTorch, `time` and `math`: put back however it ends; which threads see it."""

from __future__ import annotations

import _thread
import ast
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sources import tree_of
from tutti.capture import patch_table
from tutti.capture.patch_table import PATCHES
from tutti.capture.step import capture
from tutti.errors import CaptureError
from tutti.graph.edits.patch import Patch, replaced
from tutti.torch_private.value_checks import CHECK_OF_ARGUMENTS

ROOT = Path(__file__).parents[2]
# Replaced in the middle of a step only, in the second trace, where programs are written, or on ranks.
ELSEWHERE = {
    patch_table.ANY,
    patch_table.SCALED_UPDATE,
    patch_table.DEEPCOPY,
    patch_table.DEFAULT_GROUP,
    *patch_table.PROCESSES,
    *patch_table.quick.PATCHES,
}


def own(patch: Patch) -> Any:
    """What the owner itself has under the name; None where it inherits it, or has nothing."""
    return vars(patch.owner).get(patch.name)


def state() -> list[Any]:
    return [own(patch) for patch in PATCHES]


def captured(inside: Callable[[], Any] = lambda: None, precision: str = "fp32") -> None:
    """Capture a small step, and call `inside` in the middle of it."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        inside()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    capture(step, model, optimizer, (torch.ones(2, 4),), precision=precision)


def in_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("raised", [None, CaptureError, ValueError, KeyboardInterrupt, SystemExit])
def test_everything_is_as_before(raised: type[BaseException] | None, precision: str) -> None:
    captured()  # what the first capture of a process imports and makes
    before = state()

    def fail() -> None:
        if raised is not None:
            raise raised("now")

    if raised is None:
        captured(fail, precision)
    else:
        with pytest.raises(raised):
            captured(fail, precision)
    after = state()
    changed = [
        f"{p.place}.{p.name}" for p, a, b in zip(PATCHES, before, after, strict=True) if a is not b
    ]
    assert changed == []


def test_each_row_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*CHECK_OF_ARGUMENTS, True)  # `torch.compile` leaves it off
    captured()
    before, during = state(), SimpleQueue[list[Any]]()
    captured(lambda: during.put(state()))
    idle = {p for p, a, b in zip(PATCHES, before, during.get(), strict=True) if a is b}
    assert [f"{p.place}.{p.name}" for p in idle - ELSEWHERE] == []


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    @staticmethod
    def function() -> str:
        return "plain"


FUNCTION = Patch(Owner, "function", "a test")
INHERITED = Patch(Owner, "inherited", "a test")
ADDED = Patch(Owner, "added", "a test", create=True)


@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt])
def test_what_is_replaced_is_put_back(raised: type[BaseException] | None) -> None:
    before = dict(vars(Owner))
    try:
        with replaced((FUNCTION, lambda: "new"), (INHERITED, lambda self: "new"), (ADDED, 3)):
            assert Owner.function() == Owner().inherited() == "new"
            assert Owner.added == 3  # type: ignore[attr-defined]
            if raised is not None:
                raise raised
    except (ValueError, KeyboardInterrupt):
        pass
    assert dict(vars(Owner)) == before and Owner().inherited() == "base"


def test_nothing_is_replaced_where_a_target_is_not_there() -> None:
    before = dict(vars(Owner))
    missing = Patch(Owner, "missing", "a test")
    with (
        pytest.raises(AttributeError, match="missing"),
        replaced((FUNCTION, None), (missing, None)),
    ):
        raise AssertionError("entered")
    assert dict(vars(Owner)) == before


def test_what_is_put_there_by_then_is_put_back_after_an_error() -> None:
    """The second owner takes no attributes: the first is as before."""

    class Closed(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            raise KeyboardInterrupt

    closed, before = Closed(x=1), dict(vars(Owner))
    given = (FUNCTION, lambda: "new"), (Patch(closed, "x", "a test"), 2)
    with pytest.raises(KeyboardInterrupt), replaced(*given):
        raise AssertionError("entered")
    assert dict(vars(Owner)) == before


def test_other_threads() -> None:
    owner = SimpleNamespace(name="owner", function=lambda: "plain")
    with replaced((Patch(owner, "function", "a test"), lambda: "new")):
        assert owner.function() == "new"
        assert in_another_thread(owner.function) == "plain"


def test_a_thread_that_python_has_not_started_works_for_this_one() -> None:
    """As those of the autograd engine."""
    found: SimpleQueue[str] = SimpleQueue()
    owner = SimpleNamespace(name="owner", function=lambda: "plain")
    with replaced((Patch(owner, "function", "a test"), lambda: "new")):
        _thread.start_new_thread(lambda: found.put(owner.function()), ())
        assert found.get(timeout=10.0) == "new"


def test_other_threads_read_and_write_properties() -> None:
    class Held:
        x = property(lambda self: "plain", lambda self, value: None)

    written: list[Any] = []
    instead = property(lambda self: "new", lambda self, value: written.append(value))
    held = Held()
    with replaced((Patch(Held, "x", "a test"), instead)):
        assert held.x == "new" and in_another_thread(lambda: held.x) == "plain"
        in_another_thread(lambda: setattr(held, "x", 1))
        held.x = 2
    assert written == [2] and held.x == "plain"


def test_another_thread_reads_the_clock_and_writes_data_meanwhile() -> None:
    """These are guarded in a capture; the clock is not told of, and the data are another tensor's."""
    found: SimpleQueue[bool] = SimpleQueue()

    def elsewhere() -> None:
        x, y = torch.zeros(2), torch.ones(2)
        x.data = y
        found.put(time.perf_counter() > 0 and x.data_ptr() == y.data_ptr())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(lambda: in_another_thread(elsewhere))
    assert found.get()


def trained_elsewhere() -> Any:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.1 * i)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.tensor([0, 1, 4])).square().sum().backward()
    optimizer.step()
    grads = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    return [*grads, *model.parameters(), *(p.grad is None for p in model.parameters())]


def numbers_of_values() -> Any:
    x = torch.tensor([0.0, 2.0, 2.0])
    x[x > 1] = torch.tensor(3.0)
    return [
        x.nonzero().tolist(),
        torch.unique(x).tolist(),
        float(x.max()),
        bool(x.any()),
        float(f"{x[1]}"),
    ]


def drawn() -> Any:
    torch.manual_seed(3)
    return [torch.rand(3), torch.distributions.Normal(0.0, 1.0).sample()]


def shared_memory() -> Any:
    x = torch.arange(3)
    return [x.numpy().tolist(), torch.from_dlpack(x), x.data_ptr() > 0]


@pytest.mark.parametrize("work", [trained_elsewhere, numbers_of_values, drawn, shared_memory])
def test_another_thread_works_as_ever_meanwhile(work: Callable[[], Any]) -> None:
    """As one that acts in an environment with another model."""
    wanted = work()
    found: SimpleQueue[Any] = SimpleQueue()

    def tried() -> None:
        try:
            found.put(in_another_thread(work))
        except Exception as error:
            found.put(error)

    captured(tried)
    torch.testing.assert_close(found.get(), wanted, rtol=0, atol=0)


def test_functions_of_math_take_plain_numbers_in_another_thread_meanwhile() -> None:
    found: SimpleQueue[float] = SimpleQueue()
    captured(lambda: found.put(in_another_thread(lambda: math.sqrt(4.0))))
    assert found.get() == 2.0


def _names(tree: ast.AST) -> set[str]:
    """The dotted names that a file imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _assigned(tree: ast.AST) -> set[str]:
    """The imported names an attribute of which a file assigns to, or deletes."""
    imported = {name.rpartition(".")[2] for name in _names(tree)} | {"torch"}
    found: set[str] = set()
    for node in ast.walk(tree):
        given = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in given:
            base: Any = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if base is not target and isinstance(base, ast.Name) and base.id in imported:
                found.add(ast.unparse(target))
    return found


def test_nothing_else_replaces_what_is_pytorchs() -> None:
    files = [*(ROOT / "src/tutti/capture").rglob("*.py"), *(ROOT / "src/tutti/graph").rglob("*.py")]
    mocked, assigned = [], []
    for path in (ROOT / "src/tutti").rglob("*.py"):
        tree = tree_of(path)
        mocked += [path.name for name in _names(tree) if name.startswith("unittest")]
        assigned += [f"{path.name}: {name}" for name in _assigned(tree) if path in files]
    assert mocked == [] and assigned == []


def test_each_row_has_a_reason_of_one_line() -> None:
    for patch in PATCHES:
        assert patch.reason and "\n" not in patch.reason and "|" not in patch.reason


def table() -> str:
    """The rows of the documentation: names of one owner that are replaced for one reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for p in PATCHES:
        grouped.setdefault((p.place, p.reason), []).append(f"`{p.name}`")
    return "\n".join(
        f"| `{place}` | {', '.join(names)} | {reason} |"
        for (place, reason), names in grouped.items()
    )


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs/concepts/capture.md").read_text()
    head = "| of | replaced | reason |\n| --- | --- | --- |\n"
    rows = page.split(head)[1].split("\n\n")[0]
    found, wanted = set(_cells(rows)), set(_cells(table()))
    assert wanted <= found  # this PyTorch may lack a collective
    assert all(place.startswith("`torch.distributed") for place, *_ in found - wanted)


def _cells(rows: str) -> Iterator[tuple[str, ...]]:
    """Each attribute of a table's rows: its owner, its name, the reason."""
    for row in rows.splitlines():
        place, names, reason = row.strip("| ").split(" | ")
        for name in names.split(", "):
            yield place, name, reason
