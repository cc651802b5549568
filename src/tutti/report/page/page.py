"""Writes the page of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from tutti.durable import write_whole
from tutti.errors import TuttiError
from tutti.quantities import format_nbytes, format_seconds
from tutti.recording.report_folder import PAGE
from tutti.report.page import (
    event_section,
    file_sections,
    program_sections,
    run_sections,
    tensor_section,
    timeline_section,
)
from tutti.report.page.blocks import Section, short
from tutti.report.page.drawing import clean
from tutti.report.page.program_sections import main_facts
from tutti.report.page.run_records import Event, RunRecords, read_run
from tutti.report.page.step_data import StepSeries, series_of
from tutti.report.page.traced_calls import TracedCall, read_traces


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of the run in `folder`, whole; returns its path.

    Raises:
        TuttiError: the folder has no records, or the page cannot be written.
    """
    path = output or folder / PAGE
    content = page_of(folder).encode("utf-8", "replace")
    try:
        write_whole(path, content)
    except OSError as error:
        raise TuttiError(
            f"cannot write the page {path}", why=str(error), fix="--output with another file"
        ) from error
    return path


def page_of(folder: Path) -> str:
    """The page as text.

    Raises:
        TuttiError: the folder has no records.
    """
    run = read_run(folder)
    problems = list(run.problems)
    calls = read_traces(_trace_folder(run), _began(run), problems)
    run = RunRecords(
        run.folder, run.launcher, run.processes, run.verdict, run.plan, tuple(problems)
    )
    steps = series_of(run.leader) if run.leader is not None else []
    facts = main_facts(run)
    mood, state = run_sections.state_of(run)
    return _template().render(
        title=_title(run, steps),
        mood=mood,
        state=state,
        cards=_cards(run, steps, facts),
        sections=_sections(run, steps, facts, calls),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _trace_folder(run: RunRecords) -> Path:
    """The folder itself, or that of the run's `--profile`."""
    told = run.launcher.last.of("run") if run.launcher is not None else []
    named = str(told[-1].get("profile") or "") if told else ""
    return Path(named) if named and Path(named).is_dir() else run.folder


def _began(run: RunRecords) -> float:
    """When the newest run began; 0 without one."""
    first = run.launcher or run.leader
    at = first.last.begin.get("time") if first is not None else None
    return float(at) if isinstance(at, int | float) else 0.0


def _title(run: RunRecords, steps: Sequence[StepSeries]) -> str:
    if run.leader is not None and (argv := run.leader.last.begin.get("argv")):
        return short(Path(str(argv[0])).name)
    if run.launcher is not None and (told := run.launcher.last.of("run")):
        return short(Path(str((told[-1].get("command") or ["run"])[0])).name)
    return steps[0].title if steps else short(run.folder.resolve().name)


def _sections(
    run: RunRecords, steps: Sequence[StepSeries], facts: Event, calls: Sequence[TracedCall]
) -> list[Section]:
    used = str(facts.get("layout", ""))
    every = [
        run_sections.summary(run, steps),
        run_sections.loss(run, steps),
        run_sections.times(run, steps),
        timeline_section.timeline(facts, calls),
        program_sections.memory(run, facts),
        tensor_section.tensors(facts),
        program_sections.collectives(facts, calls),
        file_sections.verdict(run.verdict, used),
        file_sections.plan(run.plan, used),
        event_section.events(run),
    ]
    return [one for one in every if one is not None]


def _cards(run: RunRecords, steps: Sequence[StepSeries], facts: Event) -> list[tuple[str, str]]:
    """The figures at the head of the page."""
    cards = [("layout", short(facts.get("layout") or "one device"))] if facts else []
    training = [one for one in steps if one.trains] or list(steps)
    if training and training[0].points:
        first = training[0]
        cards.append(("steps", f"{first.points[-1][0]:,.0f}"))
        if first.names:
            cards.append((short(f"last {first.names[0]}"), f"{first.points[-1][3]:.4g}"))
        if first.median_seconds is not None:
            cards.append(("median step", format_seconds(first.median_seconds)))
    if memory := facts.get("memory"):
        cards.append(("peak memory, predicted", f"{format_nbytes(memory['peak_nbytes'])} a rank"))
    if run.verdict is not None:
        cards.append(("verified", "yes" if run.verdict.get("ok") is True else "NO"))
    return cards


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("tutti.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    return environment.get_template("page.html.jinja")
