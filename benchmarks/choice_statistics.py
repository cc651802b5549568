"""What `chosen_layouts` computes from predictions and times: candidates, finalists, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tutti.quantities import format_nbytes

# Times of a layout, a round each, in the same order for all layouts.
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Candidate:
    """A layout as the planner sees it. call_nbytes: the part of the peak that a call allocates."""

    layout: str
    seconds: float
    peak_nbytes: int
    call_nbytes: int


@dataclass(frozen=True)
class Question:
    """One case: which layout, within `bound_nbytes` a rank?

    share: the bound as a share of what `data` needs.
    """

    model: str
    num_ranks: int
    share: float | None
    bound_nbytes: float
    num_layouts: int
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """Such as `gpt n=2 60%`."""
        return case_name(self.model, self.num_ranks, self.share)

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Those within the bound, the fastest by prediction first."""
        return tuple(c for c in self.candidates if c.peak_nbytes <= self.bound_nbytes)

    @property
    def chosen(self) -> Candidate:
        """The planner's choice."""
        return self.fitting[0]

    def measured(self, factor: float) -> list[str]:
        """The layouts to measure: predicted within `factor` of the best."""
        return [c.layout for c in self.fitting if c.seconds <= factor * self.chosen.seconds]


@dataclass(frozen=True)
class Answer:
    """What was measured for a question.

    num_measured: layouts of the first rounds. seconds, best_seconds: medians of the final rounds. ratio: of
    the chosen layout's time and the best one's. peak_nbytes: of the chosen layout, measured.
    """

    question: Question
    num_measured: int
    seconds: float
    best: str
    best_seconds: float
    ratio: float
    peak_nbytes: int


@dataclass(frozen=True)
class Placed:
    """An example under one layout: medians by hand and by the search; `ratio` is found / by hand."""

    example: str
    layout: str
    hand_seconds: float
    found_seconds: float
    ratio: float


def case_name(model: str, num_ranks: int, share: float | None) -> str:
    """Such as `gpt n=2 60%`; without a bound `gpt n=2 free`."""
    return f"{model} n={num_ranks} {'free' if share is None else f'{share:.0%}'}"


def questions_of(
    model: str,
    num_ranks: int,
    candidates: Iterable[Candidate],
    shares: Iterable[float | None],
) -> list[Question]:
    """A question for each bound under which some layout fits.

    A bound is a share of the peak of `data` alone, of one device for one rank; 5 % above the least peak of
    all layouts, if that is more: a bound that nothing keeps is no question.
    """
    found = tuple(sorted(candidates, key=lambda c: c.seconds))
    plain = f"data={num_ranks}" if num_ranks > 1 else ""
    whole = next(c.peak_nbytes for c in found if c.layout == plain)
    least = 1.05 * min(c.peak_nbytes for c in found)
    bounds = {s: float("inf") if s is None else max(s * whole, least) for s in shares}
    sizes = {"num_layouts": len(found), "candidates": found}
    return [Question(model, num_ranks, s, bound, **sizes) for s, bound in bounds.items()]


def finalists(times: Times, chosen: str, fitting: Iterable[str], most: int) -> list[str]:
    """The chosen layout and the `most` fastest of the others that fit, by the medians of the first rounds."""
    others = [x for x in fitting if x != chosen and x in times]
    return [chosen, *sorted(others, key=lambda x: statistics.median(times[x]))[:most]]


def ratio_to_best(times: Times, chosen: str) -> tuple[str, float]:
    """The layout beside which the chosen one is slowest, and that ratio: at least 1, beside itself."""
    ratios = {x: ratio_of(times[chosen], times[x]) for x in times}
    best = max(ratios, key=lambda x: ratios[x])
    return (best, ratios[best]) if ratios[best] > 1 else (chosen, 1.0)


def ratio_of(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: each round begins with another layout, every second one goes backward."""
    at = turn % max(1, len(names))
    order = [*names[at:], *names[:at]]
    return order[::-1] if turn % 2 else order


def choice_table(answers: Sequence[Answer]) -> str:
    """A row for each question, as Markdown."""
    lines = [
        "| model | ranks | bound | layouts: all, fit, measured | chosen | ms | predicted ms | best | ms | "
        "chosen / best |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for a in answers:
        q = a.question
        counts = f"{q.num_layouts}, {len(q.fitting)}, {a.num_measured}"
        best = "the same" if a.best == q.chosen.layout else _word(a.best)
        lines.append(
            f"| {q.model} | {q.num_ranks} | {_bound(q)} | {counts} | {_word(q.chosen.layout)} | "
            f"{1e3 * a.seconds:.1f} | {1e3 * q.chosen.seconds:.1f} | {best} | "
            f"{1e3 * a.best_seconds:.1f} | {a.ratio:.3f} |"
        )
    return "\n".join(lines)


def place_table(found: Sequence[Placed]) -> str:
    """A row for each example and layout, as Markdown."""
    lines = [
        "| example | layout | by hand, ms | found, ms | found / by hand |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {p.example} | `{p.layout}` | {1e3 * p.hand_seconds:.1f} | {1e3 * p.found_seconds:.1f} | "
        f"{p.ratio:.3f} |"
        for p in found
    ]
    return "\n".join(lines)


def summary(answers: Sequence[Answer], within: float = 1.03) -> str:
    """How many choices are near the best, the worst one, and whether peaks keep their bounds."""
    if not answers:
        return "No layouts were measured."
    good = sum(a.ratio <= within for a in answers)
    worst = max(answers, key=lambda a: a.ratio)
    over = [a for a in answers if a.peak_nbytes > a.question.bound_nbytes]
    text = (
        f"{good} of {len(answers)} choices are within {within - 1:.0%} of the fastest measured layout that "
        f"fits; mean {statistics.mean(a.ratio for a in answers):.3f}, worst {worst.ratio:.3f} "
        f"({worst.question.name})."
    )
    names = ", ".join(
        f"{a.question.name} by {a.peak_nbytes / a.question.bound_nbytes - 1:.1%}" for a in over
    )
    return f"{text} {f'Above their bound: {names}.' if over else 'Every chosen layout keeps its bound.'}"


def _bound(question: Question) -> str:
    if question.share is None:
        return "none"
    return format_nbytes(question.bound_nbytes)


def _word(layout: str) -> str:
    return f"`{layout}`" if layout else "one device"
