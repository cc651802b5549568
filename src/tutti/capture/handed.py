"""Arguments that a step gets as they are, since its Python changes them or calls them.

    step(x, y, log)      log["loss"] = loss.item()
    step(x, y, meter)    meter.update(loss.item())

A step gets most arguments rebuilt from their leaves, so a change of a container would be lost. These are
among what the step reaches in Python (`capture.python.reach`) instead: objects and functions without tensors,
and the lists and dicts of plain values that a trace has seen the step change.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.capture.forms import Attribute, entries_of, is_container
from tutti.capture.keywords import Keywords
from tutti.capture.python.left_values import computed_from
from tutti.capture.python.plain_values import equal
from tutti.capture.python.reach import OF_TRAINING, PLAIN, has_attributes, is_library, is_users
from tutti.capture.unread import is_unread, value_now
from tutti.errors import CaptureError
from tutti.torch_private.pytrees import tree_leaves, tree_map_only
from tutti.user_lines import quoted, user_line

Batch = tuple[Any, ...]
Path = tuple[Any, ...]  # the keys of items, and `Attribute`s
Place = int | str  # the position of an argument behind the model and the optimizer, or its name
Name = Callable[[Place], str]


class Handed:
    """The leaf of such an argument: the same at each call; `value` is the argument of the current one."""

    __slots__ = ("_held", "name")

    def __init__(self, name: str, held: Mapping[str, Any]) -> None:
        self.name, self._held = name, held

    @property
    def value(self) -> Any:
        return self._held[self.name]

    @property
    def held(self) -> Mapping[str, Any]:
        """All such arguments of the call, by name."""
        return self._held

    def __eq__(self, other: object) -> bool:
        return type(other) is Handed and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"the argument {self.name}"


class ArgumentsAhead(CaptureError):
    """Ends a capture: the step must get the arguments at these places as they are."""

    def __init__(self, places: Collection[Place]) -> None:
        what = f"the step changes its arguments {', '.join(map(str, places))} in Python"
        super().__init__(what, fix="hand them over with `with_arguments`")
        self.places = frozenset(places)


def handed_over(batch: Batch, places: Collection[Place], held: dict[str, Any], name: Name) -> Batch:
    """`batch` with a `Handed` at each of these places; `held` gets the arguments, by name."""
    held.clear()

    def one(place: Place, x: Any) -> Any:
        if place not in places or type(x) is Handed:
            return x
        own = name(place)
        held[own] = x
        return Handed(own, held)

    if not places:
        return batch
    made = [one(i, x) for i, x in enumerate(batch) if type(x) is not Keywords]
    if batch and type(batch[-1]) is Keywords:
        made.append(Keywords({k: one(k, x) for k, x in batch[-1].items()}))
    return tuple(made)


def unpacked(batch: Sequence[Any]) -> list[Any]:
    """The arguments of a batch as the step gets them."""
    made = [x.value if type(x) is Handed else x for x in batch]
    if made and type(made[-1]) is Keywords:
        own = made[-1].items()
        made[-1] = Keywords({k: x.value if type(x) is Handed else x for k, x in own})
    return made


def arguments_of(batch: Sequence[Any]) -> Mapping[str, Any]:
    """By name, the arguments that the step gets as they are."""
    return next((x.held for _, x in arguments_in(batch) if type(x) is Handed), {})


def rebuilt(batch: Batch) -> Batch:
    """`batch` with other containers, for a call that must not change the given ones."""
    return tree_map_only(Tensor, lambda x: x, batch)


def objects_in(batch: Batch) -> frozenset[Place]:
    """The places of objects and functions, and of containers of some, without tensors."""
    found = [place for place, x in arguments_in(batch) if type(x) not in _LEAVES and _is_object(x)]
    return frozenset(found)


_LEAVES = frozenset({Tensor, Handed, *PLAIN})


def is_batch(x: Any) -> bool:
    """Whether an argument is a tensor, or a plain container with one at hand: nearly all are."""
    kind = type(x)
    inside = x.values() if kind is dict else x if kind in (tuple, list) else ()
    return kind is Tensor or any(type(y) is Tensor for y in inside)


def _is_object(x: Any) -> bool:
    if is_batch(x):
        return False
    if isinstance(x, OF_TRAINING):
        return True
    leaves = tree_leaves(x)
    if not isinstance(x, dict | list | tuple) and any(map(_is_trained, leaves)):
        return True  # a trainer
    return not any(isinstance(y, Tensor) for y in leaves) and any(map(_has_code, leaves))


def _is_trained(x: Any) -> bool:
    return isinstance(x, nn.Module | Optimizer)


def kinds_in(batch: Sequence[Any]) -> list[type]:
    """The classes of the containers in a batch, without those of Python and PyTorch; in order."""
    every = (x for _, argument in arguments_in(batch) for _, x in by_path(argument))
    found = dict.fromkeys(type(x) for x in every if is_container(x))
    return [kind for kind in found if is_users(kind.__module__)]


def has_state(x: Any, path: Path) -> bool:
    """Whether a place in an argument is in an object of the user's program, as in an average of weights:
    a change of its tensors is no change of a batch."""
    return any(_is_stateful(one, library=False) for one in _on(x, path))


def holds_written(x: Any, written: Tensor) -> bool:
    """Whether an argument holds a tensor, which the step writes in place, as state: in an object that has no
    items, or as a number among plain values."""
    path = next((path for path, y in by_path(x) if y is written), ())
    if any(_is_stateful(one, library=True) for one in _on(x, path)):
        return True
    return bool(path) and all(y.dim() == 0 for y in tree_leaves(x) if isinstance(y, Tensor))


def _on(x: Any, path: Path) -> Iterator[Any]:
    """The containers on the way to a place."""
    for k in range(len(path)):
        with contextlib.suppress(AttributeError, LookupError, TypeError):
            yield _inside(x, path[:k])


def _is_stateful(x: Any, *, library: bool) -> bool:
    plain = isinstance(x, (Tensor, dict, list, tuple)) or dataclasses.is_dataclass(x)
    if plain or not has_attributes(x):
        return False
    return not hasattr(x, "__getitem__") if library else not is_library(type(x).__module__)


def _has_code(x: Any) -> bool:
    """Whether a leaf is an object with attributes that the step may change, or a function."""
    if isinstance(x, PLAIN):
        return False
    functions = types.FunctionType, types.MethodType, functools.partial, nn.Module
    return isinstance(x, functions) or (not isinstance(x, type) and has_attributes(x))


def arguments_in(batch: Sequence[Any]) -> Iterator[tuple[Place, Any]]:
    """The arguments of a batch, each with its place."""
    for i, x in enumerate(batch):
        if type(x) is Keywords:
            yield from x.items()
        else:
            yield i, x


class Containers:
    """The containers among the arguments of a trace, as they are before the step."""

    def __init__(self, batch: Sequence[Any]) -> None:
        self._given = [
            (place, x, dict(by_path(x)))
            for place, x in arguments_in(batch)
            if not isinstance(x, (Tensor, Handed, *PLAIN))
        ]
        self._objects = [
            (place, inner, _Attributes(inner))
            for place, _, before in self._given
            for inner in before.values()
            if _has_code(inner) and not isinstance(inner, nn.Module) and hasattr(inner, "__dict__")
        ]
        self._other_objects = set[Place]()

    def put_back(self) -> None:
        """Restore the objects in containers, which are those of the caller."""
        for place, inner, attributes in self._objects:
            if attributes.put_back(inner):
                self._other_objects.add(place)

    def changes(self, weights: Sequence[Tensor]) -> Changes:
        """What the step has changed in containers with tensors.

        Raises `ArgumentsAhead` if it has changed others, or keeps state in one: a tensor computed from the
        one before and from `weights`, as the hidden state of a recurrent network.
        """
        plain, found = set(self._other_objects), Changes()
        for place, x, before in self._given:
            now = dict(by_path(x))
            if any(isinstance(y, Tensor) for y in before.values()):
                found.add(place, before, now)
                lost = [now[path] for at, path in found.lost if at == place and path in before]
                tensors = [y for y in lost if isinstance(y, Tensor)]
                in_objects = any(at == place and has_state(x, path) for at, path in found.lost)
                if in_objects or any(computed_from(y, weights) for y in tensors):
                    plain.add(place)
            elif before.keys() != now.keys() or not all(_is_same(before[k], now[k]) for k in now):
                plain.add(place)
        if plain:
            raise ArgumentsAhead(plain)
        return found


class _Attributes:
    """The attributes of an object, and what is in those that are lists, dicts and sets."""

    def __init__(self, x: Any) -> None:
        self._held = dict(vars(x))
        self._inside = {k: copy.copy(v) for k, v in vars(x).items() if type(v) in _COPIED}

    def put_back(self, x: Any) -> bool:
        """Restore them; whether one has changed."""
        now = vars(x)
        same = now.keys() == self._held.keys() and all(now[k] is v for k, v in self._held.items())
        if not same:
            now.clear()
            now.update(self._held)
        for key, before in self._inside.items():
            value = self._held[key]
            if _ids(value) != _ids(before):
                same = False
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(before)
        return not same


_COPIED = (list, dict, set, deque)


def _ids(x: Any) -> list[int]:
    values = [*x, *x.values()] if isinstance(x, dict) else x
    return [*map(id, values)]


@dataclass
class Changes:
    """The changes of a step in containers with tensors.

    Args:
        written: plain values: the place of the argument, the path in it, and the value.
        removed: the place and path of items that the step has removed from dicts.
        lost: places and paths of other changes that a further call with the same container would see: the
            step computes a tensor from the one in its place, or adds it to a list.
    """

    written: list[tuple[Place, Path, Any]] = field(default_factory=list)
    removed: list[tuple[Place, Path]] = field(default_factory=list)
    lost: list[tuple[Place, Path]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.written or self.removed or self.lost)

    def add(self, place: Place, before: Mapping[Path, Any], now: Mapping[Path, Any]) -> None:
        """Note the changes of an argument, given by the path of each value."""
        for path, value in now.items():
            parent, old = before.get(path[:-1]), before.get(path, _NOTHING)
            if not path or (path not in before and parent is None):
                continue  # the argument, or in a container that the step has made
            if _is_same(old, value) or (is_container(value) and is_container(old)):
                continue
            in_list = isinstance(parent, list | deque)
            is_own = _is_kept(path, before, now) and not isinstance(parent, tuple)
            if (isinstance(value, PLAIN) or is_unread(value)) and is_own:
                self.written.append((place, path, value))
            elif (path not in before and in_list) or (path in before and _is_other(old, value)):
                self.lost.append((place, path))
        for path in before.keys() - now.keys():
            if isinstance(before.get(path[:-1]), list | deque):
                self.lost.append((place, path))
            elif _is_kept(path, before, now) and not isinstance(path[-1], Attribute):
                self.removed.append((place, path))

    def loses(self, place: Place) -> bool:
        """Whether a change of the argument at a place is lost."""
        return any(at == place for at, _ in self.lost)

    def write(self, batch: Batch) -> None:
        """Write the plain values into the arguments of a call, and remove what the step has removed."""
        given = dict(arguments_in(batch))
        for place, path, value in self.written:
            _put(given[place], path, value_now(value))
        for place, path in self.removed:
            _inside(given[place], path[:-1]).pop(path[-1], None)


_NOTHING = object()


def _is_kept(path: Path, before: Mapping[Path, Any], now: Mapping[Path, Any]) -> bool:
    """Whether the containers on the way to a place are those of before; one that the step has replaced is
    still the caller's."""
    return all(before[path[:k]] is now.get(path[:k], _NOTHING) for k in range(len(path)))


