"""`explain` of runs with servers: who owns what, and what travels."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

import tutti
from server.split.steps import Apart, Model, batch, by_norm, step
from tutti.report.servers import explain_servers


def explained(layout: str, *, graph: bool = False, model: nn.Module | None = None) -> str:
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    made = tutti.distribute(partial(step, by_norm), model, optimizer, layout)
    assert made.served is not None
    parts = made.served.parts_of(batch(0, 12))
    return explain_servers(*parts, made.layout, graph=graph)


def test_every_variable_has_a_server_and_its_bytes() -> None:
    text = explained("replica=3 server=2 sync=step")
    assert 'layout "replica=3 sync=step server=2": 3 workers, 2 servers' in text
    # 66 floats, and as many twice with a count of 4 bytes for the slots
    assert re.search(r"table\.weight +\[11, 6\] +anywhere +1 +[01] +264 B +532 B", text)
    counts = [int(n) for n in re.findall(r"server \d: (\d+) blocks", text)]
    assert sum(counts) == 8 and all(counts)
    assert "pulls 724 B, pushes 724 B and 4 numbers" in text  # 181 floats; lr, weight decay, betas
    assert "coupling: 8 sums -> 2 scalars, by servers, over all blocks" in text
    # a count of tokens, the loss, and 8 means and 8 squares of the batch norm with their gradients
    assert re.search(r"small sums between workers, through a server: \d+, \d+ B", text)


def test_a_run_of_two_phases_tells_of_its_first() -> None:
    text = explained("replica=3 server=2 sync=async(after=300)")
    phase = "the first 300 steps; later each push is an update of its own"
    lines, step = text.splitlines(), explained("replica=3 server=2 sync=step").splitlines()
    lines.remove(phase)
    assert lines[1:] == step[1:]  # all but the layout


def test_servers_that_predict_have_their_weights_twice() -> None:
    texts = [explained(f"replica=3 server=1 sync={sync}") for sync in ("async", "async(predict)")]
    plain, twice = (re.search(r"server 0: 8 blocks, (\S+) (\S+) of (.*)", t) for t in texts)
    assert plain and twice and plain[2] == twice[2] == "kB"
    assert float(twice[1]) - float(plain[1]) == pytest.approx(0.724, abs=0.02)  # 181 floats
    assert twice[3] == "weights, weights before the last update, and slots"


def test_a_worker_of_async_couples_its_own_gradients() -> None:
    text = explained("replica=3 server=1 sync=async", graph=True)
    assert "small sums" not in text
    assert "pushes 724 B and 6 numbers" in text and "by each worker on its own" in text
    assert "# update of table.weight" in text and "adamw" in text


def test_slices_are_named_and_what_is_summed_once_a_step_counts_once() -> None:
    text = explained("replica=3 server=1 sync=step micro=2", model=Apart(), graph=True)
    assert "2 micro-batches, one after the other" in text
    assert "small sums between workers, through a server: 2, 16 B" in text
    assert "pushes 724 B" in text and "loop" in text


def test_what_the_ranks_of_a_worker_move() -> None:
    text = explained("replica=2 data=3 server=1 sync=step(traffic=int8)", model=Apart())
    assert "2 workers of 3 ranks, 1 servers" in text
    assert "pulls 724 B, pushes 181 B and" in text
    assert "small sums between workers, through a server: 2, 48 B" in text  # of three ranks each
    # every gradient is summed over the three: 2 * 2 / 3 of its bytes
    found = re.search(r"of 3 ranks: the first hands on 724 B; (\d+) collectives, ([\d.]+) B", text)
    assert found is not None and int(found[1]) >= 7 and float(found[2]) >= 724 * 4 / 3 - 30
