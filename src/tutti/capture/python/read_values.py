"""Values of tensors that a step's Python reads: `.item()`, a branch on a tensor.

Capture does not know them. A trace assumes a value for each, and so the way at each branch; its program is
valid for calls with the same ways. The tensors on which branches depend are results of the graph: after a
run, and before its effects, `calls.guards` checks the conditions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx

from tutti.capture.patch_table import CONVERSIONS, FAKE_CONVERSIONS, FAKE_READS, ITEM_MEMO
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.host_values import noted
from tutti.capture.python.known_values import UNKNOWN, known
from tutti.capture.python.loop_reads import LoopReads
from tutti.capture.python.read_places import Place, Places, Site
from tutti.capture.python.ways_out import of_stack
from tutti.capture.value_readers import READER, THE_STEP, ValueReader
from tutti.errors import CaptureError
from tutti.graph.edits.patch import Patch, caller, replaced
from tutti.torch_private.symbolic import (
    ConstantSource,
    DimDynamic,
    NumberEnv,
    SymNode,
    expression_of,
)
from tutti.user_lines import is_users, quoted, user_line

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default


class Symbols(NumberEnv):
    """The numbers of a trace: its inputs, and those that it reads from tensors.

    It omits PyTorch's log of the line of each guard: that imports the exporter and the compiler, to tell a
    user's files from others, which takes a second in each process.

    Args:
        assumed: the values that the trace takes for its reads.
        loops: the lines of reads in loops; a trace may add one.
    """

    def __init__(self, assumed: Assumed, loops: set[Site]) -> None:
        super().__init__(allow_dynamic_output_shape_ops=False)
        self.assumed = assumed
        self.reads: list[sympy.Symbol] = []
        self.places: list[Place] = []
        self.hints: list[float] = []
        self.kinds: list[type] = []
        self._every: set[sympy.Symbol] = set()  # of this trace and others
        # Answers to questions of `math` about a read number, which no symbol can answer.
        self.asked: list[tuple[str, Any, bool]] = []
        self.readers: list[ValueReader] = []
        # The inputs that the step writes into texts; with `other_texts` these are of other values.
        self.written: set[sympy.Symbol] = set()
        self.written_at = ""  # the first line that does
        self.other_texts = False
        self.hashed: set[sympy.Symbol] = set()  # the numbers that Python asks for a hash
        self._names = Places()
        self._guesses = LoopReads(assumed, loops)

    def begin(self, root: CodeType, work: Callable[[], int]) -> None:
        """Begin a trace, inside of a call of `root`: its first read is read 0.

        `work()` is the number of its operations so far.
        """
        self.reads, self.places, self.hints, self.kinds = [], [], [], []
        self.asked, self.readers = [], []
        self.written, self.written_at, self.hashed = set(), "", set()
        self._names.begin(root)
        self._guesses.begin(work)
        self._sites: dict[Any, Site] = {}
        self._num_seen, self._deciding = [len(self.guards), 0], set[Site]()

    def stays(self, symbol: Any) -> bool:
        """A read number is read anew in each call, whatever it was equal to."""
        return symbol in self._every

    def create_unbacked_symfloat(self) -> torch.SymFloat:
        return self._read(float)

    def create_unbacked_symint(self, source: Any = None) -> torch.SymInt:
        return self._read(int)

    def create_unbacked_symbool(self) -> torch.SymBool:
        return self._read(bool)

    def _read(self, kind: type) -> Any:
        place = self._names.next()
        hint = self._hint(place, kind)
        source = ConstantSource(f"read.{len(self.reads)}")
        value = hint if kind is float else int(hint)
        symbol: Any = self.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self.kinds.append(kind)
        self.places.append(place)
        self.hints.append(hint)
        self.readers.append(READER.get())
        self.reads.append(symbol)
        self._every.add(symbol)
        self._sites[symbol] = place[0]
        if kind is float:
            return self.create_symfloatnode(symbol, hint=hint, source=source)
        if kind is int:
            return self.create_symintnode(symbol, hint=int(hint), source=source)
        return torch.SymBool(SymNode(sympy.Eq(symbol, 1), self, bool, bool(hint)))

    def _hint(self, place: Place, kind: type) -> float:
        return kind(self._guesses.value(place, kind, decides=self._decides(place[0])))

    def _decides(self, site: Site) -> bool:
        """Whether a branch of the trace so far depends on a read at this line."""
        guards, asked = self._num_seen
        exprs = [*(g.expr for g in self.guards[guards:]), *(e for _, e, _ in self.asked[asked:])]
        self._num_seen = [len(self.guards), len(self.asked)]
        found = (s for expr in exprs for s in expr.free_symbols)
        self._deciding |= {self._sites[s] for s in found if s in self._sites}
        return site in self._deciding

    def generic(self) -> Assumed | None:
        """Other guesses at numbers; None without one to change."""
        pairs, values = zip(self.places, self.kinds, strict=True), self.assumed.values
        guessed = any(kind is float and place not in values for place, kind in pairs)
        changes = guessed and not self.assumed.generic
        return replace(self.assumed, generic=True) if changes else None

    def flipped(self) -> Assumed | None:
        """Values that turn the last condition which is not sure the other way; None without one."""
        sure, last = self.assumed.sure, len(self.reads) - 1
        while last >= 0 and (self.kinds[last] is not bool or self.places[last] in sure):
            last -= 1
        if last < 0:
            return None
        before = dict(zip(self.places[:last], self.hints, strict=False))
        turned = {self.places[last]: not self.hints[last]}
        values = {**before, **self.assumed.values, **turned}
        return replace(self.assumed, values=values, sure=sure.union(before, turned))

    def conditions(self, reads: Reads) -> list[Any]:
        """The conditions of the branches of the trace with these `reads`."""
        others = self._every - {*reads.symbols}
        return [guard.expr for guard in self.guards if not guard.expr.free_symbols & others]

    def decisive(self) -> list[int]:
        """The numbers of the reads of this trace on which a branch depends."""
        asked = [expr for _, expr, _ in self.asked]
        used = {s for expr in [*asked, *(g.expr for g in self.guards)] for s in expr.free_symbols}
        return [k for k, symbol in enumerate(self.reads) if symbol in used]

    def ask(self, name: str, x: Any) -> bool | None:
        """The answer of `math.isnan` and its like for a read number; None for any other."""
        expr = expression_of(x)
        if not expr.free_symbols & {*self.reads}:
            return None
        value = 1.0
        if expr in self.reads:
            k = self.reads.index(expr)
            value = self.assumed.values.get(self.places[k], self.hints[k])
        answer = bool(getattr(math, name)(value))
        self.asked.append((name, expr, answer))
        return answer

    def text(self, x: Any, name: str, rest: tuple[Any, ...]) -> str:
        """The text of an input number, by the method `name`."""
        self.written |= expression_of(x).free_symbols
        self.written_at = self.written_at or user_line()
        value = bool(x) if isinstance(x, torch.SymBool) else x.node.hint
        if self.other_texts and not isinstance(value, bool):
            value = value * 1009 + 7
        return getattr(type(value), name)(value, *rest)

    def is_read(self, x: Any) -> bool:
        """Whether a number depends on a read one."""
        return bool(expression_of(x).free_symbols & {*self.reads})


@dataclass(frozen=True)
class Reads:
    """The reads and branches of one trace: symbols with their places; line and reader of the first."""

    symbols: tuple[sympy.Symbol, ...] = ()
    places: tuple[Place, ...] = ()
    asked: tuple[tuple[str, Any, bool], ...] = ()
    source: str = ""
    reader: ValueReader = THE_STEP

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def hint(self) -> str:
        """For a warning of many traces: the first read, and how to do without; "" without reads."""
        if not self.symbols:
            return ""
        return (
            f"; it reads a tensor's value at {self.source}: torch.where or clamp needs one program"
        )

    def refuse(self, where: str, fix: str) -> None:
        """Raise `CaptureError` if the trace reads any value."""
        if self.symbols:
            raise CaptureError(
                f"{self.reader.name} branches on a value of a tensor, {where}",
                at=quoted(self.source),
                why="each rank would have to know it before it goes on",
                fix=self.reader.way_out + fix,
            )


def held(traced: fx.GraphModule, symbols: Symbols) -> Reads:
    """Add the tensors on whose values the trace's branches depend as its last results, in order."""
    nodes = {_symbol_of(n): n for n in traced.graph.nodes if n.target is ITEM}
    numbers = symbols.decisive()
    found: list[fx.Node] = []
    for symbol in (symbols.reads[k] for k in numbers):
        node = nodes[symbol]
        read: Any = node.args[0]
        with traced.graph.inserting_before(node):
            copy = traced.graph.call_function(aten.clone.default, (read,))
        fake = read.meta["val"]
        with fake.fake_mode, torch.no_grad():
            copy.meta = {**node.meta, "val": fake.detach().clone()}
        found.append(copy)
    if not found:
        return Reads()
    output = traced.graph.output_node()
    output.args = ([*output.args[0], *found],)  # type: ignore[misc]
    return Reads(
        tuple(symbols.reads[k] for k in numbers),
        tuple(symbols.places[k] for k in numbers),
        tuple(symbols.asked),
        found[0].meta.get("source", ""),
        symbols.readers[numbers[0]],
    )


