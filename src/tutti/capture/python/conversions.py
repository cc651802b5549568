"""`float(x)` and `int(x)` of tensors and numbers in the user's code: the read number, as of `x.item()`.

Python demands a plain number of `x.__float__()`, and a trace has none. So during a trace the globals of the
user's functions that call `float` or `int` have another class of this name. It makes plain numbers of
everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.capture.python.known_values import UNKNOWN, known
from tutti.capture.python.read_values import Symbols, refuse_conversion
from tutti.capture.python.symbols import SYMBOLS
from tutti.capture.python.user_globals import in_place_of, like
from tutti.torch_private.fake_tensors import FakeTensor

_CUT = "x.long().item(), which cuts a fraction off"


def _number(x: Any, plain: type) -> Any:
    """`plain(x)`, a symbol for a number that the trace reads."""
    if type(x) is FakeTensor:
        if (answer := known(x, getattr(Tensor, f"__{plain.__name__}__"))) is not UNKNOWN:
            return answer
        if x.is_complex() or (plain is int and x.is_floating_point()):
            refuse_conversion(_CUT)
        x = x.item() if x.is_floating_point() else x.long().item()
    env = x.node.shape_env if isinstance(x, SYMBOLS) else None
    if not isinstance(env, Symbols):
        return plain(x)
    if plain is float and isinstance(x, torch.SymInt | torch.SymFloat):
        return torch.sym_float(x)
    if isinstance(x, torch.SymInt):
        return x
    if env.is_read(x):
        refuse_conversion(_CUT)
    return plain(x)  # type: ignore[arg-type]


_FLOAT = like(float, lambda x: _number(x, float))
_INT = like(int, lambda x: _number(x, int))


@contextlib.contextmanager
def conversions_read(scopes: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[None]:
    """Inside, `float(x)` and `int(x)` in these globals, by name, return the number that the trace reads."""
    with (
        in_place_of("float", _FLOAT, scopes["float"]),
        in_place_of("int", _INT, scopes["int"]),
    ):
        yield
