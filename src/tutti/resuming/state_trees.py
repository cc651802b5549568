"""State dicts as JSON and named tensors, equal in values and types when read again, without pickles.

    {"lr": 0.1, "seen": (3, None)}   ->   {"lr": 0.1, "seen": {"!": "tuple", "of": [3, null]}}

Plain JSON values stay as they are. Every other value is an object with its kind under "!"; a tensor names an
entry of the tensors beside the tree.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.checkpoint.manifest import dtype_name, dtype_of
from tutti.errors import CheckpointError
from tutti.state.residence import is_here
from tutti.state.shards import plain_dtensor

KIND, CONTENT = "!", "of"
_SAFE_INT = 2**63  # other programs that read JSON keep no larger ones
_ALLOWED = (
    "None, numbers, texts, bytes, tuples, lists, dicts, sets, NumPy values, torch tensors, dtypes"
)
_FIX = "leave it out of the state dict, or keep it as one of the values that can be saved"


class TreeWriter:
    """Encodes the states of one save.

    Args:
        prefix: of the names of tensors.

    Attributes:
        tensors: by name, in the order of the trees.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._open: list[int] = []  # the containers around the current value
        self.tensors: dict[str, Tensor] = {}

    def write(self, value: Any, path: str) -> Any:
        """The JSON of a value.

        Args:
            path: the name of the value in errors; keys are appended to it.

        Raises:
            CheckpointError: something in it is no state, such as a function; names its keys.
        """
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) < _SAFE_INT else _tagged("int", hex(value))
        if type(value) is float:
            return value if math.isfinite(value) else _tagged("float", str(value))
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        if type(value) in _WORDS:
            return _tagged(type(value).__name__, _WORDS[type(value)][0](value))
        if id(value) in self._open:
            raise _refusal(path, "it contains itself")
        self._open.append(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.pop()

    def _container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is list:
            return [self.write(x, f"{path}[{k}]") for k, x in enumerate(value)]
        if kind in (tuple, set, frozenset):
            items = [self.write(x, f"{path}[{k}]") for k, x in enumerate(value)]
            return _tagged(kind.__name__, items)
        if kind is dict and KIND not in value and all(type(key) is str for key in value):
            return {key: self.write(x, f"{path}[{key!r}]") for key, x in value.items()}
        if kind in (dict, OrderedDict, Counter):
            items = [
                [self.write(key, f"a key of {path}"), self.write(x, f"{path}[{key!r}]")]
                for key, x in value.items()
            ]
            return _tagged(kind.__name__, items)
        raise _refusal(path, f"it is of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, x: Tensor, path: str) -> Any:
        if type(x) not in _TENSORS and not isinstance(x, DTensor):
            raise _refusal(path, f"it is a tensor of type {type(x).__qualname__}")
        if x.layout is not torch.strided or x.is_quantized or x.is_meta:
            raise _refusal(path, f"it is a tensor with layout {x.layout} on device {x.device}")
        if not is_here(x):
            raise _refusal(path, "another pipeline rank keeps all of it")
        name = f"{self._prefix}{len(self.tensors)}"
        self.tensors[name] = plain_dtensor(x) if isinstance(x, DTensor) else x.detach()
        form = {"name": name, "shape": list(x.shape), "dtype": dtype_name(x.dtype)}
        return {KIND: "tensor", **form, "device": x.device.type}

    def _array(self, x: Any, path: str) -> Any:
        """An array or a scalar of NumPy: its bytes are a tensor, whatever its dtype."""
        if x.dtype.hasobject or x.dtype.fields or type(x) not in (np.ndarray, x.dtype.type):
            raise _refusal(path, f"it is an array of type {type(x).__name__}, dtype {x.dtype}")
        content = base64.b64encode(x.tobytes()).decode() if isinstance(x, np.generic) else ""
        form = {KIND: "numpy", "dtype": x.dtype.str}
        if isinstance(x, np.generic):
            return {**form, CONTENT: content}
        flat = torch.from_numpy(np.frombuffer(x.tobytes(), np.uint8).copy())
        return {**form, "shape": list(x.shape), CONTENT: self._tensor(flat, path)}


class TreeReader:
    """Decodes the states of one checkpoint.

    Args:
        tensors: by name, of all trees; see `forms_in`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, tree: Any) -> Any:
        """The value of a tree. Raises `CheckpointError` for anything that `TreeWriter` does not write."""
        try:
            return self._read(tree)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(f"{type(error).__name__}: {error}") from error

    def _read(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self._read(x) for x in tree]
        if not isinstance(tree, dict):
            return tree
        if KIND not in tree:
            return {key: self._read(x) for key, x in tree.items()}
        kind = tree[KIND]
        content: Any = tree.get(CONTENT)
        if kind == "tensor":
            return self._tensors[tree["name"]]
        if kind == "numpy":
            return self._array(tree)
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](self._read(x) for x in content)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]((self._read(key), self._read(x)) for key, x in content)
        return _READERS[kind](content)

    def _array(self, tree: Any) -> Any:
        dtype = np.dtype(tree["dtype"])
        if dtype.hasobject:
            raise ValueError(f"an array of dtype {dtype}")
        if "shape" not in tree:
            return np.frombuffer(base64.b64decode(tree[CONTENT]), dtype)[0]
        raw = self._read(tree[CONTENT]).cpu().numpy().tobytes()
        return np.frombuffer(raw, dtype).reshape(tree["shape"]).copy()


def forms_in(tree: Any) -> dict[str, Tensor]:
    """Empty tensors for every tensor that a tree names, to read into.

    They are on the CPU, or on the device of the kind that they had, if there is one.
    """
    found: dict[str, Tensor] = {}
    try:
        _find_forms(tree, found)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unreadable(f"{type(error).__name__}: {error}") from error
    return found


def _find_forms(tree: Any, found: dict[str, Tensor]) -> None:
    if isinstance(tree, dict) and tree.get(KIND) == "tensor":
        dtype = dtype_of(tree["dtype"])
        device = "cuda" if tree["device"] == "cuda" and torch.cuda.is_available() else "cpu"
        found[tree["name"]] = torch.empty(tree["shape"], dtype=dtype, device=device)
    elif isinstance(tree, dict | list):
        for x in tree.values() if isinstance(tree, dict) else tree:
            _find_forms(x, found)


def tensors_beside(tree: Any, value: Any, found: dict[str, Tensor]) -> None:
    """Note in `found` the tensors of `value`, a current state, at the places of tensors of `tree`."""
    if isinstance(tree, dict) and tree.get(KIND) == "tensor":
        if isinstance(value, Tensor) and list(value.shape) == tree["shape"]:
            found[tree["name"]] = value
    elif isinstance(tree, dict) and KIND not in tree and isinstance(value, dict):
        for key in tree.keys() & value.keys():
            tensors_beside(tree[key], value[key], found)
    elif isinstance(tree, dict) and tree.get(KIND) in _MAPPINGS and isinstance(value, dict):
        for key, x in tree[CONTENT]:
            if isinstance(key, str | int):
                tensors_beside(x, value.get(key), found)
    elif isinstance(tree, dict) and tree.get(KIND) == "tuple" and isinstance(value, tuple):
        for x, y in zip(tree[CONTENT], value, strict=False):
            tensors_beside(x, y, found)
    elif isinstance(tree, list) and isinstance(value, list):
        for x, y in zip(tree, value, strict=False):
            tensors_beside(x, y, found)


def unreadable(why: str) -> CheckpointError:
    """The error for a tree that no save has written."""
    return CheckpointError(
        "the states in the checkpoint cannot be read", why=why, fix="use an earlier checkpoint"
    )


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {KIND: kind, CONTENT: content}


def _refusal(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be saved", why=f"{why}; {_ALLOWED} can", fix=_FIX)


_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# By type: its text, and the value of the text.
_WORDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (lambda x: base64.b64encode(x).decode(), base64.b64decode),
    complex: (lambda x: [x.real.hex(), x.imag.hex()], lambda x: complex(*map(float.fromhex, x))),
    torch.dtype: (dtype_name, dtype_of),
    torch.device: (str, torch.device),
    torch.Size: (list, torch.Size),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: read for kind, (_, read) in _WORDS.items()},
    "int": lambda text: int(text, 16),
    "float": float,
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}
