"""A step that looks at, or talks to, other processes by itself: it is captured as that of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import all_reduce as reduce_all
from torch.distributed import is_initialized
from torch.distributed.nn.functional import all_gather

import tutti
from tutti import CaptureError
from tutti.capture.one_process import one_process

Step = Callable[[nn.Module, Any, Tensor], Any]


def _updated(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    o.zero_grad()
    loss = m(x).square().mean()
    loss.backward()
    o.step()
    return loss.detach()


def plain(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    return _updated(m, o, x)


def averages_where_there_are_several(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss = _updated(m, o, x)
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss + is_initialized()


def asks_how_many(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    return _updated(m, o, x) * dist.get_world_size() + dist.get_rank()


def waits_and_averages(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    dist.barrier()
    dist.broadcast(x, src=0)
    loss = _updated(m, o, x)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss


def averages(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss = _updated(m, o, x)
    dist.all_reduce(loss)
    return loss / 2


def averages_by_a_name_of_its_own(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss = _updated(m, o, x)
    reduce_all(loss, group=dist.group.WORLD)
    return loss / 2


def gathers(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    return torch.cat(list(all_gather(_updated(m, o, x)[None])))


def functionally(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    return functional.all_reduce(_updated(m, o, x), "sum", GROUPS[0])


GROUPS: list[Any] = []
SAME = (averages_where_there_are_several, asks_how_many, waits_and_averages)
REFUSED = {
    averages: "torch.distributed.all_reduce",
    averages_by_a_name_of_its_own: "all_reduce",
    gathers: "all_gather",
    functionally: "all_reduce",
}


def played(step: Step, layout: str) -> list[Any]:
    if layout:
        GROUPS[:] = [dist.group.WORLD]
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = tutti.distribute(step, model, sgd, layout)
    found = []
    for k in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        found.append(made(x).item())
    return found


@pytest.mark.parametrize("step", SAME, ids=lambda s: s.__name__)
def test_a_step_that_asks_is_told_of_one_process(ranks: Any, step: Step) -> None:
    one = played(plain, "")
    for found in ranks.run(played, step, "data=2", n=2):
        assert found == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("step", REFUSED, ids=lambda s: s.__name__)
def test_a_step_that_communicates_is_refused_by_name(ranks: Any, step: Step) -> None:
    with pytest.raises(Exception, match=f"communicates by itself: .*{REFUSED[step]}") as raised:
        ranks.run(played, step, "data=2", n=2)
    assert CaptureError.__name__ in str(raised.value)
    assert "test_one_process.py" in str(raised.value)


def alone() -> tuple[Any, ...]:
    seen: list[bool] = []
    with one_process():
        inside = dist.is_initialized(), dist.get_rank(), dist.get_world_size()
        other = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
        other.start()
        other.join()
    return inside, seen, dist.is_initialized(), dist.get_world_size()


def test_other_threads_and_later_calls_see_the_group(ranks: Any) -> None:
    assert ranks.run(alone, n=2) == [((False, 0, 1), [True], True, 2)] * 2
