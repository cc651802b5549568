"""Numbers that a step draws from the host's generators: inputs of its graph, drawn anew at each call.

    lam = np.random.beta(1.0, 1.0)      draw.0, an input; `lam > 0.5` is a branch on it
    head = random.choice(heads)         its index: Python reads it, so a program for each value

The first trace finds the draws: their generators, methods and arguments. A second one has symbols in their
place. Between calls of a program the generators are as eager steps leave them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.capture.python.generators import (
    generator_of,
    global_generators,
    is_generator,
    put_state,
    state_of,
)
from tutti.capture.python.held_values import Table, TableEntry, named
from tutti.capture.python.symbols import SYMBOLS
from tutti.capture.python.ways_out import Told, of_stack
from tutti.errors import CaptureError
from tutti.graph.edits.patch import Patch, here_only, replaced
from tutti.user_lines import quoted, user_line

_CHOICE = "choice"
# Methods of a unit draw and two numbers, which may be symbols: the same numbers as by the method itself.
_UNITS: dict[str, tuple[str, tuple[float, ...]]] = {
    "uniform": ("random", ()),
    "normal": ("normal", (0.0, 1.0)),
    "gauss": ("gauss", (0.0, 1.0)),
    "normalvariate": ("normalvariate", (0.0, 1.0)),
}
BEFORE_THE_STEP = "torch.rand and the like; or draw before the step and hand them over as arguments"
_REASON = "numbers that the step draws are inputs of its graph"


@dataclass(frozen=True)
class Draw:
    """One draw of a number.

    source: the name of the generator.
    method: of the generator.
    given, named: the arguments; for `choice` the count of the values to choose from.
    """

    source: str
    method: str
    given: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def take(self, generator: Any) -> float | int:
        """Draw it; for `choice` the position of the value."""
        return _number(self.take_value(generator))

    def take_value(self, generator: Any) -> Any:
        """As `take`; a value of NumPy as it is."""
        method, given = getattr(generator, self.method), self.given
        if self.method == _CHOICE and hasattr(generator, "getrandbits"):
            given = (range(given[0]), *given[1:])
        return method(*given, **dict(self.named))


@dataclass(frozen=True)
class DrawnNumber:
    """A draw of a program: an input of its graph, or with `value` a constant, for calls that draw the same.

    at: the user's line.
    """

    draw: Draw
    name: str
    value: int | float | None
    at: str


@dataclass(frozen=True)
class Drawn:
    """The draws of a program, in order, and the entries of the generators that the step's objects hold."""

    numbers: tuple[DrawnNumber, ...] = ()
    entries: Mapping[str, TableEntry] | None = None

    def __bool__(self) -> bool:
        return bool(self.numbers)

    @property
    def sources(self) -> dict[str, None]:
        """The names of its generators."""
        return dict.fromkeys(one.draw.source for one in self.numbers)

    @property
    def names(self) -> list[str]:
        """The names of its inputs."""
        return [one.name for one in self.numbers if one.value is None]

    @property
    def constants(self) -> dict[str, float]:
        """By name, the draws with constant values."""
        return {one.name: one.value for one in self.numbers if one.value is not None}

    def generators(self, find: Callable[[TableEntry], TableEntry] = lambda x: x) -> dict[str, Any]:
        """By name, its generators now; `find` gives the current entry for one of the trace."""
        found, entries = global_generators(), self.entries or {}
        held = {k: generator_of(find(entries[k]).get()) for k in self.sources if k in entries}
        return {k: held[k] if k in held else found[k] for k in self.sources}

    def take(self, generators: Mapping[str, Any]) -> dict[str, float] | None:
        """Draw the inputs, by name; None if a constant has another value."""
        taken: dict[str, float] = {}
        for one in self.numbers:
            value = one.draw.take(generators[one.draw.source])
            if one.value is None:
                taken[one.name] = value
            elif value != one.value:
                return None
        return taken

    def refuse_read(self, error: BaseException | None) -> None:
        """Raise `CaptureError` for a fraction whose value Python reads: it would be another at each call.

        error: that of a trace with the number as an input, if it has failed.
        """
        read = [one for one in self.numbers if isinstance(one.value, float)]
        if read:
            name = f"{read[0].draw.source}: {read[0].draw.method}"
            raise CaptureError(
                f"the step reads a random number, of {name}, otherwise than in formulas and conditions",
                at=quoted(read[0].at),
                why=f"{type(error).__name__}: {error}"
                if error
                else "it makes a size or a position of it",
                fix="draw it before the step, compute there what depends on it, and hand that over as "
                "arguments; or torch.rand and functions of torch",
            ) from error

    def peeked(self) -> dict[str, float]:
        """The inputs of a call now, NaN where a constant would be another one; the generators stay."""
        generators = self.generators()
        with kept(generators.values()):
            taken = self.take(generators)
        return dict.fromkeys(self.names, math.nan) if taken is None else taken


