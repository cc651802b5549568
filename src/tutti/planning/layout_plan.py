"""The plan of a step: which layouts, on which machine, ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tutti.errors import PlanError
from tutti.execution.collector import rarely_collected
from tutti.hardware.accelerator import Device
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.estimates.wide_ops import WideOp
from tutti.planner.search.layout_choices import Space, partial_layout, words_of
from tutti.planner.search.ranking import Ranking, ranked
from tutti.planning.candidate_programs import num_rows, with_rows
from tutti.planning.plan_file import Plan, as_records, fingerprint
from tutti.planning.step_estimates import StepEstimates
from tutti.planning.tried_axes import TriedAxes, tried_axes

# The share of a device's memory for a step: the rest is for the runtime, libraries and fragments.
USABLE = 0.92
# Layouts that are tried only if the best one of the others lets expect something from them.
_LATER = {
    "below_sample": "with seq are not tried: they only hold less than a sample on a rank, and the "
    "fastest layout has room for whole samples",
    "expert_and_tensor": "with expert and tensor are not tried: the fastest layout has none of them",
}


@dataclass(frozen=True)
class PlanQuestion:
    """What a plan answers.

    Args:
        cluster: the devices.
        machine: prices a layout's kernels; by default the cluster's data.
        given: words that every layout has.
        rows: samples of the global batch; by default those of the batch at hand.
        capacity: bytes of a device for a step; by default `USABLE` of its memory.
        num_ranks: try only layouts of so many ranks, one a device; by default of all devices, or of one.
        precisions: of the layouts; by default that of `given`.
        every: estimate layouts of a deep model that do not fit with smaller micro-batches either.
        only: estimate just these layouts; by default all.

    Raises:
        PlanError: fewer devices than ranks; a layout of `only` has another number of ranks.
        LayoutError: a text of `only` is no layout.
    """

    cluster: Cluster
    machine: Callable[[Layout], PricedMachine]
    given: str = ""
    rows: int | None = None
    capacity: float | None = None
    num_ranks: int | None = None
    precisions: tuple[str, ...] = ()
    every: bool = False
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = self.cluster.count
        if self.num_ranks is not None and self.num_ranks > count:
            raise PlanError(
                f"layouts of {self.num_ranks} ranks on {count} {'device' if count == 1 else 'devices'}",
                why="each rank has a device of its own",
                fix=f'-n {count} or fewer, or "tutti plan --devices" with {self.num_ranks} devices',
            )
        known = [self.num_ranks or count] + ([1] if self.has_alone else [])
        for layout in map(Layout.parse, self.only):
            if (needed := layout.num_ranks) not in known:
                counts = " or ".join(map(str, sorted(set(known))))
                raise PlanError(
                    f'no estimate of layout "{layout}"',
                    why=f"it has {needed} ranks, and the layouts of this plan have {counts}",
                    fix=f'--devices "{needed} x ...", or -n {needed} if there are more devices',
                )

    @property
    def has_alone(self) -> bool:
        """Whether one device is tried, too: unless the user fixed the ranks or gave an axis."""
        several = self.cluster.count > 1
        return self.num_ranks is None and several and not partial_layout(self.given).axes

    @staticmethod
    def of(cluster: Cluster, **options: Any) -> PlanQuestion:
        """On a cluster that is data."""
        machine = PricedMachine.of(cluster)
        return PlanQuestion(cluster, lambda _: machine, **options)


@dataclass(frozen=True)
class PlanAnswer:
    """Every layout ranked, and what the table shows beside: samples, tokens and operations of a step.

    peaks: dense FLOP/s of a device, by precision. not_tried: sentences about axes that the plan does not try.
    found: placements of least memory, of the layouts that fit with these alone. composes: of what estimates
    are composed: `layers` that repeat, `modules` (the first `NUM_REFINED` layouts have their own programs),
    or "". wide: by precision what stays in a wider dtype, where most operations do.
    """

    ranking: Ranking
    question: PlanQuestion
    rows: int
    tokens: int
    flops: float
    peaks: Mapping[str, float]
    job: Job
    not_tried: tuple[str, ...] = ()
    found: Mapping[Layout, Mapping[str, str]] = field(default_factory=dict)
    composes: str = ""
    wide: Mapping[str, WideOp] = field(default_factory=dict)

    @property
    def faster_precision(self) -> str | None:
        """One that the plan has not tried and in which the devices have a higher peak."""
        if self.question.precisions or "precision" in words_of(self.question.given):
            return None
        device, own = self.question.cluster.device, max(self.peaks.values())
        return "bf16" if device.peak_of(torch.bfloat16) > own else None

    def plan(self, version: str, devices: str) -> Plan:
        """The best layout as a plan.

        Raises:
            PlanError: none fits.
        """
        best = self.ranking.best
        return Plan(
            layout=best.layout,
            place=dict(self.job.place),
            devices=devices,
            num_ranks=best.estimate.layout.num_ranks,
            rows=self.rows,
            model=fingerprint(self.job.model),
            version=version,
            seconds=best.estimate.seconds,
            peak_nbytes=best.estimate.peak_nbytes,
            layouts=as_records(self.ranking.rows),
            found=self.found.get(best.estimate.layout),
        )


def usable_nbytes(device: Device) -> float:
    """Bytes of a device for a step."""
    return USABLE * device.capacity.value


def refuse_replicas(words: str) -> None:
    """Raise `PlanError` for words of a layout with replicas, which a plan does not compare."""
    given = partial_layout(words)
    if given.num_replicas > 1 or given.sync or given.server:
        raise PlanError(
            f'"{words}" has replicas, which compute another step than one device',
            why="a plan compares layouts of the same step",
            fix="leave replica, sync and server out, or give the whole layout, without auto",
        )


def answer(
    job: Job,
    batch: tuple[Any, ...],
    question: PlanQuestion,
    *,
    seen: Callable[[int, int], object] = lambda done, total: None,
) -> PlanAnswer:
    """Rank the layouts of a step.

    Args:
        job: its own layout does not count.
        batch: of a call; `question.rows` changes its number of samples.
        question: devices, words, memory.
        seen: called with (layouts done, layouts) before each.

    Raises:
        CaptureError: the step cannot be captured.
        PlanError: no layout divides the batch or the devices.
    """
    if question.rows is not None and question.rows != num_rows(batch):
        batch = with_rows(batch, question.rows)
    rows = num_rows(batch)
    given = partial_layout(question.given)
    job = replace(job, layout=given)
    tried = tried_axes(job.model, batch, job.place, question.cluster.topology.host_size)
    space = _space(question, tried, rows)
    layouts = [*space.layouts(), *_alone(question, rows)]
    later = partial(_beyond, layouts)
    asked = _asked(question, layouts, later(replace(space, **dict.fromkeys(_LATER, True))))
    device = question.cluster.device
    capacity = question.capacity or usable_nbytes(device)
    sizes = {"num_layouts": len(layouts), "capacity": capacity, "every": question.every}
    estimates = StepEstimates(job, batch, question.machine, **sizes)

    def ranking_of(layouts: list[Layout]) -> Ranking:
        done = iter(range(len(layouts)))
        return ranked(
            *estimates.of_many(layouts),
            capacity,
            refined=estimates.refinement,
            paced=estimates.paced,
            seen=lambda _: seen(next(done), len(layouts)),
        )

    not_tried, wanted = tried.not_tried, dict[str, bool]()
    with rarely_collected():
        ranking = ranking_of(asked)
        if not question.only:
            wanted = _wanted_later(ranking)
            ranking = ranking.merged(ranking_of(later(replace(space, **wanted))))
    for word in (word for word, is_wanted in wanted.items() if not is_wanted):
        if left := later(replace(space, **{word: True})):
            not_tried += (f"{len(left)} layouts {_LATER[word]}",)
    precisions = _precisions(ranking, given)
    return PlanAnswer(
        ranking=ranking,
        question=question,
        rows=rows,
        tokens=estimates.num_tokens,
        flops=estimates.flops(),
        peaks={x: device.peak_of(estimates.dtype_of(x)) for x in precisions},
        job=job,
        not_tried=not_tried,
        found=estimates.found,
        composes=estimates.composes,
        wide={x: op for x in precisions if (op := estimates.wide_op(x)) is not None},
    )


def _asked(question: PlanQuestion, layouts: list[Layout], more: list[Layout]) -> list[Layout]:
    """Those to estimate: all `layouts`, or those that the question names, of `more`, too.

    Raises:
        PlanError: the plan has no such layout.
    """
    if not question.only:
        return layouts
    known = {str(x): x for x in (*layouts, *more)}
    asked = [str(Layout.parse(text)) for text in question.only]
    for text in asked:
        if text not in known:
            raise PlanError(
                f'no estimate of layout "{text}"', why="it is not among the layouts of this plan"
            )
    return [known[text] for text in dict.fromkeys(asked)]


def _precisions(ranking: Ranking, given: Layout) -> list[str]:
    """Of the layouts that the step allows."""
    found = (row.estimate.layout.precision for row in ranking.rows)
    return list(dict.fromkeys(found)) or [given.precision]


def _wanted_later(ranking: Ranking) -> dict[str, bool]:
    """Which of `_LATER` to try: those that save memory if the best layout gives time for it, or none fits."""
    best = ranking.rows[0] if ranking.rows else None
    if best is None or not best.fits:
        return dict.fromkeys(_LATER, True)
    layout = best.estimate.layout
    splits_weights = bool({"tensor", "expert"} & set(layout.axes))
    is_short = layout.remat != "none" or splits_weights
    return {"below_sample": is_short, "expert_and_tensor": splits_weights}


def _beyond(layouts: list[Layout], space: Space) -> list[Layout]:
    """The layouts of a larger space."""
    known = set(layouts)
    return [x for x in space.layouts() if x not in known]


def _space(question: PlanQuestion, tried: TriedAxes, rows: int) -> Space:
    """Of all devices, or of as many ranks as the question says."""
    return Space(
        question.num_ranks or question.cluster.count,
        rows,
        tried.names,
        question.given,
        tried.most,
        tried.inner,
        **dict.fromkeys(_LATER, False),
        precisions=question.precisions,
    )


def _alone(question: PlanQuestion, rows: int) -> list[Layout]:
    """Of one device, where it is tried."""
    if not question.has_alone:
        return []
    words = words_of(question.given).items()
    alone = " ".join(w for name, w in words if name not in ("zero", "schedule"))
    return Space(1, rows, (), alone, precisions=question.precisions).layouts()
