"""Faster fakes: `FakeTensor` without its checks, and a mode that repeats calls in a quarter of the time.

Why: a trace makes two fakes a node, and most of its calls on fakes equal an earlier one. PyTorch's own cache
of such calls reads 17 properties of each operand, and enters four contexts for each result.
Public: none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.fx.experimental import proxy_tensor

__all__ = ["CONSTANTS", "SNAPSHOTS", "QuickFakeMode", "quick_fake", "snapshot"]

_C: Any = torch._C
_subclass: Any = Tensor._make_subclass
_FORMS = "_forms_of_fakes"
# The types of arguments of which type and value say all that a call depends on.
CONSTANTS = frozenset(
    (
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
# Results of this many calls are known; then all are forgotten.
_MOST = 20_000

# The function that makes the value of a node, a copy of a fake that later writes do not change: its module
# and its name, to patch by `snapshot`.
SNAPSHOTS: tuple[Any, str] = (proxy_tensor, "snapshot_fake")
_plain_snapshot: Any = proxy_tensor.snapshot_fake


def quick_fake(mode: FakeTensorMode, values: Tensor, device: torch.device) -> FakeTensor:
    """The same as `FakeTensor(mode, values, device)`, for `values` on the meta device without a gradient."""
    forms = vars(mode).setdefault(_FORMS, {})
    form = forms.get(device)
    if form is None:
        made = FakeTensor(mode, values, device)
        forms[device] = {k: v for k, v in vars(made).items() if k != "fake_mode"}
        return made
    made = _subclass(
        FakeTensor, values, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        _C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        _C._set_throw_on_mutable_data_ptr(made)
    attributes = made.__dict__
    attributes.update(form)
    attributes["fake_mode"] = mode
    return made


def snapshot(x: Tensor, include_real: bool = False) -> Any:
    """The same as the function of `SNAPSHOTS`."""
    if type(x) is not FakeTensor or x._has_symbolic_sizes_strides or not _is_plain(x):
        return _plain_snapshot(x, include_real)
    with no_python_dispatcher(), in_kernel_invocation_manager(x.fake_mode):
        values = torch.ops.aten.detach.default(x)
    return quick_fake(x.fake_mode, values, x.fake_device)


def _is_plain(x: FakeTensor) -> bool:
    strided = x.layout is torch.strided and not x.is_quantized
    return strided and x.real_tensor is None and not (x.is_conj() or x.is_neg() or x.is_inference())


class _Made(NamedTuple):
    """A result of a call: a new fake, or one in the memory of operand `view_of`."""

    view_of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Operand(NamedTuple):
    """A result that is an operand itself."""

    number: int


class _Unknown(Exception):
    """A call whose result may depend on more than its key holds."""


# By call its results, and whether they are a tuple.
_KNOWN: dict[Any, tuple[list[Any], bool]] = {}


class QuickFakeMode(FakeTensorMode):
    """`FakeTensorMode`, faster where a call without symbols equals an earlier one.

    PyTorch's cache decides which calls may be known: this class keeps its entries by a shorter key, which
    has all that tells two calls without symbols apart.
    """

    _entry: Any = None  # of PyTorch's cache, for the call that runs
    _key: Any = None  # of the call that is about to run
    _settings: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            key = self._quick_key(func, args, kwargs) if self.cache_enabled else None
            known = _KNOWN.get(key)
        except (_Unknown, TypeError):  # symbols have no hash
            key = known = None
        if known is not None:
            results, many = known
            made = [self._result(x, args) for x in results]
            return tuple(made) if many else made[0]
        self._key = key
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        key, self._key = self._key, None
        if key is None:
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        outer, self._entry = self._entry, None
        try:
            result = super()._cached_dispatch_impl(func, types, args, kwargs)
            entry = self._entry
        finally:
            self._entry = outer  # a call runs others
        if entry is not None and (results := _results(entry, func)) is not None:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[key] = results, entry.is_output_tuple
        return result

    def _make_cache_entry(
        self, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any
    ) -> Any:
        self._entry = None
        entry = super()._make_cache_entry(state, key, func, args, kwargs, output)
        self._entry = entry
        return entry

    def _output_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Any
    ) -> Any:
        self._entry = entry
        return super()._output_from_cache_entry(state, entry, key, func, args)

    def _quick_key(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._settings is None:
            env = self.shape_env
            self._settings = () if env is None else (env.settings,)
        key = [
            *(func, torch.get_default_dtype(), _C._get_default_device()),
            *(torch.is_inference_mode_enabled(), self._settings),
        ]
        self._add(key, args)
        for name, x in kwargs.items():
            key.append(name)
            self._add(key, (x,))
        return tuple(key)

    def _add(self, key: list[Any], args: Any) -> None:
        for x in args:
            kind = type(x)
            if kind is FakeTensor:
                if (
                    x.fake_mode is not self
                    or x.constant is not None
                    or x._has_symbolic_sizes_strides
                    or not _is_plain(x)
                ):
                    raise _Unknown
                form = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
                key.append((*form, x.dtype, x.fake_device, x.requires_grad))
            elif kind in CONSTANTS:
                key.append(kind)
                key.append(x)
            elif kind is list or kind is tuple:
                key.append(kind)
                key.append(len(x))
                self._add(key, x)
            else:
                raise _Unknown

    def _result(self, known: Any, args: Any) -> Any:
        if type(known) is _Made:
            view_of, shape, stride, offset, dtype, device = known
            with _C._DisableTorchDispatch():
                if view_of is None:
                    values = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                else:
                    values = torch.empty(0, dtype=dtype, device="meta")
                    values.set_(args[view_of].untyped_storage(), offset, shape, stride)
            return quick_fake(self, values, device)
        return args[known.number] if type(known) is _Operand else known


def _results(entry: Any, func: Any) -> list[Any] | None:
    """The results in an entry of PyTorch's cache; none if one is not plain."""
    found: list[Any] = []
    for info in entry.output_infos:
        form = info.metadata
        if info.inplace_idx is not None:
            found.append(_Operand(info.inplace_idx))
        elif form is None:
            found.append(info.constant_value)
        elif form.layout is not torch.strided or form.requires_grad or form.is_conj or form.is_neg:
            return None
        else:
            view_of = info.view_idx if getattr(func, "is_view", False) else None
            lying = form.shape, form.stride, form.storage_offset
            if not all(type(n) is int for n in (*lying[0], *lying[1], lying[2])):
                return None
            found.append(_Made(view_of, *lying, form.dtype, form.device))
    return found