def _symbol_of(node: fx.Node) -> Any:
    (symbol,) = expression_of(node.meta["val"]).free_symbols
    return symbol


@contextlib.contextmanager
def symbols_stay(symbols: Symbols) -> Iterator[None]:
    """Inside, refuse a plain number or a text from a number read from a tensor: it would be of this call.

    Texts of input numbers are noted: they count if the step uses them as more than labels.

    A tensor of which the values are known (`known_values.py`) gives its numbers.
    """

    def guarded(patch: Patch) -> Callable[..., Any]:
        plain = patch.original
        writes = patch.name in ("__format__", "__str__", "__repr__")

        def checked(x: Any, *rest: Any) -> Any:
            if not is_users(caller().f_code.co_filename):
                return plain(x, *rest)
            if symbols.is_read(x):
                _refuse(_WRITES, _OUTSIDE) if writes else refuse_conversion()
            return symbols.text(x, patch.name, rest) if writes else plain(x, *rest)

        return checked

    def of_tensor(name: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(Tensor, name)

        def checked(x: Any) -> Any:
            if (answer := known(x, plain)) is not UNKNOWN:
                return answer
            if is_users(caller().f_code.co_filename):
                refuse_conversion()
            return plain(x)

        return checked

    def read(patch: Patch) -> Callable[..., Any]:
        of_values: Callable[..., Any] = getattr(Tensor, patch.name)
        of_fakes = patch.original

        def answered(x: Any) -> Any:
            answer = known(x, of_values)
            return of_fakes(x) if answer is UNKNOWN else answer

        return answered

    with replaced(
        *((patch, guarded(patch)) for patch in CONVERSIONS),
        *((patch, of_tensor(name)) for name, patch in FAKE_CONVERSIONS.items()),
        *((patch, read(patch)) for patch in FAKE_READS.values()),
        (ITEM_MEMO, property(lambda _: None, ITEM_MEMO.original.__set__)),
    ):
        yield


_WRITES = "writes a tensor's value into a text"
_CONVERTS = "makes a plain number of a tensor's value (float(), int(), an index)"


_ITEM = "x.item(), with which Python's own operators compute"
_OUTSIDE = "return the tensor from the step and write it there"


def refuse_conversion(fix: str = _ITEM) -> NoReturn:
    """Refuse a plain number of a tensor's value, at the current line of the user's."""
    _refuse(_CONVERTS, f"{fix}; or keep it a tensor")


def _refuse(does: str, fix: str) -> NoReturn:
    told = of_stack(fix)
    raise noted(
        CaptureError(
            f"the step {does}",
            at=told.at,
            why="the step is captured once, before it has values; Python would not see later ones"
            + told.inside,
            fix=told.fix,
        )
    )
