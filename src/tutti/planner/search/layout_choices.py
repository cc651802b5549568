"""The layouts to compare for a number of ranks.

    ranks      every product of axes that gives the number: data, tensor, seq, expert, pipe
    zero       0 to 3, with data, seq or expert; 2 differs from 1 only with micro-batches
    micro      divisors of the rows of a data rank, each about twice the one before, up to one row each; at
               least one for each pipeline rank. `expert` splits the rows, too, if it divides them
    schedule   1f1b, zb, interleaved(2), with pipe
    remat      none, full
    precision  that of the given words, or each of `precisions`
    seq        where `data` cannot be larger instead, or to hold less than a sample

`tensor`, `seq` and `expert` exchange values within each layer, so they stay within `inner` ranks. Words that
the user gave are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tutti.errors import PlanError
from tutti.layout import Layout
from tutti.layout.layout import AXES, ZERO_AXES

SCHEDULES = ("", "zb", "interleaved(2)")
# Micro-batches of a pipeline beyond this many for each rank gain little: a bubble of a ninth.
_MOST_PER_PIPE_RANK = 8
_INNER = ("tensor", "seq", "expert")


@dataclass(frozen=True)
class Space:
    """What may vary.

    num_ranks: of the layouts. rows: samples of the global batch. axes: those to use. given: the words that
    every layout has, as the user wrote them. most: the largest size of an axis, where there is one. inner: of
    the product of `tensor`, `seq` and `expert`. below_sample: `seq` also where it only saves memory.
    expert_and_tensor: both in one layout. precisions: to try; by default that of the given words.
    """

    num_ranks: int
    rows: int
    axes: tuple[str, ...] = ("data", "tensor", "pipe")
    given: str = ""
    most: tuple[tuple[str, int], ...] = ()
    inner: int | None = None
    below_sample: bool = True
    expert_and_tensor: bool = True
    precisions: tuple[str, ...] = ()

    def layouts(self) -> list[Layout]:
        """Every layout, without duplicates.

        Raises:
            PlanError: the given words do not go with this number of ranks, or no layout divides the batch.
        """
        found = list(dict.fromkeys(self._all()))
        if found:
            return found
        raise PlanError(
            f"no layout divides {self.rows} samples over {self.num_ranks} devices"
            + (f' with "{self.given}"' if self.given else ""),
            why=f"the batch is split over data and micro-batches, the devices over {', '.join(self.axes)}",
            fix=f"a batch of a multiple of {self.num_ranks} samples, or other devices",
        )

    def _all(self) -> Iterator[Layout]:
        own = partial_layout(self.given)
        words = words_of(self.given)
        for axes in self._axes(own):
            data, pipe = axes.get("data", 1), axes.get("pipe", 1)
            if self.rows % data:
                continue
            ways = data * axes.get("expert", 1)
            rows = self.rows // (data if self.rows % ways else ways)
            micros = [own.micro] if "micro" in words else list(_micros(rows, pipe))
            schedules = [own.schedule] if "schedule" in words or pipe == 1 else list(SCHEDULES)
            remats = [own.remat] if "remat" in words else ["none", "full"]
            precisions = self.precisions or (own.precision,)
            for kind, micro, schedule, remat in product(precisions, micros, schedules, remats):
                if schedule.startswith("interleaved") and micro % pipe:
                    continue
                if "seq" not in own.axes and not self._needs_seq(axes, micro, "micro" in words):
                    continue
                split = math.prod(axes.get(a, 1) for a in ZERO_AXES)
                for zero in [own.zero] if "zero" in words else _zeros(split, micro):
                    if zero and split == 1:
                        continue
                    ways = {"axes": axes, "zero": zero, "micro": micro}
                    yield replace(own, **ways, schedule=schedule, remat=remat, precision=kind)

    def _axes(self, own: Layout) -> Iterator[dict[str, int]]:
        """Sizes of axes whose product is the number of ranks; those of `own` are fixed."""
        fixed = own.num_ranks
        if self.num_ranks % fixed:
            raise PlanError(
                f'"{own}" does not divide {self.num_ranks} devices',
                why=f"its axes multiply to {fixed}",
                fix="other sizes, or leave axes out: the plan finds them",
            )
        free = [a for a in self.axes if a not in own.axes]
        most = dict(self.most)
        for sizes in _factors(self.num_ranks // fixed, len(free)):
            axes = own.axes | dict(zip(free, sizes, strict=True))
            inner = math.prod(axes[a] for a in _INNER if a in free)
            within = inner <= (self.inner or self.num_ranks)
            if not self.expert_and_tensor and {"expert", "tensor"} <= set(free):
                within = within and 1 in (axes["expert"], axes["tensor"])
            if within and all(axes[a] <= most.get(a, self.num_ranks) for a in free):
                yield {a: axes[a] for a in AXES if axes.get(a, 1) > 1}

    def _needs_seq(self, axes: Mapping[str, int], micro: int, is_given: bool) -> bool:
        """Whether `seq` can do what a larger `data` cannot, which would exchange no keys and values.

        Either the samples, or the micro-batches of a pipeline, are too few for it, or a micro-batch has less
        than a sample for each rank.
        """
        seq, data = axes.get("seq", 1), axes.get("data", 1)
        if seq == 1:
            return True
        least = micro if is_given else axes.get("pipe", 1)
        rows = self.rows // (data * seq)
        if self.rows % (data * seq) or rows < least or (is_given and rows % micro):
            return True
        return self.below_sample and self.rows // (data * micro) < seq


def _micros(rows: int, pipe: int) -> Iterator[int]:
    for micro in doubled_divisors(rows):
        if pipe <= micro <= _MOST_PER_PIPE_RANK * pipe or pipe == 1:
            yield micro


def doubled_divisors(number: int) -> list[int]:
    """Divisors from 1 to the number itself, each the next one of at least twice the one before.

    1, 2, 4, ... for a power of two; 1, 2, 4, 10, 20, 60 for 60.
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = [1]
    for divisor in sorted({*low, *(number // d for d in low)}):
        if divisor >= 2 * found[-1]:
            found.append(divisor)
    return found


def words_of(text: str) -> dict[str, str]:
    """The words of a layout that `partial_layout` accepts, by name: `{"zero": "zero=1"}`."""
    return {word.partition("=")[0]: word for word in text.split()}


def with_given(text: str, given: str) -> str:
    """A layout with the words of `given` whose names it lacks."""
    missing = [word for name, word in words_of(given).items() if name not in words_of(text)]
    return " ".join([text, *missing]).strip()


def partial_layout(text: str) -> Layout:
    """A layout of some words, to which axes will be added: `zero=1` and `schedule=zb` have no axis yet.

    Raises:
        LayoutError: an unknown word or value, or a word that appears twice.
    """
    words = words_of(text)
    for name, axis in (("zero", "data=2"), ("schedule", "pipe=2 micro=2")):
        own_words = [w for w in text.split() if w.partition("=")[0] == name]
        Layout.parse(" ".join([axis, *own_words]))  # a word that appears twice, too
    rest = " ".join(w for w in text.split() if w.partition("=")[0] not in ("zero", "schedule"))
    own = Layout.parse(rest)
    zero = int(words["zero"].partition("=")[2]) if "zero" in words else 0
    schedule = words["schedule"].partition("=")[2] if "schedule" in words else ""
    return replace(own, zero=zero, schedule=schedule)


def _zeros(ways: int, micro: int) -> Sequence[int]:
    if ways == 1:
        return (0,)
    return (0, 1, 2, 3) if micro > 1 else (0, 1, 3)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `count` positive numbers whose product is `number`."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield first, *rest
