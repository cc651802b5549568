"""`tutti plan`: which layout is the fastest that fits, before anything runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.script_options import SCRIPT, IsModule, ScriptArguments
from tutti.durable import check_file
from tutti.errors import PlanError
from tutti.launch.script import Script

if TYPE_CHECKING:
    from tutti.distributed_step import Step
    from tutti.planner.search.ranking import Ranking
    from tutti.planning.layout_plan import PlanAnswer, PlanQuestion


def plan(
    script: Annotated[Script, SCRIPT],
    script_args: ScriptArguments = None,
    is_module: IsModule = False,
    devices: Annotated[
        str | None,
        typer.Option(help='Such as "64 x h100", "16 x this-machine", or a hardware file.'),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="Links and hosts: a name or a file; by default those of the device.")
    ] = "",
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a step; by default those of the script's.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help='Words that every layout has, such as "precision=bf16 zero=1".')
    ] = "",
    vary_precision: Annotated[
        bool,
        typer.Option(
            "--vary-precision", help="Try every precision: another one is another computation."
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", min=1, help="Layouts of so many ranks; by default of all devices, or one."
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help='Memory of a device for a step, such as "70GB".')
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Every layout as JSON.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Compare the best layout with the runner-up.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two layouts.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the best layout as a plan that runs.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 15,
) -> None:
    """Rank every layout of SCRIPT's first training step by predicted time; runs nothing."""
    if devices is not None and not devices.strip():
        raise PlanError(
            "--devices is empty",
            why="without the option the plan is for this machine",
            fix='--devices "64 x h100", or leave it out',
        )
    if diff is not None and save is not None:
        raise PlanError(
            "--save does not go with --diff",
            why="a comparison estimates two layouts alone, a plan is the best one of all",
            fix="leave one of the two out",
        )
    question = _question(devices, topology, global_batch, layout, memory, ranks, vary_precision)
    from tutti.cli.look import look
    from tutti.planner.search.layout_choices import with_given
    from tutti.planning.layout_plan import answer
    from tutti.planning.plan_file import as_records
    from tutti.planning.plan_progress import PlanProgress

    if diff is not None:
        diff = with_given(diff[0], question.given), with_given(diff[1], question.given)
    question = replace(question, every=as_json or diff is not None, only=diff or ())
    if save is not None:
        check_file(save, "the plan")

    progress = PlanProgress()

    def seen(step: Step, batch: tuple[Any, ...]) -> PlanAnswer:
        return answer(step.mode.running.job, batch, question, seen=progress)

    def show(made: PlanAnswer) -> None:
        progress(0, 0)
        if diff is not None:
            print(_difference(made.ranking, diff, as_json=as_json), flush=True)
            return
        if as_json:
            print(json.dumps(as_records(made.ranking.rows), indent=1), flush=True)
            for sentence in _not_listed(made, every=True):
                print(sentence, file=sys.stderr)
        else:
            print(_text(made, why, top), flush=True)
        _ = made.ranking.best  # an error, if none fits
        if save is not None:
            from tutti.version import VERSION

            made.plan(VERSION, devices or "this machine").write(save)

    look(script, script_args or [], "", seen, show)


def _difference(ranking: Ranking, diff: tuple[str, str], *, as_json: bool) -> str:
    """Two layouts side by side, or their records in this order."""
    from tutti.planning.plan_file import as_records
    from tutti.report.plan_table import compared

    first, second = (ranking.row(text) for text in diff)
    return json.dumps(as_records((first, second)), indent=1) if as_json else compared(first, second)


def _question(
    devices: str | None,
    topology: str,
    rows: int | None,
    layout: str,
    memory: str,
    ranks: int | None,
    vary_precision: bool,
) -> PlanQuestion:
    import torch

    from tutti.cli.given_layout import refuse_auto
    from tutti.planning.hardware_files import NAME, cluster_of, is_here

    refuse_auto(layout)
    cluster = cluster_of(devices, topology or None) if devices and not is_here(devices) else None
    # Imports of seconds, behind the refusals.
    from tutti.calibration.other_work import PLAN, warn_of_other_work
    from tutti.layout.layout import PRECISIONS
    from tutti.planner.search.layout_choices import words_of
    from tutti.planning.layout_plan import PlanQuestion, refuse_replicas
    from tutti.planning.plan_file import parse_nbytes
    from tutti.planning.this_machine import question_here

    refuse_replicas(layout)
    if vary_precision and "precision" in words_of(layout):
        raise PlanError(
            f'--vary-precision, and "{layout}" names one',
            why="a layout of the table has one precision",
            fix="leave one of the two out",
        )
    options: dict[str, Any] = {
        "precisions": PRECISIONS if vary_precision else (),
        "given": layout,
        "rows": rows,
        "capacity": parse_nbytes(memory) if memory else None,
        "num_ranks": ranks,
    }
    if cluster is not None:
        return PlanQuestion.of(cluster, **options)
    question = question_here(devices or NAME, topology or None, **options)
    if not torch.cuda.is_available():  # the plan times kernels here
        warn_of_other_work(PLAN)
    return question


