"""The tables of `tutti plan`: every layout, and two layouts compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.planner.estimates.graph_clock import COMPUTE
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planner.search.ranking import RankedLayout, Ranking
from tutti.quantities import format_nbytes, format_seconds
from tutti.report.text_table import columns

# Seconds that the faster layout needs more are told above this share of those that it needs less.
_TOLD = 0.1
LINKS = {"inside": "in host", "between": "between"}


@dataclass(frozen=True)
class StepScale:
    """What turns seconds into rates: samples, tokens and operations of a step, devices and their peak.

    flops: of the model, without recomputation, attention over all pairs of tokens. peaks: FLOP/s of a device,
    dense, in the dtype of the forward, by the layout's precision.
    """

    samples: int
    tokens: int
    flops: float
    peaks: Mapping[str, float]

    def rate(self, estimate: Estimate) -> str:
        """Tokens a second of all devices, else samples."""
        count = self.tokens or self.samples
        return (
            f"{count / estimate.seconds:,.0f}"
            if count / estimate.seconds >= 100
            else (f"{count / estimate.seconds:.3g}")
        )

    def utilization(self, estimate: Estimate) -> float:
        """The share of the devices' dense peak that the model's own operations use (MFU)."""
        layout = estimate.layout
        peak = self.peaks[layout.precision]
        return self.flops / (estimate.seconds * layout.num_ranks * peak)


def plan_table(ranking: Ranking, scale: StepScale, most: int) -> str:
    """The best `most` layouts, and those that do not fit."""
    head = (
        "",
        "layout",
        "step",
        "tokens/s" if scale.tokens else "samples/s",
        "MFU",
        "peak memory",
        "in host",
        "between",
        "bound by",
    )
    fit = distinct([row for row in ranking.rows if row.fits])
    rows = [_cells(str(i), row, scale) for i, (row, _) in enumerate(fit[:most], 1)]
    if any(others for _, others in fit[:most]):
        head += ("the same with",)
        rows = [(*x, _named(*one)) for x, one in zip(rows, fit[:most], strict=True)]
    text = [columns(head, rows)] if rows else []
    if len(fit) > most:
        text.append(f"and {len(fit) - most} more that fit (--top {len(fit)} shows them)")
    if over := [row for row in ranking.rows if not row.fits]:
        text.append(_over(over, ranking, most))
    return "\n\n".join(text)


def distinct(rows: Sequence[RankedLayout]) -> list[tuple[RankedLayout, list[RankedLayout]]]:
    """Each layout, and those that differ from it in words alone that do nothing: they have more words and the
    same time, memory and bytes."""
    found: list[tuple[RankedLayout, list[RankedLayout]]] = []
    alike: dict[Any, list[tuple[RankedLayout, list[RankedLayout]]]] = {}
    for row in sorted(rows, key=lambda row: len(row.layout.split())):
        one, words = row.estimate, set(row.layout.split())
        key = one.layout.mesh, one.seconds, one.peak_nbytes, tuple(sorted(one.nbytes.items()))
        before = alike.setdefault(key, [])
        first = next((x for x in before if set(x[0].layout.split()) <= words), None)
        if first is not None:
            first[1].append(row)
            continue
        before.append((row, []))
        found.append(before[-1])
    place = {id(row): i for i, row in enumerate(rows)}
    return sorted(found, key=lambda one: place[id(one[0])])


def _named(row: RankedLayout, others: Sequence[RankedLayout]) -> str:
    """The words that do nothing, of at most two layouts."""
    own = set(row.layout.split())
    words = [" ".join(w for w in x.layout.split() if w not in own) for x in others]
    more = f", {len(words) - 2} more" if len(words) > 2 else ""
    return ", ".join(words[:2]) + more


def _cells(number: str, row: RankedLayout, scale: StepScale) -> tuple[str, ...]:
    one = row.estimate
    return (
        number,
        name_of(row.layout),
        format_seconds(one.seconds),
        scale.rate(one),
        f"{scale.utilization(one):.1%}",
        format_nbytes(one.peak_nbytes),
        *(format_nbytes(one.nbytes.get(link, 0)) for link in LINKS),
        one.bound_by,
    )


def _over(rows: Sequence[RankedLayout], ranking: Ranking, most: int) -> str:
    capacity, number = ranking.capacity, len(rows) + len(ranking.beyond)
    head = f"{number} do not fit {format_nbytes(capacity)}; the nearest:"
    cells = [
        (
            name_of(row.layout),
            format_nbytes(row.estimate.peak_nbytes),
            f"{format_nbytes(row.estimate.peak_nbytes - capacity)} too many",
        )
        for row, _ in distinct(rows)[: min(most, 5)]
    ]
    text = f"{head}\n{columns(('layout', 'peak memory', ''), cells)}"
    if not ranking.beyond:
        return text
    return (
        f"{text}\n\n{len(ranking.beyond)} of them have no estimate, since they do not fit with smaller "
        "micro-batches either (--json estimates them, too)."
    )


def name_of(layout: str) -> str:
    """One device has an empty layout."""
    return layout or "(one device)"


def compared(first: RankedLayout, second: RankedLayout) -> str:
    """Two layouts side by side, and the differences that decide."""
    one, other = first.estimate, second.estimate
    names = name_of(first.layout), name_of(second.layout)
    kinds = list(dict.fromkeys((*one.kinds, *other.kinds)))
    rows = [("step", *map(format_seconds, (one.seconds, other.seconds)))]
    for kind in kinds:
        rows.append((f"  {kind}", *(format_seconds(x.kinds.get(kind, 0.0)) for x in (one, other))))
        if kind == COMPUTE:
            limits = list(dict.fromkeys((*one.limits, *other.limits)))
            rows += [
                (f"    {limit}", *(format_seconds(x.limits.get(limit, 0.0)) for x in (one, other)))
                for limit in limits
            ]
    rows.append(
        ("  collectives beside compute", *(format_seconds(x.hidden_seconds) for x in (one, other)))
    )
    for link, words in LINKS.items():
        rows.append(
            (f"sent {words}", *(format_nbytes(x.nbytes.get(link, 0)) for x in (one, other)))
        )
    rows.append(("peak memory", *(format_nbytes(x.peak_nbytes) for x in (one, other))))
    rows.append(("fits", *("yes" if r.fits else "no" for r in (first, second))))
    return f"{columns(('', *names), rows)}\n\n{_sentence(first, second, kinds)}"


def _sentence(first: RankedLayout, second: RankedLayout, kinds: Sequence[str]) -> str:
    one, other = first.estimate, second.estimate
    if not second.fits and first.fits:
        return f"{name_of(second.layout)} does not fit."
    ratio = other.seconds / one.seconds
    if f"{ratio:.3g}" == "1":
        alike = one.nbytes == other.nbytes and one.peak_nbytes == other.peak_nbytes
        both = f"{name_of(first.layout)} and {name_of(second.layout)}"
        if alike and one.seconds == other.seconds:
            return f"{both} are equal: they take the same time and memory, and send as many bytes."
        return f"{both} are equally fast, within 0.5 %."
    fast, slow = (first, second) if ratio >= 1 else (second, first)
    slower, faster = slow.estimate.kinds, fast.estimate.kinds
    gains = {k: slower.get(k, 0.0) - faster.get(k, 0.0) for k in kinds or (COMPUTE,)}
    most = max(gains, key=gains.__getitem__)
    lost = sorted((-gain, k) for k, gain in gains.items() if -gain > _TOLD * gains[most])
    costs = " and ".join(f"{format_seconds(x)} more for {kind}" for x, kind in reversed(lost))
    needs = f"{format_seconds(abs(gains[most]))} less for {most}" + (
        f", and {costs}" if costs else ""
    )
    return (
        f"{name_of(fast.layout)} is {max(ratio, 1 / ratio):.3g} times as fast as {name_of(slow.layout)}: it "
        f"needs {needs}."
    )
