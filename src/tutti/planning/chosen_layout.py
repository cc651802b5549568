"""`layout="auto"`: the first call of a step chooses the layout of its ranks.

Rank 0 estimates the layouts on this machine, and the others wait for its choice: kernels timed twice give two
answers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group
from tutti.errors import PlanError, TuttiError
from tutti.job import Job
from tutti.launch.ranks import ensure_process_group
from tutti.layout import Layout
from tutti.planning.hardware_files import NAME
from tutti.planning.layout_plan import answer
from tutti.planning.this_machine import question_here
from tutti.quantities import format_nbytes, format_seconds

_REFUSED = "refused"


def chosen(job: Job, batch: tuple[Any, ...], given: str) -> tuple[Job, float]:
    """`job` under the fastest layout that fits these ranks, and its predicted seconds; all ranks call it
    together.

    Args:
        job: its own layout does not count.
        batch: of the first call.
        given: words that the layout must have.

    Raises:
        PlanError: no layout fits, or this machine has not been calibrated.
    """
    several = ensure_process_group()
    first = not several or dist.get_rank() == 0
    text = _choice(job, batch, given, dist.get_world_size() if several else 1) if first else ""
    if several:
        text = exchange_texts(text, Group.world())[0]
    said = json.loads(text)
    if _REFUSED in said:
        raise PlanError(said[_REFUSED])
    made = replace(job, layout=Layout.parse(said["layout"]), found=said["found"])
    return made, said["seconds"]


def _choice(job: Job, batch: tuple[Any, ...], given: str, num_ranks: int) -> str:
    """The layout as JSON, with a line about it; or why there is none, for all ranks to raise."""
    try:
        question = question_here(_devices(num_ranks), given=given, num_ranks=num_ranks)
        made = answer(job, batch, question)
        best = made.ranking.best
    except TuttiError as error:
        return json.dumps({_REFUSED: str(error)})
    print(
        f'layout "{best.layout or "one device"}": predicted {format_seconds(best.estimate.seconds)} a step, '
        f"{format_nbytes(best.estimate.peak_nbytes)} on a device",
        file=sys.stderr,
        flush=True,
    )
    found = made.found.get(best.estimate.layout)
    said = {"layout": best.layout, "seconds": best.estimate.seconds}
    return json.dumps(said | {"found": None if found is None else dict(found)})


def _devices(num_ranks: int) -> str:
    """This host alone, or hosts like it, if torchrun has started ranks on several."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return NAME if here >= num_ranks else f"{num_ranks} x {NAME}"
