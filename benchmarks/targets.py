"""What tutti is to reach, next to its peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.result import Race, Result
from tutti.quantities import format_nbytes

SMALL, LARGE = ("gpt-3.7M",), ("gpt-29.5M", "gpt-51M")
GPTS = SMALL + LARGE


@dataclass(frozen=True)
class Target:
    """A way's step, or its peak memory, is at most `limit` of another way's; on all models by default."""

    way: str
    against: str
    limit: float
    models: tuple[str, ...] = ()
    quantity: str = "time"

    def measured(self, race: Race) -> float | None:
        """The ratio, if both were run."""
        ratio = race.memory_ratio if self.quantity == "memory" else race.time_ratio
        return ratio(self.way, self.against)


TARGETS = (
    Target("tutti data=2", "one", 1.03, SMALL),
    Target("tutti data=2", "ddp", 1.0, SMALL),
    Target("tutti data=2", "ddp", 0.80, LARGE),
    Target("tutti data=2 zero=1", "ddp", 0.80, LARGE),
    Target("tutti data=2 zero=3", "fsdp2", 0.45, LARGE),
    Target("tutti data=2 zero=3", "fsdp2", 1.0, GPTS, "memory"),
    Target("tutti tensor=2", "dtensor", 0.70, GPTS),
    Target("tutti pipe=2 micro=8", "torch 1f1b", 0.95),
    Target("tutti pipe=2 micro=8 schedule=zb", "tutti pipe=2 micro=8", 1.0),
    Target("tutti data=2", "jax", 1.0),
)
# Of a step; see `python_share`.
PYTHON_SHARE = 0.03
# Of Gloo's time, as a program plays a collective; a sum of more bytes is bound by memory.
COLLECTIVE, LARGE_SUM, MOST_NBYTES = 0.10, 0.25, 4_200_000


class Verdict(NamedTuple):
    """A target on one model or collective."""

    subject: str
    what: str
    measured: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.measured <= self.limit


def verdicts(result: Result) -> Iterator[Verdict]:
    """Every target on every model for which there are figures."""
    for target in TARGETS:
        for race in result.races:
            if target.models and race.model not in target.models:
                continue
            measured = target.measured(race)
            if measured is not None:
                what = f"{target.quantity} of {target.way} / {target.against}"
                yield Verdict(race.model, what, measured, target.limit)
    for race in result.races:
        for entry in race.entries:
            if entry.shares:
                what = f"Python in {entry.way}"
                share = entry.shares.get("sampled", entry.shares["outside"])
                yield Verdict(race.model, what, share, PYTHON_SHARE)
    for move in result.collectives:
        name, nbytes, seconds = move["name"], move["nbytes"], move["seconds"]
        if "in a program" in seconds:
            is_large_sum = name == "all_reduce" and nbytes > MOST_NBYTES
            yield Verdict(
                f"{name}, {format_nbytes(nbytes)}",
                "time in a program / gloo",
                seconds["in a program"] / seconds["gloo"],
                LARGE_SUM if is_large_sum else COLLECTIVE,
            )