def _inside(x: Any, path: Path) -> Any:
    for key in path:
        x = getattr(x, key.name) if isinstance(key, Attribute) else x[key]
    return x


def _put(x: Any, path: Path, value: Any) -> None:
    held, key = _inside(x, path[:-1]), path[-1]
    if isinstance(key, Attribute):
        setattr(held, key.name, value)
    elif isinstance(held, list | deque) and key >= len(held):
        held.append(value)
    else:
        held[key] = value


def by_path(x: Any, path: Path = (), outer: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """A container and all that is in it, each with its path; `outer` are the ids of the containers around it,
    to which its parts may refer."""
    if not is_container(x):
        yield path, x
    elif id(x) not in outer:
        yield path, x
        for key, inner in entries_of(x):
            yield from by_path(inner, (*path, key), (*outer, id(x)))


def path_text(path: Path) -> str:
    """As Python writes it behind the name of the argument: `["idx"]`, `.indices`."""
    parts = (
        f".{key.name}"
        if isinstance(key, Attribute)
        else f'["{key}"]'
        if isinstance(key, str)
        else f"[{key!r}]"
        for key in path
    )
    return "".join(parts)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or equal(a, b)


def _is_other(old: Any, new: Any) -> bool:
    """Whether a value in the place of another one may differ from the one that a further call puts there."""
    both = isinstance(old, Tensor) and isinstance(new, Tensor)
    return computed_from(new, [old]) if both else True


def refused_again(name: str) -> CaptureError:
    """The error for a container with tensors that a step has changed, and gets once more."""
    return CaptureError(
        f"the step has changed its argument {name}, and gets the same one again",
        at=quoted(user_line()),
        why="it changes a copy in each call: the tensors of a batch lie on the ranks in parts",
        fix=f"a copy in the step, {name} = dict({name}) or copy.copy({name}); for state of the step a "
        "value that it returns",
    )
