"""Python numbers as symbols of a trace: functions that accept symbols, and ops that cannot."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tutti.capture.patch_table import (
    EQUALITY,
    MATH,
    POWERS,
    SCHEDULER_FLOAT,
    TENSOR_OF_SYMBOLS,
)
from tutti.capture.python.looked_up import Lookups
from tutti.capture.python.read_values import ITEM, Symbols
from tutti.capture.python.user_globals import like
from tutti.errors import CaptureError
from tutti.graph.edits.patch import replaced
from tutti.torch_private.op_tables import OpOverload, schema_of
from tutti.torch_private.symbolic import expression_of, function_of_symbol
from tutti.user_lines import quoted

aten = torch.ops.aten

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_log2, _sqrt = function_of_symbol("log2"), function_of_symbol("sqrt")
_FLOATS = ("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "log2")


def _float(x: Any) -> Any:
    return torch.sym_float(x)


def _float_of(x: Any) -> Any:
    """`float`, for a scheduler that calls it on a metric."""
    value = x.item() if isinstance(x, Tensor) else x
    return _float(value) if isinstance(value, SYMBOLS) else float(value)


_SCHEDULERS_FLOAT = like(float, _float_of)


def _of_float(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(_float(x))


def _power(x: Any, y: Any) -> Any:
    return _float(x) ** _float(y)


def _log(x: Any, base: Any = math.e) -> Any:
    log2 = math.log2(base) if not isinstance(base, SYMBOLS) else _log2(_float(base))
    return (_log2(_float(x)) if isinstance(x, SYMBOLS) else math.log2(x)) / log2


def _ask(name: str, x: Any) -> bool:
    """The trace's answer for a number read from a tensor; other numbers are finite."""
    env = x.node.shape_env
    known = env.ask(name, x) if isinstance(env, Symbols) else None
    return name == "isfinite" if known is None else known


def _pow(x: Any, y: Any) -> Any:
    """A power without a guard against a negative base, at which eager fails, too."""
    known = isinstance(y, (int, float, torch.SymInt, torch.SymFloat))
    return x.__float_pow__(y) if known else NotImplemented


def _rpow(x: Any, y: Any) -> Any:
    known = isinstance(y, (int, float, torch.SymInt, torch.SymFloat))
    return x.__rfloat_pow__(y) if known else NotImplemented


def _compared(name: str) -> Any:
    """`==` and `!=` that test a number against itself for NaN; for a symbol they would be constants."""
    plain = getattr(torch.SymFloat, name)

    def compared(x: Any, y: Any) -> Any:
        if isinstance(y, torch.SymFloat) and expression_of(x) == expression_of(y):
            return _ask("isnan", x) is (name == "__ne__")
        return plain(x, y)

    return compared


# Functions of `math` for symbols: PyTorch has them, or their parts.
_OF_MATH: dict[str, Callable[..., Any]] = {
    **{name: _of_float(function_of_symbol(name)) for name in _FLOATS},
    "exp": lambda x: _power(math.e, x),
    "log": _log,
    "log10": lambda x: _log(x, 10),
    "pow": _power,
    "fabs": lambda x: abs(_float(x)),
    "hypot": lambda *x: _sqrt(sum(_float(one) ** 2 for one in x)),
    "isfinite": lambda x: _ask("isfinite", x),
    "isnan": lambda x: _ask("isnan", x),
    "isinf": lambda x: _ask("isinf", x),
}


@contextlib.contextmanager
def on_symbols() -> Iterator[None]:
    """Inside, functions of `math`, lookups, and functions that make a tensor of a number, accept symbols."""
    with replaced(
        *((MATH[name], _choose(MATH[name].original, f)) for name, f in _OF_MATH.items()),
        *((patch, _compared(name)) for name, patch in EQUALITY.items()),
        (POWERS["__pow__"], _pow),
        (POWERS["__rpow__"], _rpow),
        (SCHEDULER_FLOAT, _SCHEDULERS_FLOAT),
        *Lookups().patches(),
        *((patch, _tensor_of(patch.original)) for patch in TENSOR_OF_SYMBOLS.values()),
    ):
        yield


