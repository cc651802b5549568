"""Contracts of `torch_private/symbolic.py`."""

from __future__ import annotations

import math
import types
from types import FrameType
from typing import Any

import pytest
import sympy
import torch

from tutti.torch_private.symbolic import (
    ConstantSource,
    DimDynamic,
    GuardOnDataDependentSymNode,
    NumberEnv,
    PythonPrinter,
    SymNode,
    expression_of,
    function_of_symbol,
)


def _number(env: NumberEnv, value: float, name: str = "n") -> torch.SymFloat | torch.SymInt:
    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    make = env.create_symintnode if isinstance(value, int) else env.create_symfloatnode
    return make(symbol, hint=value, source=source)


def test_numbers_become_symbols_with_expressions() -> None:
    env = NumberEnv()
    x, n = _number(env, 2.5, "x"), _number(env, 7, "n")
    assert isinstance(x, torch.SymFloat) and isinstance(n, torch.SymInt)
    assert len(expression_of(x * 2 + n).free_symbols) == 2


def test_numbers_that_are_equal_now_are_two_symbols() -> None:
    env = NumberEnv()
    x, y = _number(env, 2.5, "x"), _number(env, 2.5, "y")
    assert expression_of(x) != expression_of(y)


def test_a_branch_is_kept_as_a_guard_and_printed_as_python() -> None:
    env = NumberEnv()
    x = _number(env, 2.5)
    assert x > 1.0
    (guard,) = env.guards
    (symbol,) = guard.expr.free_symbols
    text = PythonPrinter().doprint(guard.expr)
    holds = types.FunctionType(compile(text, "guard", "eval"), {str(symbol): 2.5})
    fails = types.FunctionType(compile(text, "guard", "eval"), {str(symbol): 0.5})
    assert holds() and not fails()


def test_a_compared_symbol_stays_itself_in_its_expression() -> None:
    env = NumberEnv()
    n = _number(env, 7)
    symbol = expression_of(n)
    assert n == 7
    assert expression_of(n) == symbol and symbol.is_Symbol


def test_a_condition_is_a_symbol_made_of_an_expression() -> None:
    env = NumberEnv()
    n = _number(env, 1)
    known = torch.SymBool(SymNode(sympy.Eq(expression_of(n), 1), env, bool, True))
    assert bool(known) and len(env.guards) == 1


def test_a_symbol_of_a_size_is_an_int_of_the_env() -> None:
    env, source = NumberEnv(), ConstantSource("size")
    symbol = env.create_symbol(6, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=6, source=source)
    assert expression_of(size) == symbol and size > 1 and not env.guards


def test_a_branch_on_a_number_without_a_value_is_an_error() -> None:
    env = NumberEnv()
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(env.create_unbacked_symint() == 3)


def test_a_branch_makes_a_symbol_a_number_unless_it_stays() -> None:
    class Staying(NumberEnv):
        def stays(self, symbol: Any) -> bool:
            return True

    for env, is_symbol in ((NumberEnv(), False), (Staying(), True)):
        n = _number(env, 0.5)
        assert n == 0.5 and len(env.guards) == 1
        assert bool(n.node.expr.free_symbols) is is_symbol


def test_an_env_has_a_frame_for_its_errors() -> None:
    assert isinstance(NumberEnv()._get_user_frame(), FrameType)


@pytest.mark.parametrize(
    "name",
    ["sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "log2"],
)
def test_functions_of_math_know_symbols(name: str) -> None:
    x = _number(NumberEnv(), 0.5)
    y = function_of_symbol(name)(x)
    assert isinstance(y, torch.SymFloat) and expression_of(y).free_symbols
    assert math.isclose(y.node.hint, getattr(math, name)(0.5))
