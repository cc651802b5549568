"""`layout="auto"`: the first call of a step chooses the layout of its ranks.

Rank 0 estimates the layouts on this machine, and the others wait for its choice, however long it takes:
kernels timed twice give two answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tutti.comm.collectives.made_by_first import made_by_first
from tutti.errors import CommError, PlanError, TuttiError
from tutti.job import Job
from tutti.launch.ranks import ensure_process_group
from tutti.layout import Layout
from tutti.planning.hardware_files import NAME
from tutti.planning.layout_plan import answer, refuse_replicas
from tutti.planning.plan_progress import PlanProgress
from tutti.planning.this_machine import question_here
from tutti.quantities import format_nbytes, format_seconds

_REFUSED = "refused"
_NAME = "the choice of a layout, which rank 0 plans"


def chosen(job: Job, batch: tuple[Any, ...], given: str) -> tuple[Job, float]:
    """`job` under the fastest layout that fits these ranks, and its predicted seconds; all ranks call it
    together.

    Args:
        job: its own layout does not count.
        batch: of the first call.
        given: words that the layout must have.

    Raises:
        PlanError: no layout fits, this machine has not been calibrated, or the words have replicas.
        CommError: a rank has gone meanwhile.
    """
    refuse_replicas(given)
    several = ensure_process_group()
    num_ranks = dist.get_world_size() if several else 1

    def choice(check: Callable[[], None]) -> str:
        return _choice(job, batch, given, num_ranks, check)

    text = made_by_first(choice, _NAME) if several else choice(lambda: None)
    said = json.loads(text)
    if _REFUSED in said:
        raise PlanError(said[_REFUSED])
    made = replace(job, layout=Layout.parse(said["layout"]), found=said["found"])
    return made, said["seconds"]


def _choice(
    job: Job, batch: tuple[Any, ...], given: str, num_ranks: int, check: Callable[[], None]
) -> str:
    """The layout as JSON, with a line about it; or why there is none, for all ranks to raise.

    `check` raises if another rank has gone.
    """
    progress = PlanProgress()

    def seen(done: int, total: int) -> None:
        check()
        progress(done, total)

    try:
        question = question_here(_devices(num_ranks), given=given, num_ranks=num_ranks)
        made = answer(job, batch, question, seen=seen)
        best = made.ranking.best
    except CommError:
        raise
    except TuttiError as error:
        return json.dumps({_REFUSED: str(error)})
    progress(0, 0)
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
