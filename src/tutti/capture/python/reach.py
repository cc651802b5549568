"""The Python values that a step reaches from its function: by closures, globals, attributes, dicts and lists.

The search runs no code. Code has the names of the globals and attributes that it reads. From the step's code
on, the search follows functions of these names, and reads these attributes of users' objects:

    def train_step(...):  trainer.beta * loss(x)     trainer -> "beta", "loss" of it -> the code of loss

It returns tables, holders of values by key. Modules count with all their attributes.
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti import errors
from tutti.capture.python.held_values import CELL, ITEM, MEMBER, SCOPE, SLOT, Table, plain_sequence
from tutti.capture.state.first_step import is_pure_wrapper
from tutti.capture.state.lift import is_scheduled, names_of
from tutti.capture.state.optimizer_copies import own_step
from tutti.capture.state.tensor_attributes import NOT_OF_USERS, user_attributes
from tutti.torch_private.module_tables import (
    buffers_of,
    children_of,
    hooks_of_module,
    hooks_of_tensor,
    parameters_of,
)
from tutti.torch_private.optimizer_marks import MARKS, hooks_of_optimizer

# Values to compare, without a search inside.
PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device)
# Types whose every attribute counts: their own code reads them.
OF_TRAINING = (LRScheduler, torch.amp.GradScaler)
_WHOLE = (*OF_TRAINING, types.SimpleNamespace, argparse.Namespace)
# Attributes of a configuration that a save of Hugging Face writes for a later load.
_OF_FILES = frozenset({"architectures", "dtype", "transformers_version", "_name_or_path"})
# Code that reads attributes of any name.
_BY_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter"})
_OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(one.__file__))) + os.sep for one in (torch, os)
)
_HERE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Functions of Python for which a trace has others.
_ASKED = frozenset({"type", "isinstance", "float", "int"})
_DEPTH = 2
_MOST = 100_000  # the most values of one table to visit


_ARGUMENTS = "arguments"


def argument_entry(name: str) -> str:
    """The name of the entry of an argument that the step gets as it is."""
    return f"{_ARGUMENTS}[{name!r}]"


@dataclass
class Reached:
    """The tables that a step reaches, and names in its code.

    Args:
        stored: the names to which it assigns.
        names: all of globals and attributes.
        scopes: the globals of the user's functions that call one of `type`, `isinstance`, `float` and `int`,
            by this name.
    """

    tables: list[Table]
    stored: frozenset[str]
    names: frozenset[str]
    scopes: dict[str, list[dict[str, Any]]]


def reach(
    step: Any,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    ids: Mapping[int, int] = types.MappingProxyType({}),
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
    kinds: Iterable[type] = (),
) -> Reached:
    """The tables that `step` reaches, and the attributes of `model` and of `optimizers`.

    The order is the same at every call of the same program. `ids` are those of tensors, with their numbers;
    `arguments` those that the step gets as they are, by name; `kinds` the classes of other arguments.
    """
    names: set[str] = set()
    while True:
        walk = _Walk(names, model, optimizers, ids)
        walk.go(step, arguments, kinds)
        if len(walk.names) == len(names):
            return Reached(walk.tables, frozenset(walk.stored), walk.known, walk.asking)
        names = set(walk.names)


class _Walk:
    """One search; `names` are those found in code so far."""

    def __init__(
        self,
        names: Iterable[str],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ids: Mapping[int, int],
    ) -> None:
        self.known, self.names, self._ids = frozenset(names), set(names), ids
        self.stored: set[str] = set()
        self.tables: list[Table] = []
        self._model, self._optimizers = model, optimizers
        self._own = {id(m) for m in model.modules()}
        self._names_of = names_of(model)
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id repeats
        self._scopes: dict[int, Table] = {}
        self._asking: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in _ASKED}
        self._uses: dict[tuple[str, int], frozenset[str]] = {}
        self._reads_environment, self._words = False, set[str]()
        # Objects of a library's modules (a configuration) whose attributes all count, to this depth.
        self._whole: dict[int, int] = {}
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._methods_of: dict[type, list[str]] = {}  # by class, those that are in a table

    def go(self, step: Any, arguments: Mapping[str, Any], kinds: Iterable[type]) -> None:
        self._value(step, "")
        for path, module in self._model.named_modules():
            self._module(module, f"{path}." if path else "")
        for hook in _hooks(self._model, self._optimizers):
            self._value(hook, "a hook")
        for k, one in enumerate(self._optimizers):
            self._optimizer(one, f"optim{k}" if k else "optim")
        for kind in kinds:
            self._data_of(kind)
            self._methods(kind)
        self._finish()
        if arguments:
            at = len(self.tables)
            self.tables.append(Table(_ARGUMENTS, ITEM, _is(arguments), None))
            for name, value in arguments.items():
                self._value(value, name)
            self._finish()
            self.tables[at:] = [replace(table, of_caller=True) for table in self.tables[at:]]
        if self._reads_environment:
            self._environment()

    def _finish(self) -> None:
        while self._todo:
            self._todo.popleft()()

    @property
    def asking(self) -> dict[str, list[dict[str, Any]]]:
        """The globals of the user's functions that call a function of `_ASKED`.

        Without those that also use `float` or `int` otherwise: `dtype=float`, `type(x) is float`.
        """

        def counts(name: str, i: int) -> bool:
            uses = self._uses[name, i]
            is_class = name in ("float", "int")
            return not is_class or ("call" in uses and "another" not in uses)

        return {
            name: [scope for i, scope in found.items() if counts(name, i)]
            for name, found in self._asking.items()
        }

    def _environment(self) -> None:
        """Environment variables in the user's code."""
        environ: Any = os.environ
        keys = [environ.encodekey(name) for name in sorted(self._words)]
        self.tables.append(Table("os.environ", ITEM, _is(environ._data), keys))

    def _new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _value(self, value: Any, path: str) -> None:
        """Search the value at `path`."""
        if isinstance(value, (*PLAIN, Tensor)) or not self._new(value):
            return
        look = self._look_for(value)
        if look is not None:
            self._todo.append(lambda: look(value, path))

    def _look_for(self, value: Any) -> Callable[[Any, str], None] | None:
        if isinstance(value, types.FunctionType):
            return self._function
        if isinstance(value, types.MethodType):
            return self._method
        if isinstance(value, functools.partial):
            return self._partial
        if isinstance(value, nn.Module):
            return None if id(value) in self._own else self._outside
        if isinstance(value, Optimizer):
            given = any(value is one for one in self._optimizers)
            return None if given else self._object
        if isinstance(value, dict):
            return self._dict
        if isinstance(value, list | tuple | collections.deque):
            return self._sequence
        if isinstance(value, collections.UserDict | collections.UserList | collections.ChainMap):
            return self._wrapper
        if isinstance(value, type):
            return self._class if is_users(value.__module__) else None
        if isinstance(value, types.ModuleType):
            return self._python_module if is_users(value.__name__) else None
        if hasattr(value, "__wrapped__") and callable(value):  # functools.cache and the like
            return lambda x, path: self._value(x.__wrapped__, path)
        return self._object if has_attributes(value) else None

    def _function(self, function: Any, path: str) -> None:
        inner = inspect.unwrap(function)  # a wrapper around a module has no other code
        code = (inner if isinstance(inner, types.FunctionType) else function).__code__
        self._code(code)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = not is_code_of_library(function.__code__)
        for name, cell in cells.items():
            self._cell(cell, name, own=own)
        defaults = [k for k in ("__defaults__", "__kwdefaults__") if getattr(function, k)]
        if defaults and own:
            self.tables.append(Table(f"{function.__name__}.", SLOT, _is(function), defaults))
        for key in defaults:
            self._value(getattr(function, key), f"{function.__name__}'s defaults")
        if "__wrapped__" in vars(function):
            self._value(function.__wrapped__, path)
        if kept := sorted(k for k in vars(function) if self._wanted(k) and k != "__wrapped__"):
            name = f"{function.__name__}."
            self.tables.append(Table(name, MEMBER, _is(vars(function)), kept))
            for key in kept:
                self._value(vars(function)[key], f"{name}{key}")
        scope, library = function.__globals__, is_code_of_library(code)
        if not library:
            for name in _globals_of(code) & _ASKED:
                self._asking[name][id(scope)] = scope
                uses = self._uses.get((name, id(scope)), frozenset())
                self._uses[name, id(scope)] = uses | _uses(code, name)
        if library and not is_users(function.__module__ or ""):
            return
        mentioned = _mentioned(code) & scope.keys()
        for name in sorted(mentioned & _globals_of(code)) if mentioned else ():
            if not library or type(scope[name]) in (int, float, bool):
                self._in_scope(scope, name)

    def _in_scope(self, scope: dict[str, Any], name: str) -> None:
        table = self._scopes.get(id(scope))
        if table is None:
            table = self._scopes[id(scope)] = Table("", SCOPE, _is(scope), [])
            self.tables.append(table)
        assert table.keys is not None
        if name not in table.keys:
            table.keys.append(name)
        self._value(scope[name], name)

    def _cell(self, cell: Any, name: str, *, own: bool) -> None:
        if not self._new(cell):
            return
        try:
            value = cell.cell_contents
        except ValueError:  # a name without a value yet
            return
        if own:
            self.tables.append(Table(name, CELL, _is(cell), None))
        self._value(value, name)

    def _method(self, method: Any, path: str) -> None:
        self._value(method.__func__, path)
        code = getattr(method.__func__, "__code__", None)
        self._value(method.__self__, code.co_varnames[0] if code and code.co_argcount else "self")

    def _partial(self, one: Any, path: str) -> None:
        self._value(one.func, path)
        if one.args:
            self._value(one.args, path)
        if one.keywords:
            self._dict(one.keywords, path)

    def _dict(self, table: dict[Any, Any], path: str) -> None:
        if len(table) <= _MOST:
            self.tables.append(Table(path, ITEM, _is(table), None, ids=self._ids))
            for key, value in list(table.items()):
                self._value(value, f"{path}[{self.tables[-1].text(key):.40}]")
        if has_attributes(table):
            self._object(table, path)

    def _wrapper(self, value: Any, path: str) -> None:
        """A dict or a list of Python's library in an object."""
        inner = value.maps if isinstance(value, collections.ChainMap) else value.data
        self._value(inner, path)
        if has_attributes(value):
            self._object(value, path)

    def _sequence(self, items: Any, path: str) -> None:
        values = plain_sequence(items)
        if len(values) <= _MOST:
            self.tables.append(Table(path, ITEM, _is(items), None))
            for i, value in enumerate(values):
                self._value(value, f"{path}[{i}]")

    def _module(self, module: nn.Module, prefix: str) -> None:
        keys = [k for k, v in vars(module).items() if counts(k, v)]
        self.tables.append(Table(prefix, MEMBER, _is(vars(module)), keys))
        for key in keys:
            self._whole.setdefault(id(vars(module)[key]), _DEPTH)
            self._value(vars(module)[key], f"{prefix}{key}")
        self._data_of(type(module))
        self._methods(type(module))
        for key, x in (*parameters_of(module).items(), *buffers_of(module).items()):
            if x is not None:
                self._tensor(x, f"{prefix}{key}")

    def _tensor(self, x: Tensor, path: str) -> None:
        """The user's attributes of a parameter or buffer."""
        every = bool(self.known & _BY_ANY_NAME)
        given = user_attributes(x)
        keys = [k for k in given if k in self.known or (every and not k.startswith("_"))]
        if keys and self._new(x):
            self.tables.append(Table(f"{path}.", MEMBER, _is(vars(x)), keys, NOT_OF_USERS))
            for key in keys:
                self._value(given[key], f"{path}.{key}")

    def _outside(self, module: nn.Module, path: str) -> None:
        for name, one in module.named_modules():
            if id(one) in self._own or (one is not module and not self._new(one)):
                continue
            prefix = f"{path}.{name}." if name else f"{path}."
            self._module(one, prefix)
            for table in (children_of(one), parameters_of(one), buffers_of(one)):
                self.tables.append(Table(prefix, MEMBER, _is(table), None))

    def _optimizer(self, one: Optimizer, prefix: str) -> None:
        keys = [k for k in vars(one) if k not in _OF_ALL_OPTIMIZERS]
        table = Table(f"{prefix}.", MEMBER, _is(vars(one)), keys, _OF_ALL_OPTIMIZERS)
        self.tables.append(table)
        for key in keys:
            self._value(vars(one)[key], f"{prefix}.{key}")
        if not is_pure_wrapper(one):
            for g, group in enumerate(one.param_groups):
                for key, value in group.items():
                    if key != "params" and not is_scheduled(key, value):
                        self._value(value, f"{prefix}.{g}.{key}")
            self._state_of(one, prefix)
        if (step := own_step(one)) is not None:
            self._value(step, f"{prefix}.step")
        self._data_of(type(one))
        self._methods(type(one))

    def _state_of(self, one: Optimizer, prefix: str) -> None:
        """An optimizer's state of no parameter, and objects in that of parameters.

        `optimizer_tables` has the containers in the state of parameters.
        """
        for key, value in one.state.items():
            if not (isinstance(key, Tensor) and isinstance(value, dict)):
                self._value(value, f"{prefix}.state.{key}")
                continue
            name = f"{prefix}.{self._names_of.get(id(key), 'unknown')}"
            for slot, inner in value.items():
                if not isinstance(inner, Tensor):
                    for path, x in _leaves(inner, f"{name}.{slot}"):
                        self._value(x, path)

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        attributes = getattr(value, "__dict__", None)
        depth = self._whole.get(id(value), 0)
        whole = isinstance(value, _WHOLE) or (depth > 0 and is_library(kind.__module__))
        if isinstance(attributes, dict):
            keys = sorted(k for k in attributes if whole or self._wanted(k))
            if hasattr(kind, "save_pretrained"):
                keys = [k for k in keys if k not in _OF_FILES]
            self.tables.append(Table(f"{path}.", MEMBER, _is(attributes), keys))
            for key in keys:
                if depth > 1:
                    self._whole.setdefault(id(attributes[key]), depth - 1)
                self._value(attributes[key], f"{path}.{key}")
        slots = [k for k in _slots(kind) if (whole or self._wanted(k)) and hasattr(value, k)]
        if slots:
            self.tables.append(Table(f"{path}.", SLOT, _is(value), slots))
            for key in slots:
                self._value(getattr(value, key), f"{path}.{key}")
        self._data_of(kind)
        self._methods(kind)

    def _class(self, kind: type, path: str) -> None:
        """A class whose name is in code, which may call it."""
        self._data_of(kind)
        self._methods(kind, called=_CALLED | _MAKING)

    def _data_of(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_library(base.__module__):
                continue
            held = vars(base)
            keys = [k for k, v in held.items() if self._wanted(k) and _is_data(k, v)]
            if keys and self._new(held):
                self.tables.append(Table(f"{base.__name__}.", SLOT, _is(base), keys))
                for key in keys:
                    self._value(held[key], f"{base.__name__}.{key}")

    def _python_module(self, module: types.ModuleType, path: str) -> None:
        scope = vars(module)
        library = is_library(module.__name__)
        for name in sorted(k for k in scope if k in self.known and not k.startswith("__")):
            if not library or type(scope[name]) in (int, float, bool):
                self._in_scope(scope, name)

    def _methods(self, kind: type, called: frozenset[str] | None = None) -> None:
        """The code of a class: methods whose names are in code, and methods that Python calls itself."""
        called = _CALLED if called is None else called
        own = dict[str, None]()  # the user may replace them
        for base in kind.__mro__:
            if not is_users(base.__module__):
                continue
            for name, held in list(vars(base).items()):
                if not (name in self.known or name in called):
                    continue
                if isinstance(held, _METHODS) and not is_library(base.__module__):
                    own[name] = None
                for function in _functions(held):
                    if self._new(function):
                        self._todo.append(lambda f=function: self._function(f, f.__name__))
        known = self._methods_of.setdefault(kind, [])
        if new := [name for name in own if name not in known]:
            known += new
            self.tables.append(Table(f"{kind.__name__}.", SLOT, _is(kind), new))

    def _wanted(self, name: str) -> bool:
        return name in self.known or bool(self.known & _BY_ANY_NAME)

    def _code(self, code: types.CodeType) -> None:
        self.names |= _mentioned(code)
        if is_code_of_library(code):
            return
        if code.co_name not in _MAKING:
            self.stored |= _stored(code)
        if _mentioned(code) & {"environ", "getenv"}:
            self._reads_environment = True
            self._words |= _mentioned(code)


# Attributes of an optimizer with rules of their own, and its internals.
_OF_ALL_OPTIMIZERS = frozenset(torch.optim.SGD([torch.zeros(1)], 0.1).__dict__) | frozenset(
    {"step", "profile_hook_step", *MARKS}
)
# Methods that Python or PyTorch calls on an object, without those that make or print one.
_MAKES = ("init", "new", "repr", "str", "reduce", "getstate", "setstate", "deepcopy", "copy", "del")
# A class method is another object at each look.
_METHODS = (types.FunctionType, staticmethod, property, functools.cached_property)
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_CALLED = frozenset(
    {"forward", "step", "__call__", "__enter__", "__exit__", "__contains__", "__next__", "__iter__"}
    | {k for one in (int, float, list, dict) for k in vars(one) if k.startswith("__")}
    | {"__getattr__", "__setattr__", "__get__", "__set__", "__matmul__"}
) - {f"__{name}__" for name in _MAKES}


def counts(key: str, value: Any) -> bool:
    """Whether a trace may depend on an attribute of a module, such as `training`."""
    return key not in _OF_ALL_MODULES or type(value) in (bool, int, float, str)


def _hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Any]:
    """The hooks of modules, gradients and optimizers."""
    tables = [table for one in model.modules() for table in hooks_of_module(one)]
    tables += [table for one in model.parameters() for table in hooks_of_tensor(one)]
    tables += [table for one in optimizers for table in hooks_of_optimizer(one)]
    for table in tables:
        yield from (table or {}).values()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is in a dict, list or tuple, at any depth, each with its path."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for key, x in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(x, f"{path}[{key!r:.40}]")


