"""Published training rates against the plan of the same setting: tokens per second, peak memory.

    python -m benchmarks.published_rates                      # every row
    python -m benchmarks.published_rates --models "8 H100"    # rows with this in their name
    python -m benchmarks.published_rates --write              # every row, and published_rates.md

Each row of `published_rates.toml` captures a model of Hugging Face on the meta device and asks the planner
for the time and memory of the row's layout, as `tutti plan` does. No constant is fitted to these rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.command_line import parser
from benchmarks.gpt_pieces import sum_in_half
from benchmarks.published_models import PLACES, make_model, train_step
from benchmarks.published_rows import LeftOut, PublishedRow, read_rows
from tutti.hardware.cluster import Cluster
from tutti.job import Job
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.planner.depth.composed import composed
from tutti.planner.estimates.priced_machine import PricedMachine
from tutti.planning.candidate_programs import CandidatePrograms
from tutti.planning.step_estimates import StepEstimates

HERE = Path(__file__).parent
PAGE = HERE / "published_rates.md"
# What is aimed at: the error of the rate, and of the memory.
MOST_RATE, MOST_MEMORY = 0.12, 0.08
GIB = 2**30
# A layout of a deep model is composed of pieces if many are asked for; one alone would take minutes.
_MANY = 10**6


_RECOMPUTED = {
    "none": "",
    "layers": ", layers recomputed",
    "matmuls": ", every second matmul recomputed",
    "matmuls, sums": ", most second matmuls recomputed",
}


class HalfSums(CandidatePrograms):
    """Programs that add over `tensor` in the dtype of the activations, as the published ones do.

    tutti adds in float32, which moves twice the bytes.
    """

    def program(
        self,
        layout: Layout,
        *,
        placed: Layout | None = None,
        smallest: bool = False,
        exact: bool = False,
    ) -> Program:
        """As `CandidatePrograms.program`."""
        made = super().program(layout, placed=placed, smallest=smallest, exact=exact)
        sum_in_half(made.graph)
        return made


@dataclass(frozen=True)
class Compared:
    """A row with what was predicted: tokens per second of a device, GiB at its peak, whether they fit.

    state_gib: of the layers' parameters, gradients and slots.
    """

    row: PublishedRow
    rate: float
    memory_gib: float
    fits: bool
    state_gib: float = 0.0

    @property
    def rate_ratio(self) -> float:
        """Predicted over published."""
        return self.rate / self.row.rate

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over published, of the peak or of the state; None where no memory was published."""
        if self.row.memory_gib:
            return self.memory_gib / self.row.memory_gib
        return self.state_gib / self.row.state_gib if self.row.state_gib else None

    @property
    def rate_is_near(self) -> bool:
        """Whether the rate is within its bound."""
        return abs(self.rate_ratio - 1) <= MOST_RATE

    @property
    def memory_is_near(self) -> bool:
        """Whether the memory is within its bound, or was not published."""
        return self.memory_ratio is None or abs(self.memory_ratio - 1) <= MOST_MEMORY


