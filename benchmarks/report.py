"""A result as tables (terminal and Markdown) and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.harness import Entry
from benchmarks.result import Race, Result
from benchmarks.targets import verdicts
from tutti.quantities import format_nbytes

# What `python_share` measures, as it is called in the table.
SHARES = {
    "hollow": "all calls hollow",
    "between": "between calls, by the clock",
    "sampled": "in the interpreter, by looks at the thread",
    "outside": "outside of ops and collectives, by the profiler",
}
# What every way is compared with, whatever batch it trains.
ANY_BATCH = ("one", "one x 2")
PEERS = (*ANY_BATCH, "ddp", "fsdp2", "dtensor", "jax")
OURS, THEIRS, ONE = "#08519c", "#9ecae1", "0.6"
NOTE = """Milliseconds are medians over rounds in which all ways take turns, with the range of the middle half
of the rounds. `/ way` is the median over the rounds of the ratio of step times: below 1 is faster. It is
given where both train the same global batch; `/ one` and `/ one x 2` always, where `one` is one process with
the work of one rank, and `one x 2` are two such that wait for each other after each step and sum nothing.
Memory is the peak per rank over what the process held before the model was built; pages that ranks share
count by their share."""


@dataclass
class Table:
    """Rows of text under headers; the first column is aligned left, the others right."""

    title: str
    headers: Sequence[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As a section with a table."""
        lines = [self.headers, ["---", *["---:"] * (len(self.headers) - 1)], *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{body}\n"

    def rich(self) -> rich.table.Table:
        """For the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left", box=None)
        for i, header in enumerate(self.headers):
            table.add_column(header, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def tables(result: Result) -> Iterator[Table]:
    """Everything that was found."""
    yield from map(race_table, result.races)
    yield from findings(result)


def findings(result: Result) -> Iterator[Table]:
    """What stands beside the races: Python's share, collectives, targets."""
    if any(e.shares for race in result.races for e in race.entries):
        yield python_table(result)
    if result.collectives:
        yield collective_table(result)
    found = list(verdicts(result))
    if found:
        rows = [
            [f"{v.subject}: {v.what}", f"{v.measured:.3f}", f"{v.limit:.2f}", "yes" if v.is_met else "no"]
            for v in found
        ]  # fmt: skip
        yield Table("Targets", ["target", "measured", "at most", "met"], rows)


def race_table(race: Race) -> Table:
    """One model: a row a way."""
    headers = ["way", "ms", "middle half", f"{race.unit}/s", "MB per rank"]
    headers += [f"/ {peer}" for peer in PEERS]
    title = f"{race.model}: {race.num_parameters:,} parameters"
    return Table(title, headers, [_row(race, entry) for entry in race.entries])


def _row(race: Race, entry: Entry) -> list[str]:
    if entry.error:
        return [entry.way, entry.error.strip().splitlines()[-1], *[""] * (3 + len(PEERS))]
    low, high = entry.quartiles
    cells = [
        entry.way,
        f"{1e3 * entry.median:.0f}",
        f"{1e3 * low:.0f} - {1e3 * high:.0f}",
        f"{entry.units / entry.median:,.0f}",
        f"{entry.peak_nbytes / 1e6:.0f}",
    ]
    return cells + [_ratio(race, entry.way, peer) for peer in PEERS]


def _ratio(race: Race, way: str, peer: str) -> str:
    comparable = peer in ANY_BATCH or race.same_batch(way, peer)
    ratio = race.time_ratio(way, peer) if comparable and way != peer else None
    return "" if ratio is None else f"{ratio:.2f}"


def python_table(result: Result) -> Table:
    """How much of tutti's steps is Python."""
    rows = [
        [f"{race.model}, {e.way}", *(f"{e.shares[k]:.1%}" if k in e.shares else "" for k in SHARES)]
        for race in result.races
        for e in race.entries
        if e.shares
    ]
    headers = ["model, way", *SHARES.values()]
    return Table("Python, share of a step", headers, rows)


def collective_table(result: Result) -> Table:
    """Two ranks' collectives, by player."""
    players = list(result.collectives[0]["seconds"])
    others = [p for p in players if p != "gloo"]
    rows = [
        [
            f"{c['name']}, {format_nbytes(c['nbytes'])}",
            *(f"{1e3 * c['seconds'][p]:.3f}" for p in players),
            *(f"{c['seconds'][p] / c['seconds']['gloo']:.2f}" for p in others),
        ]
        for c in result.collectives
    ]
    headers = ["collective", *(f"{p} ms" for p in players), *(f"{p} / gloo" for p in others)]
    return Table("Collectives between two ranks", headers, rows)


def markdown(result: Result, picture: str) -> str:
    """The whole result as a page; `picture` is the name of its image."""
    facts = ", ".join(f"{k} {v}" for k, v in result.machine.items() if v)
    pace = ", ".join(f"{k} {v:g}" for k, v in result.pace.items())
    head = f"# {result.date}\n\n{facts}; {pace}\n\n{NOTE}\n\n![{result.date}]({picture})\n"
    return "\n".join([head, *(table.markdown() for table in tables(result))])


def draw(result: Result, path: Path) -> None:
    """A panel a model: a bar a way, with the middle half of the rounds."""
    races = [race for race in result.races if any(not e.error for e in race.entries)]
    if not races:
        return
    figure = Figure(figsize=(8, 0.6 + 2.6 * len(races)), layout="constrained")
    panels = figure.subplots(len(races), squeeze=False)[:, 0]
    for race, axes in zip(races, panels, strict=True):
        _panel(race, axes)
    panels[-1].set_xlabel("ms a step")
    figure.savefig(path, dpi=120)


def _panel(race: Race, axes: Axes) -> None:
    entries = [e for e in reversed(race.entries) if not e.error]
    middle = [1e3 * e.median for e in entries]
    low = [m - 1e3 * e.quartiles[0] for m, e in zip(middle, entries, strict=True)]
    high = [1e3 * e.quartiles[1] - m for m, e in zip(middle, entries, strict=True)]
    colors = [OURS if "tutti" in e.way else ONE if e.way in ANY_BATCH else THEIRS for e in entries]
    labels = [e.way for e in entries]
    bars = axes.barh(labels, middle, color=colors, xerr=[low, high], error_kw={"linewidth": 0.8})
    axes.bar_label(bars, [f" {m:.0f}" for m in middle], fontsize=7)
    axes.set_title(race.model, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def write(result: Result, directory: Path, name: str) -> Path:
    """The JSON, the picture and the page; the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    result.save(directory / f"{name}.json")
    draw(result, directory / f"{name}.png")
    page = directory / f"{name}.md"
    page.write_text(markdown(result, f"{name}.png"))
    return page


def show(found: Iterable[Table], console: Console) -> None:
    """Print tables."""
    for table in found:
        console.print(table.rich(), "")