def _text(made: PlanAnswer, why: bool, top: int) -> str:
    from tutti.report.plan_table import StepScale, compared, distinct, plan_table

    ranking = made.ranking
    scale = StepScale(made.rows, made.tokens, made.flops, made.peaks)
    text = [plan_table(ranking, scale, top)]
    if why and len(rows := distinct(ranking.rows)) > 1:
        text.append(compared(rows[0][0], rows[1][0]))
    if ranking.rows and ranking.rows[0].fits:
        text += about_figures(made)
    if other := made.faster_precision:
        text.append(
            f"Not tried: precision={other}, another computation, in which these devices are faster "
            "(--vary-precision tries it, too)."
        )
    if ranking.refused:
        layout, reason = ranking.refused[0]
        text.append(f'{len(ranking.refused)} layouts are refused, such as "{layout}": {reason}')
    text += _not_listed(made, every=why)
    return "\n\n".join(text)


def about_figures(made: PlanAnswer) -> list[str]:
    """What the columns of the table count, and how exact they are."""
    from tutti.planner.search.ranking import NUM_REFINED

    several = len(made.peaks) > 1
    peaks = [f"{x:.3g}" + (f" in {name}" if several else "") for name, x in made.peaks.items()]
    text = [
        f"{made.rows} samples a step. MFU: operations of the model, attention over all pairs of tokens, "
        "nothing recomputed (a backward counts twice its forward), of the dense peak, "
        f"{' and '.join(peaks)} FLOP/s a device."
    ]
    text += _of_the_first(made)
    text += [
        f"Under precision={name} most operations stay {op.dtype}, so the peak of the MFU is that of "
        f"{op.dtype}: {op.name}{f' at {op.source}' if op.source else ''} has {op.share:.0%} of all "
        "operations, and torch.autocast does not cast its operands."
        for name, op in made.wide.items()
    ]
    if made.composes == "layers":
        text.append(
            "The model's layers repeat, so estimates are composed of pieces: most times are within 5 % of "
            "those of whole programs, most peaks within 10 %."
        )
    elif made.composes:
        text.append(
            f"The first {NUM_REFINED} layouts have estimates of their own programs. The estimates of the "
            "others are composed of pieces: most times are within 20 %, most peaks within 30 %."
        )
    return text


def _of_the_first(made: PlanAnswer) -> list[str]:
    """What the kernels of the first layout wait for."""
    from tutti.costs.kernel_seconds import ARITHMETIC, LAUNCHES, MEMORY

    limits = made.ranking.rows[0].estimate.limits
    whole = sum(limits.values())
    if not whole:
        return []
    shares = {limit: limits.get(limit, 0.0) / whole for limit in (ARITHMETIC, MEMORY, LAUNCHES)}
    return [
        f"Of the first layout's compute, {shares[ARITHMETIC]:.0%} is in kernels that arithmetic bounds, "
        f"{shares[MEMORY]:.0%} in those that bytes of memory bound, and {shares[LAUNCHES]:.0%} in those "
        "whose launch takes longer than their work."
    ]


def _not_listed(made: PlanAnswer, *, every: bool) -> list[str]:
    """Why layouts and axes are not in the table: in one sentence, or every reason."""
    left_out = made.ranking.left_out
    counts = Counter(reason for _, reason in left_out)
    if every:
        said = [f"{count} layouts are left out: {reason}" for reason, count in counts.items()]
        return [*said, *made.not_tried]
    if not counts:
        return []
    layout, reason = left_out[0]
    return [f'{len(left_out)} layouts are left out, such as "{layout}": {reason}']
