"""A rank's part of a state tensor between steps: runs elementwise ops on parts and refuses all others.

A `DTensor` returns a partial sum if the user reads a number, draws other random numbers than one device, and
ignores `p.data = value`. A `StateShard` is a `DTensor` that runs elementwise ops (on this rank's part of a
whole operand) and copies; an op that needs the other ranks' parts raises a `TuttiError`: if only some ranks
called it, they would wait for the others. `full_tensor`, `redistribute` and `to_local` are unchanged.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from tutti.errors import TuttiError
from tutti.quantities import format_nbytes
from tutti.torch_private.dtensors import (
    AnsweringDTensor,
    local_part,
    made_of,
    set_local_part,
    spec_of,
    spec_with_dtype,
    without_advice,
)
from tutti.torch_private.op_tables import schema_of
from tutti.torch_private.pytrees import tree_leaves, tree_map
from tutti.user_lines import is_users, program_line, quoted

# Ops of one operand whose result on a part depends on no other part; all others must be elementwise.
_COPIES = frozenset(
    f"{name}{ending}"
    for name in ("copy", "fill", "zero", "masked_fill", "nan_to_num", "detach")
    for ending in ("", "_")
) | {"alias", "clone", "_to_copy", "lift_fresh", "resolve_conj", "resolve_neg"}
_LIKE = frozenset(["empty_like", "zeros_like", "ones_like", "full_like"])
_NOT_ELEMENTWISE = frozenset(["equal", "_foreach_norm", "_foreach_max"])


@dataclass(frozen=True)
class Origin:
    """The name of a shard's state tensor, the bytes of the model's sharded state, and its residence.

    A copy of a shard has the same origin.
    """

    name: str
    nbytes: int
    home: weakref.ref[Any]


class StateShard(AnsweringDTensor):
    """This rank's part of a state tensor."""

    __slots__ = ()
    origin: Origin  # of what was computed there is none

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _unguarded:
            return _as_dtensors(func, args, kwargs)
        return _on_parts(func, args, kwargs)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The shard without autograd; the setter cuts a whole or sharded value to this rank's part."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        given = value.detach()
        if tuple(given.shape) != tuple(self.shape):
            refuse(self, "data = ... of another shape")
        set_local_part(self, _operand(given, self, "data = ...").contiguous().clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        if id(self) in memo:
            return memo[id(self)]
        local = local_part(self).detach().clone()
        made: Any = wrap(local, spec_of(self), origin_of(self))
        if isinstance(self, nn.Parameter):
            made = as_parameter(made, self.requires_grad)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in made.__dict__})
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, "a file or a message")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: an array of the whole tensor is available inside `whole`."""
        refuse(self, "numpy")

    def tolist(self) -> NoReturn:
        """Refused, as `numpy`."""
        refuse(self, "tolist")

    def full_tensor(self, **options: Any) -> Tensor:
        """The whole tensor, on the ranks of its pipeline rank, which call together."""
        self._refuse_elsewhere()
        return super().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """The tensor in another sharding, on the ranks of its pipeline rank, which call together."""
        self._refuse_elsewhere()
        with without_advice():
            return super().redistribute(*args, **options)

    def _refuse_elsewhere(self) -> None:
        if self.device_mesh.get_coordinate() is None:
            refuse(self, "another pipeline rank")

    def data_ptr(self) -> int:
        """The address of this rank's part; refused to code that would read all of it there (safetensors)."""
        caller = sys._getframe(1).f_code.co_filename
        if local_part(self).shape != self.shape and is_users(caller):
            refuse(self, "a reader of its memory")
        return local_part(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of this rank's part."""
        return local_part(self).untyped_storage()

    def share_memory_(self) -> NoReturn:
        """Refused, as `numpy`."""
        refuse(self, "memory of several processes")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self, "numpy")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(this rank's {list(local_part(self).shape)} of {list(self.shape)})"


_unguarded = False


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Inside, shards are ordinary `DTensor`s: all ranks do the same here."""
    global _unguarded
    before, _unguarded = _unguarded, True
    try:
        yield
    finally:
        _unguarded = before


def wrap(local: Tensor, spec: Any, origin: Origin | None = None) -> StateShard:
    """`local` as this rank's part of the tensor of `spec`."""
    made: Any = made_of(StateShard, local, spec)
    if origin is not None:
        made.origin = origin
    return made


def as_parameter(shard: StateShard, requires_grad: bool) -> Any:
    """A parameter of the same memory and origin."""
    made: Any = nn.Parameter(shard, requires_grad=requires_grad)
    if (origin := origin_of(shard)) is not None:
        made.origin = origin
    return made


def origin_of(x: Tensor) -> Origin | None:
    """The origin of `x`; None for a computed tensor."""
    return x.__dict__.get("origin")


def plain_dtensor(x: Tensor) -> Tensor:
    """A shard as an ordinary `DTensor` of the same memory, without autograd; any other tensor unchanged."""
    if not isinstance(x, StateShard):
        return x.detach()
    return made_of(DTensor, local_part(x).detach(), spec_of(x))


def refuse(x: Tensor, wanted: str) -> NoReturn:
    """Raise the `TuttiError` for a use of `x` that needs all of it."""
    origin = origin_of(x)
    name = f'"{origin.name}"' if origin is not None else "what is computed of shards"
    block = "whole(slots=True)" if name.startswith('"optim.') else "whole()"
    local = local_part(x) if isinstance(x, DTensor) else x
    more = f"; {format_nbytes(origin.nbytes)} more on this rank" if origin is not None else ""
    part = f"this rank has {list(local.shape)} of {list(x.shape)}"
    if local.shape == x.shape:
        part = "each rank has some of the weights"
    raise TuttiError(
        f"{name} is in shards between steps, and {wanted} needs all of it",
        at=quoted(program_line()),
        why=f"{part}; only elementwise operations are the same on parts",
        fix=f"with step.{block}: ... (as tutti.whole(model){more}); step.model_state() or step.save(path) "
        "for a file; tutti.distribute(evaluate, model) for an evaluation",
    )


def cut(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor with the sharding of `like`; its dims divide."""
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:  # another pipeline rank has it
        return whole.new_empty(local_part(like).shape)
    for at, placement, size in zip(
        coordinate, like.placements, like.device_mesh.shape, strict=True
    ):
        if isinstance(placement, Shard):
            part = whole.shape[placement.dim] // size
            whole = whole.narrow(placement.dim, at * part, part)
    return whole


def _on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Play an elementwise operation on this rank's parts; raises `TuttiError` for any other."""
    name = func.overloadpacket.__name__
    shard = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, StateShard))
    if not _elementwise(func, name):
        refuse(shard, name)
    if isinstance(args[0], Sequence):
        return _on_lists(func, args, kwargs, name)
    like = _like([x for x in tree_leaves((args, kwargs)) if isinstance(x, StateShard)], name)
    if schema_of(func).is_mutable and not isinstance(args[0], StateShard):
        refuse(shard, f"{name} into a whole tensor")
    given, options = tree_map(
        lambda x: _operand(x, like, name) if isinstance(x, Tensor) else x, (args, kwargs)
    )
    found = func(*given, **options)
    if schema_of(func).is_mutable:
        return args[0]
    if not isinstance(found, Tensor) or found.shape != local_part(like).shape:
        refuse(shard, name)
    return wrap(found, _spec_of(like, found), origin_of(like) if name == "detach" else None)


