"""The memory of results of known calls is that of calls that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fake_calls import CALLS, MODE, fake, forms
from subjects import program
from tutti.graph.analysis import known_calls
from tutti.graph.analysis.known_calls import called
from tutti.graph.analysis.storage import Storages
from tutti.torch_private.fake_tensors import FakeTensor
from tutti.torch_private.pytrees import tree_leaves
from tutti.torch_private.storages import memory_id

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    with mock.patch.object(known_calls, "_KNOWN", {}):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_gives_the_memory_of_one_that_runs(name: str) -> None:
    function, make = CALLS[name]
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    found = []
    for _ in range(3):
        args = make()
        operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        found.append(forms(called(MODE, counted, args, {}), operands))
    assert len(calls) == 1 and found[0] == found[1] == found[2]


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    x = fake(3, dtype=torch.int64)
    dtypes = [called(MODE, aten.mul.Tensor, (x, by), {}).dtype for by in (1, 1.0, 1, 1.0)]
    assert dtypes == [torch.int64, torch.float32] * 2
    y = fake(3)
    kinds = [called(MODE, aten.sum.dim_IntList, (y, [0], k), {}).dim() for k in (False, True)]
    assert kinds == [0, 1]


def test_operands_that_share_memory() -> None:
    x = fake(4, 6)
    with MODE:
        halves = list(x.split(2))
    for _ in range(2):
        result = called(MODE, aten.add_.Tensor, (halves[0], halves[1]), {})
        assert memory_id(result) == memory_id(x)
        assert memory_id(called(MODE, aten.add_.Tensor, (fake(2, 6), halves[1]), {})) != memory_id(
            x
        )


def test_a_result_in_the_second_of_two_operands_that_shared_memory_once() -> None:
    with MODE:
        halves = list(torch.empty(4, 6).split(2))

    def written(x: Tensor, out: Tensor) -> Tensor:
        return aten.neg.out(x, out=out)

    for operands in (halves, [fake(2, 6), fake(4, 6)[2:]], halves):
        assert memory_id(called(MODE, written, (operands[0], operands[1]), {})) == memory_id(
            operands[1]
        )


def test_what_has_no_equal_runs_each_time() -> None:
    class Body:
        """Compared by identity, like the body of a loop."""

    seen = []

    def function(x: Tensor, body: Body) -> Tensor:
        seen.append(body)
        return x + 1

    body = Body()
    for _ in range(2):
        called(MODE, function, (fake(2), body), {})
    assert seen == [body, body] and not known_calls._KNOWN


def test_a_call_under_a_mode_runs() -> None:
    for _ in range(2):
        with MODE:
            assert type(called(MODE, aten.neg.default, (torch.empty(2),), {})) is FakeTensor


def test_all_are_forgotten_before_they_are_too_many() -> None:
    with mock.patch.object(known_calls, "_MOST", 3):
        for n in range(10):
            assert called(MODE, aten.neg.default, (fake(n),), {}).shape == (n,)
            assert len(known_calls._KNOWN) <= 3


def blocks(program: Any) -> list[list[tuple[str, int]]]:
    """The blocks of each node: the node that makes each, and its bytes."""
    found = Storages(program.graph, program.captured.mode).of
    return [[(b.node.name, b.nbytes) for b in found.get(n, ())] for n in program.graph.nodes]


@pytest.mark.parametrize(("name", "layout"), [("llama", "data=2 zero=3"), ("resnet", "tensor=2")])
def test_a_program_has_the_same_blocks(name: str, layout: str) -> None:
    made = program(name, layout)
    with mock.patch.object(known_calls, "_MOST", 0):  # nothing is known for long
        plain = blocks(made)
    assert blocks(made) == plain
    with mock.patch.object(known_calls, "_run", wraps=known_calls._run) as run:
        assert blocks(made) == plain
    again = {call.args[1].namespace for call in run.call_args_list}
    assert again == {"tutti"}  # updates, whose rates are symbols
