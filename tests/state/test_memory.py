"""zero=3 keeps 1/N of the state on each rank: by the shards' sizes, and by what the process holds."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import forked
import tutti
import zoo
import zoo_models
import zoo_steps
from captured_once import captured_once
from ranks import Ranks

SCRIPT = Path(__file__).parent / "memory.py"
SECONDS = 270
REST = 30e6  # bytes beside the state: the graph, the batch
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
MODELS = {  # of one layer: another has the same tensors
    "llama": (partial(zoo.LLAMA, **SIZES, num_hidden_layers=1), zoo_steps.labels_step),
    "gpt": (partial(zoo_models.GPT, dim=64, num_layers=1), zoo_steps.plain_step),
}


def state_nbytes(name: str, layout: str) -> tuple[int, int, int, int]:
    """Bytes after a step: parameters here and in all, optimizer slots here and in all."""
    make, train_step = MODELS[name]
    built = zoo.build(make, step=train_step)
    step = tutti.distribute(*built[:3], layout)
    with captured_once(("memory", name)):
        step(*built[3][0])
    parameters = {n for n, _ in built[1].named_parameters()}
    here = {True: 0, False: 0}
    total = dict(here)
    held: dict[int, int] = {}
    for key, x in step.state_dict().items():
        if key not in parameters and not key.startswith("optim."):
            continue
        local = x.to_local() if isinstance(x, DTensor) else x
        here[key in parameters] += local.nbytes
        total[key in parameters] += x.numel() * x.element_size()
        storage = local.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    # What is shared holds every rank's parts, once; nothing else is larger than its tensor.
    assert sum(held.values()) <= 1.05 * sum(total.values())
    return here[True], total[True], here[False], total[False]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "data=2 zero=3"), ("gpt", "data=2 zero=3"), ("gpt", "data=4 zero=3")],
)
def test_state_is_shared_out_evenly(ranks: Ranks, name: str, layout: str) -> None:
    num_ranks = int(layout[5])
    one = ranks.after(state_nbytes, name, "")
    for found in one.run(state_nbytes, name, layout, n=num_ranks):
        for here, total in (found[:2], found[2:]):
            assert here == pytest.approx(total / num_ranks, rel=0.02)


def test_zero_1_shares_out_the_slots_alone(ranks: Ranks) -> None:
    one = ranks.after(state_nbytes, "gpt", "")
    for here, total, slots, all_slots in one.run(state_nbytes, "gpt", "data=2 zero=1", n=2):
        assert here == total
        assert slots == pytest.approx(all_slots / 2, rel=0.02)


def measured(layout: str, **options: str) -> dict[str, Any]:
    """What rank 0 of a run holds; small allocations too go back to the system when freed."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"} | options
    command = ["-m", "tutti", "run", "--layout", layout, SCRIPT]
    done = forked.run(command, env=environment, cwd=Path.cwd(), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc to measure with")
def test_the_process_holds_what_the_layout_says() -> None:
    """P bytes of parameters with two slots: 3 P whole, 1.5 P in halves, and no copy besides."""
    whole, halves = (measured(x, TUTTI_SHARED_MEMORY="off") for x in ("data=2", "data=2 zero=3"))
    nbytes = whole["nbytes"]
    assert nbytes > 60e6
    saved = whole["steady"] - halves["steady"]
    assert saved == pytest.approx(1.5 * nbytes, rel=0.25)
    assert whole["peak"] - halves["peak"] > 1.2 * nbytes  # also within a step
    for found, state in ((whole, 3.0), (halves, 1.5)):
        assert found["steady"] - found["before"] < state * nbytes + REST


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc to measure with")
def test_what_ranks_share_they_hold_once() -> None:
    """The same in shared memory, where a page that two ranks map counts half for each.

    Gradients have buffers of their own there: P more where each rank reduces all of them.
    """
    whole, halves = measured("data=2"), measured("data=2 zero=3")
    nbytes = whole["nbytes"]
    assert whole["share"] - halves["share"] > 1.4 * nbytes
    for found, state in ((whole, 4.0), (halves, 2.0)):
        assert found["share"] - found["share_before"] < state * nbytes + REST
