"""The scalars of what a step returns: its loss, and a few more.

return loss                              loss
return {"loss": loss, "accuracy": a}     loss, accuracy
return logits, loss                      value 1
return output                            output.loss (a dataclass, a named tuple, an output of transformers)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

MOST_SCALARS, MOST_DEPTH, MOST_LOOKED_AT = 4, 3, 64
Path = tuple[Any, ...]


class ReturnedScalars:
    """Finds the scalars of a step's results once, and reads them from each later result of this form."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._paths: tuple[Path, ...] = ()
        self._type: type | None = None

    def forget(self) -> None:
        """Search the next result anew: it may have another form."""
        self._type = None

    def of(self, result: Any) -> list[Any]:
        """The scalars of a result, by `names`: floats, and tensors of one number."""
        if type(result) is self._type:
            try:
                found = [_at(result, path) for path in self._paths]
            except (KeyError, IndexError, AttributeError, TypeError):
                found = [None]
            if all(map(is_scalar, found)):
                return found
        self._search(result)
        return [_at(result, path) for path in self._paths]

    def _search(self, result: Any) -> None:
        seen = [(path, x) for path, x in _walk(result, (), 0) if is_scalar(x)]
        named = [(_name(path), path) for path, _ in seen]
        named.sort(key=lambda entry: (entry[0] != "loss", "loss" not in entry[0].lower()))
        chosen = named[:MOST_SCALARS]
        self.names, self._paths = tuple(n for n, _ in chosen), tuple(p for _, p in chosen)
        self._type = type(result)


def is_scalar(x: Any) -> bool:
    """Whether it is a floating-point number, or a tensor of one."""
    if isinstance(x, Tensor):
        return x.numel() == 1 and x.is_floating_point()
    return isinstance(x, float)


def _name(path: Path) -> str:
    if not path:
        return "loss"  # a step that returns one number returns its loss
    words = [f"value {key}" if isinstance(key, int) else str(key) for key, _ in path]
    return ".".join(words)[:60]


def _at(result: Any, path: Path) -> Any:
    for key, is_attribute in path:
        result = getattr(result, key) if is_attribute else result[key]
    return result


def _walk(x: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    if isinstance(x, Tensor | float) or depth == MOST_DEPTH:
        yield path, x
        return
    for key, is_attribute, value in _parts(x):
        yield from _walk(value, (*path, (key, is_attribute)), depth + 1)


def _parts(x: Any) -> Iterator[tuple[Any, bool, Any]]:
    """The keys or attributes of a container, whether they are attributes, and their values."""
    if isinstance(x, Mapping):
        yield from ((k, False, x[k]) for k in list(x)[:MOST_LOOKED_AT])
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from ((k, True, getattr(x, k)) for k in x._fields[:MOST_LOOKED_AT])  # type: ignore[attr-defined]
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        yield from ((i, False, v) for i, v in enumerate(x[:MOST_LOOKED_AT]))
    elif is_dataclass(x):
        yield from ((f.name, True, getattr(x, f.name)) for f in fields(x)[:MOST_LOOKED_AT])
