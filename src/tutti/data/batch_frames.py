"""A batch as a text (JSON) and the bytes of its tensors, for another rank of the host.

    ("a", tensor of shape [2, 3])   ["tuple", ["a", ["tensor", 0, "float32", 0, [2, 3], [3, 1], false]]]

Tensors keep shape, strides and the memory that they have in common. A text names no class but of a container,
and the reader takes only one that its process has already imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64
_PLAIN = (str, int, float, bool, type(None))
_SEQUENCES, _MAPPINGS = (list, tuple), (dict, OrderedDict)
_NUMBERS = "biufc"  # kinds of NumPy's dtypes
_EMPTY = -1  # the region of tensors without elements
_OF_PYTHON = 1 << 9  # the flag of classes that a `class` statement makes


class NotSendable(Exception):
    """A batch holds something that this format does not; the text says what."""


def packed(batch: Any) -> tuple[dict[str, Any], list[tuple[int, Tensor]]]:
    """What a text says of a batch, as JSON takes it, and the batch's bytes (uint8, 1-D) with their places.

    Raises `NotSendable` for a leaf or a container of another kind, or a tensor of another device or layout.
    """
    packing = _Packing()
    try:
        value = packing.value(batch)
    except RecursionError:
        raise NotSendable("a container that holds itself") from None
    parts, places = packing.regions.placed()
    return {"value": value, "regions": places}, parts


def unpacked(
    said: Mapping[str, Any],
    memory: Tensor,
    *,
    in_place: Callable[[Tensor], bool],
    pin: bool = False,
) -> Any:
    """The batch that `packed` has taken apart.

    Args:
        said: of the batch.
        memory: its bytes; they may change when this returns.
        in_place: for which tensors to give views of `memory` instead of copies.
        pin: copy into page-locked memory.

    Raises:
        NotSendable: this process does not know a container's class.
    """
    return _Unpacking(said["regions"], memory, in_place, pin=pin).value(said["value"])


class _Regions:
    """The parts of storages that tensors lie in, each once, from the first byte in use to the last."""

    def __init__(self) -> None:
        self._spans: dict[Any, list[Any]] = {}  # of a storage: index, storage, begin, end

    def add(self, x: Tensor) -> tuple[int, int]:
        """The index of a tensor's storage, and the tensor's first element there."""
        storage, offset = x.untyped_storage(), int(x.storage_offset())
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        begin, end = offset * x.itemsize, (offset + last + 1) * x.itemsize
        key = storage.data_ptr(), storage.nbytes()
        span = self._spans.setdefault(key, [len(self._spans), storage, begin, end])
        span[2], span[3] = min(span[2], begin), max(span[3], end)
        return span[0], offset

    def placed(self) -> tuple[list[tuple[int, Tensor]], list[list[int]]]:
        """The bytes of each with their places; for the text: place, size, and first byte in the storage."""
        parts, places, low = [], [], 0
        for _, storage, begin, end in self._spans.values():
            begin = begin // _ALIGNED * _ALIGNED
            octets = torch.empty(0, dtype=torch.uint8)
            parts.append((low, octets.set_(storage, begin, (end - begin,), (1,))))
            places.append([low, end - begin, begin])
            low += -(-(end - begin) // _ALIGNED) * _ALIGNED
        return parts, places


class _Packing:
    def __init__(self) -> None:
        self.regions = _Regions()
        self._tensors: dict[int, tuple[int, Tensor]] = {}  # by id; its number, and it lives on

    def value(self, x: Any) -> Any:
        kind = type(x)
        if kind in _PLAIN:
            return x
        if kind is Tensor:
            return self._tensor(x)
        if kind in _SEQUENCES:
            return [kind.__name__, *map(self.value, x)]
        if kind in _MAPPINGS:
            return [kind.__name__, *([self.value(k), self.value(v)] for k, v in x.items())]
        if kind is complex:
            return ["complex", x.real, x.imag]
        if kind is bytes:
            return ["bytes", x.hex()]
        if kind is np.ndarray and x.dtype.kind in _NUMBERS and x.flags.c_contiguous:
            x = x if x.flags.writeable else x.copy()
            said = self._tensor(torch.from_numpy(x.reshape(-1).view(np.uint8)))
            return ["array", said, x.dtype.str, list(x.shape)]
        if isinstance(x, np.generic) and x.dtype.kind in _NUMBERS:
            return ["scalar", x.dtype.str, x.tobytes().hex()]
        return self._of_class(x)

    def _tensor(self, x: Tensor) -> Any:
        if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized:
            raise NotSendable(f"a tensor of layout {x.layout} on {x.device}")
        if x.grad_fn is not None:
            raise NotSendable("a tensor with a history of gradients")
        if id(x) in self._tensors:
            return ["same", self._tensors[id(x)][0]]
        self._tensors[id(x)] = len(self._tensors), x
        grad, x = x.requires_grad, x.detach().resolve_conj().resolve_neg()
        index, offset = self.regions.add(x) if x.numel() else (_EMPTY, 0)
        dtype = str(x.dtype).removeprefix("torch.")
        return ["tensor", index, dtype, offset, list(x.shape), list(x.stride()), grad]

    def _of_class(self, x: Any) -> Any:
        kind = type(x)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _container(name) is not kind:
            raise NotSendable(f"a {kind.__name__}")
        if not issubclass(kind, tuple):
            return ["object", name, *([k, self.value(v)] for k, v in vars(x).items())]
        if getattr(x, "__dict__", None):
            raise NotSendable(f"a {kind.__name__} with attributes of its own")
        return ["named", name, *map(self.value, x)]


class _Unpacking:
    def __init__(
        self, regions: list[list[int]], memory: Tensor, in_place: Callable[..., bool], *, pin: bool
    ) -> None:
        self._regions, self._memory = regions, memory
        self._in_place, self._pin = in_place, pin
        self._copies: dict[int, Tensor] = {}
        self._tensors: list[Tensor] = []
        self._ways = {
            "tensor": self._tensor,
            "same": self._tensors.__getitem__,
            "array": self._array,
            "scalar": lambda dtype, text: np.frombuffer(bytes.fromhex(text), dtype)[0],
            "complex": complex,
            "bytes": bytes.fromhex,
            "named": self._named,
            "object": self._object,
            **{kind.__name__: partial(self._sequence, kind) for kind in _SEQUENCES},
            **{kind.__name__: partial(self._mapping, kind) for kind in _MAPPINGS},
        }

    def value(self, said: Any) -> Any:
        return self._ways[said[0]](*said[1:]) if isinstance(said, list) else said

    def _sequence(self, kind: type, *parts: Any) -> Any:
        return kind(map(self.value, parts))

    def _mapping(self, kind: type, *pairs: Any) -> Any:
        return kind((self.value(k), self.value(v)) for k, v in pairs)

    def _named(self, name: str, *parts: Any) -> Any:
        return tuple.__new__(_known(name), map(self.value, parts))

    def _object(self, name: str, *pairs: Any) -> Any:
        made = object.__new__(_known(name))
        vars(made).update((k, self.value(v)) for k, v in pairs)
        return made

    def _array(self, said: list[Any], dtype: str, shape: list[int]) -> Any:
        return self._tensor(*said[1:], copied=True).numpy().view(dtype).reshape(shape)

    def _tensor(
        self,
        index: int,
        name: str,
        offset: int,
        shape: list[int],
        stride: list[int],
        grad: bool,
        *,
        copied: bool = False,
    ) -> Tensor:
        dtype = getattr(torch, name)
        x = torch.empty(0, dtype=dtype)
        if index == _EMPTY:
            x = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            low, nbytes, begin = self._regions[index]
            offset -= begin // dtype.itemsize
            there = self._memory[low : low + nbytes]
            x.set_(there.untyped_storage(), _elements(there, dtype) + offset, shape, stride)
            if copied or not self._in_place(x):
                there = self._copy(index, there)
                x.set_(there.untyped_storage(), offset, shape, stride)
        x.requires_grad_(grad)
        self._tensors.append(x)
        return x

    def _copy(self, index: int, there: Tensor) -> Tensor:
        found = self._copies.get(index)
        if found is None:
            found = torch.empty(len(there), dtype=torch.uint8, pin_memory=self._pin).copy_(there)
            self._copies[index] = found
        return found


def _elements(octets: Tensor, dtype: torch.dtype) -> int:
    """The first byte of a tensor in its storage, in elements of another dtype."""
    return octets.storage_offset() // dtype.itemsize


def _container(name: str) -> type | None:
    """A class of containers that this process has imported; None for any other name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        return None
    if issubclass(found, tuple):
        return found if hasattr(found, "_fields") else None
    if not dataclasses.is_dataclass(found) and not issubclass(found, UserDict):
        return None
    # One whose content is in its `__dict__` alone.
    bases = [c for c in found.__mro__ if c is not object]
    plain = all(c.__flags__ & _OF_PYTHON and not c.__dict__.get("__slots__") for c in bases)
    return found if plain else None


def _known(name: str) -> type:
    found = _container(name)
    if found is None:
        raise NotSendable(f"a {name}, which this process does not know")
    return found