def predict_row(row: PublishedRow) -> Compared:
    """Ask the planner about a row.

    Raises:
        TuttiError: the step does not allow the layout.
    """
    model = make_model(
        sequence=row.sequence, attention=row.attention, recompute=row.recompute, **row.sizes
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.zeros((row.batch, row.sequence), dtype=torch.int64, device="meta")
    place = PLACES[row.sizes["family"]] if row.place == "megatron" else {}
    job = Job.of(train_step, model, optimizer, Layout(), place=place)
    device = str(HERE / row.device) if row.device.endswith(".toml") else row.device
    cluster = Cluster.parse(f"{row.devices} x {device}")
    machine = PricedMachine.of(cluster, eager=row.runtime == "eager", draws=False)
    batch = tokens, tokens
    estimates = StepEstimates(job, batch, lambda _: machine, num_layouts=_MANY, programs=HalfSums)
    layout = Layout.parse(row.layout)
    blocks = estimates.blocks(layout)
    if row.messages == "split":
        blocks = replace(blocks, message=blocks.message / layout.axes["tensor"])
    made = composed(blocks, layout, machine)
    rate = row.batch * row.sequence / made.seconds / row.devices
    fits = made.peak_nbytes <= cluster.device.capacity.value
    state = sum(
        p.parameters + p.slots + p.gradients + p.cast for p in blocks.sequence()
    ) / layout.axes.get("pipe", 1)
    return Compared(row, rate, made.peak_nbytes / GIB, fits, state / GIB)


def summary(found: Sequence[Compared]) -> str:
    """One line: how many rows are within the bounds."""
    rates = sum(c.rate_is_near for c in found)
    memories = [c for c in found if c.memory_ratio is not None]
    near = sum(c.memory_is_near for c in memories)
    return (
        f"rates within {MOST_RATE:.0%}: {rates} of {len(found)}, "
        f"memory within {MOST_MEMORY:.0%}: {near} of {len(memories)}"
    ).replace("%", " %")


def table(found: Iterable[Compared]) -> str:
    """The rows as a table of Markdown."""
    lines = [
        "| setting | layout of tutti | tok/s | predicted | ratio | GiB | predicted | ratio | within |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for c in found:
        row = c.row
        memory = f"{row.memory_gib:.1f}" if row.memory_gib else "-"
        memory = f"{row.state_gib:.1f} state" if row.state_gib else memory
        ratio = f"{c.memory_ratio:.2f}" if c.memory_ratio else "-"
        missed = [
            word
            for word, near in (("rate", c.rate_is_near), ("memory", c.memory_is_near))
            if not near
        ]
        within = f"no: {' and '.join(missed)}" if missed else "yes"
        cells = [
            row.name,
            f"`{row.layout}`" + _RECOMPUTED[row.recompute],
            f"{row.rate:.0f}",
            f"{c.rate:.0f}",
            f"{c.rate_ratio:.2f}",
            memory,
            f"{c.memory_gib:.1f}" + (f", {c.state_gib:.1f} state" if row.state_gib else ""),
            ratio,
            within + ("" if c.fits else "; does not fit"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(found: Iterable[Compared]) -> str:
    """What the published runs did otherwise, and why rows miss, as a table of Markdown."""
    lines = [
        "| setting | source | published run | reason of a miss |",
        "| --- | --- | --- | --- |",
    ]
    for c in found:
        missed = not (c.rate_is_near and c.memory_is_near)
        reason = (c.row.reason or "not known") if missed else ""
        lines.append(f"| {c.row.name} | {c.row.source} | {c.row.differs} | {reason} |")
    return "\n".join(lines)


def left_out_table(rows: Iterable[LeftOut]) -> str:
    """The settings that tutti cannot play, as a table of Markdown."""
    lines = ["| setting | source | published | reason |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.name} | {r.source} | {r.published} | {r.reason} |" for r in rows]
    return "\n".join(lines)


PREFACE = f"""# Published training rates against the plan

`python -m benchmarks.published_rates --write` made this page. Each row of `published_rates.toml` captures a
model of Hugging Face on the meta device and asks the planner for the time and memory of the row's layout.
Weights and updates are in float32, forward and backward in bfloat16. No constant is fitted to these rows.

Aims: tokens per second of a device within {MOST_RATE:.0%}, memory within {MOST_MEMORY:.0%}.

Where the published programs move less than tutti's, the costs are those of the published ones: sums over
`tensor` in the dtype of the activations (tutti adds in float32), and messages between stages that the tensor
ranks share (`messages = "split"`; each rank of tutti sends the whole value). "Does not fit": tutti would need
more memory than the device has, since with stages it does not split tokens between the blocks. "State": that
of the layers' parameters, gradients and slots, where only it is published.
""".replace("%", " %")


def main() -> None:
    """Print the tables; `--write` writes the page."""
    made = parser(__doc__, models=[], write=False)
    args = made.parse_args()
    rates = read_rows()
    wanted = [r for r in rates.rows if not args.models or any(p in r.name for p in args.models)]
    if not wanted:
        names = ", ".join(r.name for r in rates.rows)
        made.error(f"--models: no row is named so; there are {names}")
    found = []
    for row in wanted:
        found.append(predict_row(row))
        print(f"{row.name}: {found[-1].rate_ratio:.2f}", file=sys.stderr, flush=True)
    parts = [f"**{summary(found)}**", table(found), differences(found)]
    if not args.models:
        parts += ["## Left out", left_out_table(rates.left_out)]
    print("\n\n".join(parts))
    if args.write and not args.models:
        PAGE.write_text("\n\n".join([PREFACE.strip(), *parts]) + "\n")


if __name__ == "__main__":
    main()
