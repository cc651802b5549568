"""A worker of several ranks: each has its part, and one of them speaks with the servers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tutti
from ranks import Ranks
from server.split.test_rows import Tables, batch, train_step
from serving.test_worker_side import OneServer
from tutti.environment import ROLE, SERVERS
from tutti.errors import ServerError
from tutti.replicas.replica_rows import rows as rows_of_replica
from tutti.serving import worker_side

LAYOUT = "replica=2 tensor=2 micro=3 server=1 sync=async"
PLACE = {"small.weight": "-, tensor", "head.weight": "-, tensor"}


class Keeping(OneServer):
    """One that also gives and takes all state, for one worker."""

    def meet(self) -> None: ...

    def pull_state(self) -> dict[str, dict[str, Tensor]]:
        return copy.deepcopy(self.state)

    def push_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, slots in state.items():
            self.state[name] = {n: x.clone() for n, x in slots.items()}


def _look(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens).square().mean()


def _whole(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in state.items()}


def _train() -> tuple[bool, int]:
    """Steps of several shapes, an evaluation before and behind, state out and in; against plain PyTorch."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Tables().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    Keeping.asked = []
    Keeping.state = {
        n: {"weight": p.detach().clone(), "step": torch.tensor(0.0)}
        | {slot: torch.zeros_like(p) for slot in ("exp_avg", "exp_avg_sq")}
        for n, p in model.named_parameters()
    }
    environment = {ROLE.name: f"worker 0{'.1' if rank else ''}", SERVERS.name: "nowhere:1"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(worker_side, "Client", Keeping),
        mock.patch.object(worker_side.atexit, "register", lambda _: None),
    ):
        step = tutti.distribute(train_step, model, optimizer, LAYOUT, place=PLACE)
        look = tutti.distribute(_look, model, None, LAYOUT, place=PLACE)

        def same(k: int, rows: int) -> None:
            own = rows_of_replica(batch(k, rows), 0, 2)
            expected = train_step(plain, plain_optimizer, *own)
            close(step(*batch(k, rows)), expected.detach())
            with pytest.raises(ServerError, match="travels by row: between steps a worker"):
                model(batch(0)[0])
            close(look(*batch(0)), _look(plain, *batch(0)).detach())

        close(look(*batch(0)), _look(plain, *batch(0)).detach())
        for k, rows in enumerate((6, 6, 12)):
            same(k, rows)
        kept = step.state_dict()
        sharded = {
            n for n, x in kept.items() if isinstance(x, DTensor) and x.placements[0].is_shard()
        }
        assert {"head.weight", "optim.head.weight.exp_avg"} <= sharded
        assert not optimizer.state and not model.large.weight.to_local().isnan().any()
        whole = {n: x.clone() for n, x in _whole(kept).items()}
        for name, p in plain.named_parameters():
            close(whole[name], p.detach())
            close(whole[f"optim.{name}.exp_avg"], plain_optimizer.state[p]["exp_avg"])
        kept_plain = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
        same(3, 6)
        step.load_state_dict(whole)
        plain.load_state_dict(kept_plain[0])
        plain_optimizer.load_state_dict(kept_plain[1])
        same(4, 6)
    return step.served is not None and step.served.worker.client is not None, len(Keeping.asked)


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_the_first_rank_speaks_and_each_has_its_part(ranks: Ranks) -> None:
    (speaks, asked), (also, nothing) = ranks.run(_train, n=2)
    assert speaks and asked >= 10  # a pull and a push a step
    assert not also and not nothing