@contextlib.contextmanager
def kept(generators: Collection[Any]) -> Iterator[None]:
    """At the end these generators have the states of the beginning."""
    before = [(one, state_of(one)) for one in generators]
    try:
        yield
    finally:
        for one, state in before:
            put_state(one, state)


class Draws:
    """The draws of one trace.

    Args:
        expected: the draws of an earlier trace; those not among `constants` are inputs.
        constants: draws whose values Python reads.
        tables: of the step's Python values.
    """

    def __init__(
        self, expected: Sequence[Draw], constants: Collection[Draw], tables: Sequence[Table]
    ) -> None:
        self._expected, self._constants, self._tables = expected, constants, tables
        self.entries: dict[str, TableEntry] = {}
        self._generators = global_generators()
        for name, entry, x in named(tables):
            own = generator_of(x)
            if own is not None and not any(own is y for y in self._generators.values()):
                self.entries[name] = entry
                self._generators[name] = own
        self._names = {id(x): name for name, x in reversed(self._generators.items())}
        self.values = self._values()
        self._symbols: dict[str, Any] = {}
        self.lost: list[str] = []  # the names of generators that something else has changed
        self.found: list[DrawnNumber] = []
        self.refused: Told | None = None  # the first draw that is no number

    def _values(self) -> dict[str, float]:
        """The values of the inputs in this call."""
        if any(draw.source not in self._generators for draw in self._expected):
            return {}
        numbers = [
            DrawnNumber(draw, f"draw.{k}", None, "") for k, draw in enumerate(self._expected)
        ]
        with kept([*self._generators.values()] if numbers else []):
            taken = Drawn(tuple(numbers)).take(self._generators) or {}
        return {one.name: taken[one.name] for one in numbers if one.draw not in self._constants}

    @property
    def inputs(self) -> dict[str, Draw]:
        """By name, the draws that are inputs."""
        named = {f"draw.{k}": draw for k, draw in enumerate(self._expected)}
        return {name: named[name] for name in self.values}

    @property
    def drawn(self) -> Drawn:
        """Those of the trace."""
        names = {one.draw.source for one in self.found}
        return Drawn(tuple(self.found), {k: x for k, x in self.entries.items() if k in names})

    def begin(self, symbols: Sequence[Any]) -> None:
        """Have these in place of the inputs, in the order of `values`."""
        self._symbols = dict(zip(self.values, symbols, strict=True))

    def changed(self) -> list[str]:
        """The names of generators that something else than a draw of a number has changed."""
        return [k for k, one in self._generators.items() if state_of(one) != self._states[k]]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a trace draws; the end puts the generators back."""
        self.found, self._symbols, self.refused = [], {}, None
        self._states = {name: state_of(one) for name, one in self._generators.items()}
        before = dict(self._states)
        try:
            with replaced(*self._of_modules()), self._of_tables():
                yield
        finally:
            self.lost = self.changed()
            for name, state in before.items():
                if name in self.lost or state != self._states[name]:
                    put_state(self._generators[name], state)

    def _of_modules(self) -> list[tuple[Patch, Any]]:
        found = []
        for module, name in _places(len(sys.modules)):
            plain = vars(module).get(name)
            if (own := generator_of(plain)) is not None and not is_generator(plain):
                found.append((Patch(module, name, _REASON), self._drawing(own, plain)))
        return found

    @contextlib.contextmanager
    def _of_tables(self) -> Iterator[None]:
        put: list[tuple[TableEntry, Any]] = []
        try:
            for _, entry, x in named(self._tables):
                own = generator_of(x)
                if own is None or not entry.table.writable or id(own) not in self._names:
                    continue
                one = _Held(own, self) if is_generator(x) else here_only(self._drawing(own, x), x)
                entry.put(one)
                put.append((entry, x))
            yield
        finally:
            for entry, x in put:
                entry.put(x)

    def _drawing(self, generator: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A method of a generator, as the trace calls it."""

        @functools.wraps(plain)
        def draw(*given: Any, **options: Any) -> Any:
            return self._draw(generator, plain, given, options)

        return draw

    def _draw(
        self,
        generator: Any,
        plain: Callable[..., Any],
        given: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        method, source = plain.__name__, self._names[id(generator)]
        if method in _UNITS and len(given) == 2 and any(isinstance(x, SYMBOLS) for x in given):
            unit, limits = _UNITS[method]
            one = self._draw(generator, getattr(generator, unit), limits, {})
            first, second = given
            return first + (second - first if unit == "random" else second) * one
        of = given[0] if method == _CHOICE and given and hasattr(given[0], "__len__") else None
        several = of is not None and (len(given) > 1 or "size" in options)
        try:
            first = given if of is None else (len(of), *given[1:])
            draw = Draw(source, method, _plain(first), _plain(_sorted(options)))
        except TypeError:  # symbols or arrays
            draw = None
        if draw is None or several or state_of(generator) != self._states[source]:
            self.refused = self.refused or of_stack(BEFORE_THE_STEP)
            return plain(*given, **options)
        value = draw.take_value(generator)
        try:
            number = _number(value)
        except (AttributeError, TypeError, ValueError):  # of an array
            self.refused = self.refused or of_stack(BEFORE_THE_STEP)
            return value
        self._states[source] = state_of(generator)
        k = len(self.found)
        name = f"draw.{k}"
        is_input = name in self._symbols and self._expected[k] == draw
        self.found.append(DrawnNumber(draw, name, None if is_input else number, user_line()))
        if is_input:
            value = self._symbols[name]
        return value if of is None else of[int(value)]


class _Held:
    """A generator in a trace: its methods draw numbers of the trace, all else is its own."""

    def __init__(self, generator: Any, draws: Draws) -> None:
        self._generator, self._draws = generator, draws

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return type(self._generator)

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._generator, name)
        if callable(plain) and not name.startswith("_"):
            return here_only(self._draws._drawing(self._generator, plain), plain)
        return plain


def _sorted(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options by name; probabilities, which may be a list, as a tuple."""
    return tuple(sorted((k, tuple(x) if k == "p" else x) for k, x in options.items()))


def _number(x: Any) -> float | int:
    """The Python number of a drawn value; raises `ValueError` for an array of several."""
    value = x if type(x) in (int, float) else x.item()
    if type(value) not in (int, float):
        raise TypeError
    return value


def _plain(x: Any) -> Any:
    """Arguments that compare; raises `TypeError` for others, and for lists, which a method may change."""
    if isinstance(x, tuple):
        return tuple(map(_plain, x))
    if x is None or type(x) in (int, float, bool, str):
        return x
    raise TypeError


@functools.lru_cache(1)
def _places(_: int) -> list[tuple[Any, str]]:
    """The modules with functions that draw, and the functions' names; for a number of modules."""
    wanted = {
        id(f)
        for home in filter(None, (sys.modules.get("random"), sys.modules.get("numpy.random")))
        for f in vars(home).values()
        if generator_of(f) is not None and not is_generator(f)
    }
    found = []
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", None)
        if held and not wanted.isdisjoint(map(id, [*held.values()])):
            found += [(module, name) for name, x in held.items() if id(x) in wanted]
    return found