def _elementwise(func: Any, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags or name in _NOT_ELEMENTWISE:
        return False
    return (
        torch.Tag.pointwise in func.tags or name in _COPIES | _LIKE or name.startswith("_foreach_")
    )


def _on_lists(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The same for an operation on lists, of which some members may be whole."""
    likes = _likes(args)
    given, options = ([_of_list(x, likes, name) for x in xs] for xs in (args, kwargs.values()))
    found = func(*given, **dict(zip(kwargs, options, strict=True)))
    if schema_of(func).is_mutable:
        return None
    both = zip(found, likes, strict=True)
    return [x if like is None else wrap(x, _spec_of(like, x)) for x, like in both]


def _likes(args: Any) -> list[StateShard | None]:
    """The shard of each member of an operation on lists; None for a whole one."""
    found: list[StateShard | None] = []
    for members in zip(*(a for a in args if _is_list_of_tensors(a)), strict=True):
        shards = [x for x in members if isinstance(x, StateShard)]
        if shards and not isinstance(members[0], StateShard):
            refuse(shards[0], "an operation into a whole tensor")
        found.append(_like(shards, "an operation") if shards else None)
    return found


def _is_list_of_tensors(x: Any) -> bool:
    return isinstance(x, Sequence) and all(isinstance(y, Tensor) for y in x)


def _of_list(given: Any, likes: list[StateShard | None], name: str) -> Any:
    if not _is_list_of_tensors(given):
        return given
    both = zip(given, likes, strict=True)
    return [x if like is None else _operand(x, like, name) for x, like in both]


def _like(shards: list[StateShard], name: str) -> StateShard:
    """The shard of largest shape, whose sharding the others must match."""
    like = max(shards, key=lambda x: (x.dim(), x.numel()))
    for x in shards:
        same = x.shape == like.shape and x.device_mesh == like.device_mesh
        if not same or x.placements != like.placements:
            refuse(x, f"{name} with a tensor of another sharding")
    return like


def _operand(x: Tensor, like: StateShard, name: str) -> Tensor:
    """An operand's part, in the sharding of `like`."""
    if isinstance(x, DTensor):
        same = x.device_mesh == like.device_mesh and x.placements == like.placements
        if not same or x.shape != like.shape or any(isinstance(p, Partial) for p in x.placements):
            refuse(like, f"{name} with a tensor of another sharding")
        return local_part(x)
    if not x.dim():
        return x
    try:
        return cut(x.expand(like.shape), like)
    except RuntimeError:
        refuse(like, f"{name} with a tensor of shape {list(x.shape)}")


def _spec_of(like: StateShard, local: Tensor) -> Any:
    """The spec of a result with the sharding of `like`."""
    if local.dtype == like.dtype:
        return spec_of(like)
    return spec_with_dtype(spec_of(like), local.dtype)


def _as_dtensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op as PyTorch's own `DTensor`s do; results are shards, too."""

    def plain(x: Any) -> Any:
        if not isinstance(x, StateShard):
            return x
        return made_of(DTensor, local_part(x), spec_of(x), requires_grad=x.requires_grad)

    given, options = tree_map(plain, (args, kwargs))
    found = func(*given, **options)
    if schema_of(func).is_mutable and args and found is given[0]:
        return args[0]
    return tree_map(
        lambda x: wrap(local_part(x), spec_of(x)) if isinstance(x, DTensor) else x, found
    )
