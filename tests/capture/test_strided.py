"""`as_strided` of values becomes views and lookups with the same elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from as_eager import Program, assert_as_eager
from canonical_graph import canonical, played, targets
from small_steps import trained
from tutti.errors import CaptureError

aten = torch.ops.aten
# Of 8 x 6 x 5 elements in a row: sizes, strides, offset; whether a lookup is needed.
VIEWS: dict[str, tuple[list[int], list[int], int | None, bool]] = {
    "as it is": ([8, 6, 5], [30, 5, 1], None, False),
    "turned": ([5, 8, 6], [1, 30, 5], 0, False),
    "dims of one": ([8, 1, 30, 1], [30, 7, 1, 9], 0, False),
    "dims split": ([4, 2, 2, 3, 5], [60, 30, 15, 5, 1], 0, False),
    "windows": ([8, 13, 6], [30, 2, 1], 0, True),
    "every other": ([8, 3, 5], [30, 10, 1], 5, True),
    "a diagonal": ([8, 5], [30, 6], 0, True),
    "one element": ([], [], 17, True),
    "no element": ([0, 5], [30, 1], 0, False),
    "repeated": ([3, 8, 30], [0, 30, 1], 0, True),
}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["laid out", "turned"])
@pytest.mark.parametrize("name", VIEWS)
def test_elements(name: str, order: tuple[int, int, int]) -> None:
    size, step, start, lookup = VIEWS[name]
    x = torch.randn(8, 6, 5)

    def view(x: Tensor) -> Tensor:
        return x.permute(order).as_strided(size, step, start) * 1

    graph = canonical(view, x)
    assert aten.as_strided.default not in targets(graph)
    assert (aten.index_select.default in targets(graph)) == lookup
    assert torch.equal(played(graph, x), view(x))


@pytest.mark.parametrize("name", [n for n in VIEWS if n != "repeated" and n != "windows"])
def test_values_put_there(name: str) -> None:
    size, step, start, _ = VIEWS[name]
    x, values = torch.randn(8, 6, 5), torch.randn(size)

    def put(x: Tensor, values: Tensor) -> Tensor:
        return aten.as_strided_scatter(x, values, size, step, start)

    graph = canonical(put, x, values)
    assert aten.as_strided_scatter.default not in targets(graph)
    assert torch.equal(played(graph, x, values), put(x, values))


def test_a_slice_is_seen_from_where_it_begins() -> None:
    x = torch.randn(8, 6)

    def view(x: Tensor) -> Tensor:
        return x[2:5].as_strided([3, 2], [6, 1], 13) * 1

    assert torch.equal(played(canonical(view, x), x), view(x))


@pytest.mark.parametrize(
    ("cut", "size", "step", "start"),
    [
        ((slice(None), slice(0, 3)), [8, 3], [6, 1], 0),  # between its rows lie others
        ((slice(2, 5),), [2, 6], [6, 1], 0),  # before its first row
        ((slice(2, 5),), [4, 6], [6, 1], 12),  # behind its last
    ],
)
def test_memory_around_a_value_is_refused(cut: Any, size: Any, step: Any, start: int) -> None:
    with pytest.raises(CaptureError, match="memory that is not its operand's"):
        canonical(lambda x: x[cut].as_strided(size, step, start) * 1, torch.randn(8, 6))


class Determinants(nn.Module):
    """Of matrices in several orders in memory: their backward reads factors, which depend on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        self.plain = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        room = torch.empty_strided((4, 4), (1, 4))
        room.copy_(self.plain)
        several = torch.stack([self.plain, self.turned @ self.plain, 2 * self.plain.t()])
        turned_pairs = torch.complex(self.plain, self.turned).mT
        logs = [torch.linalg.slogdet(m)[1] for m in (self.turned, self.plain, room, turned_pairs)]
        dets = [
            torch.linalg.det(m).sum() for m in (self.plain.t().contiguous(), several.mT, several)
        ]
        return (x @ self.turned).square().mean() - 0.1 * sum(logs) + 0.01 * sum(dets)


def determinants() -> Program:
    model = Determinants()
    step: Any = trained(lambda model, x: model(x))
    return step, model, torch.optim.SGD(model.parameters(), lr=0.01), (torch.randn(8, 4),)


def test_determinants_of_matrices_in_every_order() -> None:
    assert_as_eager(determinants)