def _is(held: Any) -> Callable[[], Any]:
    return lambda: held


@functools.lru_cache(maxsize=10_000)
def _mentioned(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in code, inner functions included."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _mentioned(const)
        elif isinstance(const, str) and const.isidentifier():  # getattr(x, "beta")
            found.add(const)
    return frozenset(found)


_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL"})


@functools.lru_cache(maxsize=10_000)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals in code; `_mentioned` has those of attributes, too."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname in _GLOBAL}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _globals_of(const)
    return frozenset(found | _mentioned(code) if "globals" in found else found)


@functools.lru_cache(maxsize=10_000)
def _uses(code: types.CodeType, name: str) -> frozenset[str]:
    """The uses of the global class `name`: a `call`, an `argument` of `_TAKE_CLASSES`, an `attribute` of it,
    or `another`.
    """
    ops = list(dis.get_instructions(code))
    found = set[str]()
    for i, one in enumerate(ops):
        if one.opname != "LOAD_GLOBAL" or one.argval != name:
            continue
        if (one.arg or 0) & 1:  # the bit of a function that is called
            found.add("call")
            continue
        after = [x.opname for x in ops[i + 1 :] if x.opname != "CACHE"]
        is_last = next(x for x in after if x not in _OF_KINDS) in ("PRECALL", "CALL")
        if after[0] in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add("attribute")
        else:
            is_first = i > 0 and ops[i - 1].argval in _TAKE_CLASSES
            is_argument = is_last and not _TAKE_CLASSES.isdisjoint(code.co_names)
            found.add("argument" if is_first or is_argument else "another")
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(found.union(*(_uses(const, name) for const in inner)))


# Functions that take another class of the same name as well: they call it, or ask it about a value.
_TAKE_CLASSES = frozenset({"isinstance", "map", "defaultdict"})
# Instructions between a class and the end of a call: `isinstance(x, (int, float))`.
_OF_KINDS = ("LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE", "BINARY_OP")


@functools.lru_cache(maxsize=10_000)
def _stored(code: types.CodeType) -> frozenset[str]:
    """The names of attributes and variables to which code assigns, and the keys to which it may assign."""
    found: set[str] = set()
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _stored(const)
    for one in dis.get_instructions(code):
        if one.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"):
            found.add(str(one.argval))
        elif one.opname == "STORE_SUBSCR":
            found |= {x for x in code.co_consts if isinstance(x, str)}
    return frozenset(found)


def _functions(held: Any) -> Iterator[Any]:
    if isinstance(held, staticmethod | classmethod):
        held = held.__func__
    if isinstance(held, property):
        yield from (f for f in (held.fget, held.fset) if isinstance(f, types.FunctionType))
    elif isinstance(held, functools.cached_property):
        yield from _functions(held.func)
    elif isinstance(held, types.FunctionType):
        yield held


def _is_data(name: str, held: Any) -> bool:
    return not name.startswith("__") and not hasattr(held, "__get__")


@functools.cache
def is_users(module: str) -> bool:
    """Whether a module, by name, is not of Python, torch or tutti."""
    root = module.partition(".")[0]
    return root not in sys.stdlib_module_names and root not in (
        "torch",
        "tutti",
        "numpy",
        "builtins",
    )


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module, by name, is installed, and not part of the user's program."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not is_users(module) or any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)


@functools.lru_cache(maxsize=10_000)
def is_code_of_library(code: types.CodeType) -> bool:
    file = code.co_filename
    return file.startswith((*_LIBRARIES, _HERE)) or any(
        f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED
    )


def has_attributes(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _WHOLE):
        return True
    if not is_users(kind.__module__):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(kind))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        given = vars(base).get("__slots__", ())
        found += [given] if isinstance(given, str) else list(given)
    return [k for k in found if k not in ("__dict__", "__weakref__")]