def _tensor_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` that accepts a symbol, or a list of numbers with symbols."""

    def made(value: Any, *args: Any, **options: Any) -> Any:
        if isinstance(value, SYMBOLS):
            return _scalar_tensor(value, *args, **options)
        if isinstance(value, list | tuple) and any(isinstance(x, SYMBOLS) for x in value):
            kind = torch.get_default_dtype() if any(map(_is_float, value)) else torch.int64
            options["dtype"] = options.get("dtype") or kind
            grad = options.pop("requires_grad", False)
            return torch.stack([_scalar_tensor(x, **options) for x in value]).requires_grad_(grad)
        return plain(value, *args, **options)

    return made


def _is_float(x: Any) -> bool:
    return isinstance(x, (float, torch.SymFloat))


def _choose(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **options: Any) -> Any:
        if any(isinstance(x, SYMBOLS) for x in args):
            return symbolic(*args, **options)
        return plain(*args, **options)

    return choose


def _scalar_tensor(
    value: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> Tensor:
    if dtype is None:
        dtype = torch.int64 if isinstance(value, torch.SymInt) else torch.get_default_dtype()
    made: Any = torch.zeros((), dtype=dtype, device=device) + value
    return made.to(dtype).requires_grad_(requires_grad)


def looked_at_by_ops(
    traced: fx.GraphModule,
    names: Sequence[str],
    wanted: set[str],
    sizes: Collection[Any] = frozenset(),
) -> dict[str, fx.Node]:
    """The names of numbers that a trace uses as a size or a position, each with the first op that does: they
    cannot be inputs of its graph.

    Args:
        names: of the placeholders, in order.
        wanted: the names to test; `ITEM` is for numbers read from tensors.
        sizes: symbols of sizes of the batch, not of numbers.
    """
    comes_from: dict[fx.Node, set[str]] = {}
    found: dict[str, fx.Node] = {}
    given = iter(names)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name = next(given)
            comes_from[node] = {name} & wanted
            continue
        if node.target is ITEM:
            comes_from[node] = {str(ITEM)} & wanted
            continue
        mine = set().union(*(comes_from.get(x, set()) for x in node.all_input_nodes))
        if isinstance(node.meta.get("val"), SYMBOLS):
            comes_from[node] = mine
        elif mine and (_sizes_of(node) or _is_symbolic(node, sizes)):
            used = mine if _is_symbolic(node, sizes) else _from_sizes(node, comes_from)
            found = dict.fromkeys(used, node) | found
    return found


def size_refused(user: fx.Node) -> CaptureError:
    """The error for a read value that `user` takes as a size or a position."""
    at = quoted(next(filter(None, (n.meta.get("source") for n in _reads_of(user))), ""))
    if _is_symbolic(user):
        return CaptureError(
            "the step makes a size of a tensor's value",
            at=at,
            why="every shape must be known before the step runs",
            fix="a mask and torch.where, or a size that the step is given as an argument",
        )
    return CaptureError(
        f"the step makes a position or a bound for {user.target} of a tensor's value",
        at=at,
        why="the op takes a plain number there, and the step is captured before it has values",
        fix=_AS_INDEX if user.target in _SLICES else _AS_TENSOR,
    )


_SLICES = frozenset(
    {
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.select.int,
        aten.select_scatter.default,
        aten.narrow.default,
    }
)
_AS_INDEX = (
    "positions as a tensor, with the tensor of the value: at = (pointer + torch.arange(count)) % size, then "
    "x[:, at] in place of x[:, p : p + count], read or written; or a Python number that the step keeps in "
    "place of the tensor, with a program for each of its values"
)
_AS_TENSOR = "an op that takes it as a tensor, as torch.gather does; or give the number to the step"


def _reads_of(user: fx.Node) -> Iterator[fx.Node]:
    """The reads of values that reach an op as numbers."""
    todo = [user]
    while todo:
        node = todo.pop()
        if node.target is ITEM:
            yield node
        elif node is user or isinstance(node.meta.get("val"), SYMBOLS):
            todo += reversed(node.all_input_nodes)


def _is_symbolic(node: fx.Node, sizes: Collection[Any] = frozenset()) -> bool:
    """Whether the shape of an op's result depends on a symbol that is none of `sizes`."""
    val = node.meta.get("val")
    return isinstance(val, Tensor) and not all(
        type(n) is int
        or (isinstance(n, torch.SymInt) and expression_of(n).free_symbols <= {*sizes})
        for n in val.shape
    )


def _sizes_of(node: fx.Node) -> list[Any]:
    """The arguments of an op that are sizes, dims or positions."""
    if not isinstance(node.target, OpOverload):
        return []
    named = zip(schema_of(node.target).arguments, node.args, strict=False)
    found = [value for argument, value in named if "int" in str(argument.type).lower()]
    kinds = {a.name: str(a.type).lower() for a in schema_of(node.target).arguments}
    return found + [v for k, v in node.kwargs.items() if "int" in kinds.get(k, "")]


def _from_sizes(node: fx.Node, comes_from: dict[fx.Node, set[str]]) -> set[str]:
    nodes: list[fx.Node] = []
    fx.map_arg(_sizes_of(node), nodes.append)
    return set().union(*(comes_from.get(x, set()) for x in nodes))
