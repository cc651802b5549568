"""The lookup that a frame is at: `n in wanted`, `rates[n]`, `rates.get(n)`; and its set or dict.

A lookup asks its key for a hash and does not tell the key in what. The bytecode of the frame names the set or
dict: a constant, a variable, or an attribute of one. Anything else is not found.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

IS_MEMBER, VALUE = "in", "[]"  # what a lookup asks for
_MISSING: Any = object()
_LOCALS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF"})
_PAIRS = frozenset({"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CALLS = ("CALL", "PRECALL")  # in Python 3.11 a call is either of two instructions
# Ops that rearrange the stack: what comes before them is not one operand.
_MOVES = frozenset({"COPY", "SWAP"})


@dataclass(frozen=True)
class Lookup:
    """A lookup, and the set or dict of it."""

    kind: str
    container: Any


@dataclass(frozen=True)
class _Instruction:
    name: str
    value: Any  # the name of a variable or an attribute, or a constant
    effect: int  # on the number of values on the stack
    is_plain: bool  # whether it neither jumps nor moves values on the stack
    is_target: bool  # whether other code jumps to it


@dataclass(frozen=True)
class _Place:
    """A lookup in code: its kind, and the instructions that load its container."""

    kind: str
    loads: tuple[_Instruction, ...]


def lookup_of(frame: FrameType) -> Lookup | None:
    """The lookup of the instruction that a frame executes; None if it is another one."""
    place = _place(frame.f_code, frame.f_lasti)
    if place is None:
        return None
    found = _loaded(frame, place.loads)
    return None if found is _MISSING else Lookup(place.kind, found)


@cache
def _place(code: CodeType, at: int) -> _Place | None:
    before: list[_Instruction] = []
    last: dis.Instruction | None = None
    for one in dis.get_instructions(code):
        if one.offset == at:
            last = one
            break
        before += _parts(one)
    if last is None or last.is_jump_target:
        return None
    if last.opname == "CONTAINS_OP":
        return _made(IS_MEMBER, before)
    if last.opname == "BINARY_SUBSCR" or (last.opname, last.argrepr) == ("BINARY_OP", "[]"):
        return _made(VALUE, before[: _begin(before)])
    if last.opname not in _CALLS or last.arg not in (1, 2):
        return None
    if last.opname == "CALL" and before and before[-1].name == "PRECALL":
        before.pop()
    for _ in range(last.arg):
        before = before[: _begin(before)]
    if before and before[-1].name in _ATTRIBUTES and before[-1].value == "get":
        return _made(VALUE, before[:-1])
    return None


def _parts(one: dis.Instruction) -> list[_Instruction]:
    """An instruction; two of one that loads two variables."""
    if one.opname in _PAIRS:
        first, second = one.argval
        return [
            _Instruction("LOAD_FAST", first, 1, True, one.is_jump_target),
            _Instruction("LOAD_FAST", second, 1, True, False),
        ]
    effect = dis.stack_effect(one.opcode, one.arg, jump=False)
    jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
    is_plain = not jumps and one.opname not in _MOVES
    return [_Instruction(one.opname, one.argval, effect, is_plain, one.is_jump_target)]


def _begin(code: Sequence[_Instruction]) -> int:
    """Where the last operand on the stack begins; 0 if other code comes between."""
    height = 0
    for k in range(len(code) - 1, -1, -1):
        height += code[k].effect
        if height > 0 and code[k].is_plain:
            return k if height == 1 else 0
        if code[k].is_target or not code[k].is_plain:
            return 0
    return 0


def _made(kind: str, code: Sequence[_Instruction]) -> _Place | None:
    """The lookup in the last operand of `code`."""
    loads: list[_Instruction] = []
    for one in reversed(code):
        loads.insert(0, one)
        if one.name not in _ATTRIBUTES:
            return _Place(kind, tuple(loads))
        if one.is_target:
            return None
    return None


def _loaded(frame: FrameType, loads: Sequence[_Instruction]) -> Any:
    """The value of these instructions in a frame, without a call of the user's code."""
    first, *attributes = loads
    name = first.value
    if first.name == "LOAD_CONST":
        value = name
    elif first.name in _LOCALS:
        value = frame.f_locals.get(name, _MISSING)
    elif first.name in ("LOAD_GLOBAL", "LOAD_NAME"):
        local = frame.f_locals if first.name == "LOAD_NAME" else {}
        scopes = (local, frame.f_globals, vars(builtins))
        value = next((scope[name] for scope in scopes if name in scope), _MISSING)
    else:
        return _MISSING
    for one in attributes:
        value = _attribute(value, one.value)
    return value


def _attribute(owner: Any, name: str) -> Any:
    """An attribute as stored; a property is none."""
    if owner is _MISSING:
        return _MISSING
    modules = getattr(owner, "__dict__", {}).get("_modules", {})
    found = inspect.getattr_static(owner, name, _MISSING)
    if found is _MISSING and isinstance(modules, dict):
        return modules.get(name, _MISSING)
    if isinstance(found, MemberDescriptorType):  # of a class with slots
        return found.__get__(owner, type(owner))
    return _MISSING if hasattr(type(found), "__get__") else found
