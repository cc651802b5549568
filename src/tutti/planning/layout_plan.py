"""The plan of a step: which layouts, on which machine, ranked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tutti.job import Job
from tutti.layout import Layout
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planner.hardware.cluster import Cluster
from tutti.planner.search.layout_choices import Space, partial_layout
from tutti.planner.search.ranking import Ranking, ranked
from tutti.planning.candidate_programs import num_rows, with_rows
from tutti.planning.plan_file import Plan, as_records, fingerprint
from tutti.planning.step_estimates import StepEstimates

# The share of a device's memory for a step: the rest is for the runtime, libraries and fragments.
USABLE = 0.92
_MOST_PIPE = 64


@dataclass(frozen=True)
class PlanQuestion:
    """What a plan answers.

    Args:
        cluster: the devices.
        machine: prices a layout's kernels; by default the cluster's data.
        given: words that every layout has.
        rows: samples of the global batch; by default those of the batch at hand.
        capacity: bytes of a device for a step; by default `USABLE` of its memory.
        num_ranks: try only layouts of so many ranks; by default of all devices, or of one.
    """

    cluster: Cluster
    machine: Callable[[Layout], PricedMachine]
    given: str = ""
    rows: int | None = None
    capacity: float | None = None
    num_ranks: int | None = None

    @staticmethod
    def of(cluster: Cluster, **options: Any) -> PlanQuestion:
        """On a cluster that is data."""
        machine = PricedMachine.of(cluster)
        return PlanQuestion(cluster, lambda _: machine, **options)


@dataclass(frozen=True)
class PlanAnswer:
    """Every layout ranked, and what the table shows beside: samples, tokens and operations of a step."""

    ranking: Ranking
    question: PlanQuestion
    rows: int
    tokens: int
    flops: float
    peak: float
    job: Job

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
            layouts=as_records(self.ranking),
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
    layouts = _layouts(job, rows, question)
    estimates = StepEstimates(job, batch, question.machine, num_layouts=len(layouts))
    device = question.cluster.device
    capacity = question.capacity or USABLE * device.capacity.value
    done = iter(range(len(layouts)))
    ranking = ranked(
        layouts,
        estimates,
        capacity,
        refined=estimates.refined if estimates.is_refinable else None,
        seen=lambda _: seen(next(done), len(layouts)),
    )
    return PlanAnswer(
        ranking=ranking,
        question=question,
        rows=rows,
        tokens=estimates.num_tokens,
        flops=estimates.flops(),
        peak=device.peak_of(estimates.dtype),
        job=job,
    )


def _layouts(job: Job, rows: int, question: PlanQuestion) -> list[Layout]:
    """Of all devices; of one device, too, unless the user fixed the ranks or gave an axis."""
    axes = ["data", "pipe", "tensor"]
    used = {word for text in job.place.values() for word in text.replace("+", ",").split(",")}
    axes += [a for a in ("seq", "expert") if a in {word.strip() for word in used}]
    host = question.cluster.topology.host_size
    most = (("tensor", host), ("pipe", min(_MOST_PIPE, _most_stages(job.model))))
    count = question.num_ranks or question.cluster.count
    space = Space(count, rows, tuple(axes), question.given, most)
    layouts = space.layouts()
    if question.num_ranks is None and count > 1 and not partial_layout(question.given).axes:
        words = {word.partition("=")[0]: word for word in question.given.split()}
        alone = " ".join(w for name, w in words.items() if name not in ("zero", "schedule"))
        layouts += Space(1, rows, (), alone).layouts()
    return layouts


def _most_stages(model: nn.Module) -> int:
    """Modules with parameters of their own: a cut needs one for each stage."""
    return sum(1 for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
