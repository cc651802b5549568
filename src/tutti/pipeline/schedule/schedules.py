"""The named schedules, as pure functions of ranks, micro-batches and chunks.

Most are a table of phases: a pattern of kinds, and its number of repetitions. Each kind counts its own
micro-batches. A table that needs more micro-batches than exist is written for as many as it needs, without
the actions on missing ones: actions on different micro-batches never need each other, so the rest is valid.

The drawings are those of `tutti simulate` with F = I = W = 1 and B = I + W.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable

from tutti.errors import ScheduleError
from tutti.pipeline.schedule.action import Action
from tutti.pipeline.schedule.schedule import Row, Schedule

# A kind, a chunk, and the number of a micro-batch, missing ones included.
_Slot = tuple[str, int, int]


def schedule(name: str, num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """The compute actions of the schedule `name`, for any number of ranks and micro-batches.

    Args:
        name: a key of `SCHEDULES`: gpipe, 1f1b, interleaved, zb, zbv.
        num_ranks: ranks of the pipeline.
        num_micro: micro-batches of a step.
        num_chunks: stages per rank, for `interleaved`; `zbv` always has two.

    Raises:
        ScheduleError: an unknown name, a number below 1, chunks for a schedule of one stage per rank.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        raise ScheduleError(
            f'unknown schedule "{name}"',
            why=f"the schedules are {', '.join(SCHEDULES)}",
            fix=f"did you mean {near[0]}?" if near else "one of these",
        )
    for what, number in (
        ("ranks", num_ranks),
        ("micro-batches", num_micro),
        ("chunks", num_chunks),
    ):
        if number < 1:
            raise ScheduleError(f"{number} {what} for schedule {name}", fix=f"1 or more {what}")
    most = {"interleaved": num_chunks, "zbv": 2}.get(name, 1)
    if num_chunks > most:
        raise ScheduleError(
            f"schedule {name} cannot have {num_chunks} chunks per rank",
            why="zbv has two" if name == "zbv" else "it has one stage per rank",
            fix="schedule interleaved" + ("" if name == "zbv" else ", or 1 chunk"),
        )
    return SCHEDULES[name](num_ranks, num_micro, num_chunks)


def gpipe(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """GPipe (Huang et al., 1811.06965): all forwards, then all backwards.

        rank 0 F0 F1 F2                            B0--- B1--- B2---
        rank 1    F0 F1 F2                   B0--- B1--- B2---
        rank 2       F0 F1 F2          B0--- B1--- B2---
        rank 3          F0 F1 F2 B0--- B1--- B2---

    Idle (p-1)(F+B); every rank keeps all m micro-batches alive.
    """
    phases = [("F", num_micro), ("B", num_micro)]
    return Schedule(tuple(_row({"": rank}, num_micro, phases) for rank in range(num_ranks)))


def one_f_one_b(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al., 2006.09503): a backward as soon as one is ready.

        rank 0 F0 F1 F2 F3                   B0---    B1---    B2---    B3---
        rank 1    F0 F1 F2             B0--- F3 B1---    B2---    B3---
        rank 2       F0 F1       B0--- F2 B1--- F3 B2---    B3---
        rank 3          F0 B0--- F1 B1--- F2 B2--- F3 B3---

    Idle (p-1)(F+B) as GPipe; stage s keeps min(m, p-s) micro-batches alive.
    """
    padded = max(num_micro, num_ranks)
    rows = []
    for rank in range(num_ranks):
        ahead = num_ranks - 1 - rank
        phases = [("F", ahead), ("F B", padded - ahead), ("B", ahead)]
        rows.append(_row({"": rank}, num_micro, phases))
    return Schedule(tuple(rows))


def interleaved(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2104.04473, section 2.2): chunk c of rank r is stage c p + r.

        rank 0 0F0 0F1 0F2 2F0 2F1 2F2     2B0----     2B1----     2B2---- 0B0---- 0B1---- 0B2----
        rank 1     1F0 1F1 1F2 3F0 3B0---- 3F1 3B1---- 3F2 3B2---- 1B0---- 1B1---- 1B2----

    A group of micro-batches passes all chunks before the next group. Groups have p micro-batches or a few
    more, as equal as possible, so that m need not be a multiple of p: groups of fewer than p would leave the
    ring of ranks idle in each round. One chunk is 1F1B.

    With m >= p idle (p-1)(F+B)/v. With p | m and m >= 2p rank 0 keeps p + (p-1)/v micro-batches alive,
    counted over all v chunks; with larger groups it keeps a few more, at most m.
    """
    if num_chunks == 1:
        return one_f_one_b(num_ranks, num_micro)
    padded, numbers = _grouped(num_ranks, num_micro)
    size = padded // max(1, num_micro // num_ranks)
    order = [
        (chunk, number)
        for group in range(0, padded, size)
        for chunk in range(num_chunks)
        for number in range(group, group + size)
    ]
    rows = []
    for rank in range(num_ranks):
        # All chunks but the last, and for each later rank one forward and one backward on the way.
        ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * size
        forwards = [("F", chunk, number) for chunk, number in order]
        backwards = [("B", num_chunks - 1 - chunk, number) for chunk, number in order]
        played = _ahead_by(min(ahead, len(order)), forwards, backwards)
        rows.append(
            tuple(
                Action(kind, chunk * num_ranks + rank, numbers[number])
                for kind, chunk, number in played
                if number in numbers
            )
        )
    return Schedule(tuple(rows))


def zb(num_ranks: int, num_micro: int, num_chunks: int = 1) -> Schedule:
    """ZB-H1 (Qi et al., 2401.10241, section 2): delayed weight gradients fill idle time.

        rank 0 F0 F1 F2 F3          I0 W0 I1 W1 I2 W2 I3 W3
        rank 1    F0 F1 F2       I0 F3 I1 W0 I2 W1 I3 W2 W3
        rank 2       F0 F1    I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
        rank 3          F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

    With m >= p idle (p-1)(F+I-W) if W <= I and W <= F; every rank keeps min(m, p) micro-batches alive, as
    the first rank of 1F1B.
    """
    padded = max(num_micro, num_ranks)
    rows = []
    for rank in range(num_ranks):
        rest = num_ranks - rank
        # Rank r lags r micro-batches behind with its weight gradients.
        phases = [
            ("F", rest),
            ("I F", rank),
            ("I W F", padded - num_ranks),
            ("I W", rest),
            ("W", rank),
        ]
        rows.append(_row({"": rank}, num_micro, phases))
    return Schedule(tuple(rows))


def zbv(num_ranks: int, num_micro: int, num_chunks: int = 2) -> Schedule:
    """ZB-V (Qi et al., 2401.10241, section 6): two chunks per rank in a V, rank r has r and 2p-1-r.

        rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    The last stage is on rank 0 beside the first, and the turn at the last rank needs no transfer. With
    F = I = W and m >= 2p-1 idle (p-1)F/2, F over both chunks; every rank keeps at most min(m, p)
    micro-batches alive, counted over both chunks. Fewer micro-batches keep the same order.
    """
    padded = max(num_micro, 2 * num_ranks - 1)
    rows = []
    for rank in range(num_ranks):
        rest = num_ranks - rank
        phases = [
            ("aF", 2 * rest - 1),
            ("bF aF", rank),
            ("bF bI bW", rest),
            ("aF aI aW bF bI bW", padded - rest - num_ranks + 1),
            ("aI aW bF bI bW", rest - 1),
            ("aI bI", rank),
            ("aI aW", rest),
            ("bW", rank),
            ("aW", rank),
        ]
        stages = {"a": rank, "b": 2 * num_ranks - 1 - rank}
        rows.append(_row(stages, num_micro, phases))
    return Schedule(tuple(rows))


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb": zb,
    "zbv": zbv,
}


def _row(stages: dict[str, int], num_micro: int, phases: Iterable[tuple[str, int]]) -> Row:
    """The row of a rank; a word of a pattern is the name of one of `stages` and a kind."""
    counts: Counter[str] = Counter()
    row = []
    for pattern, times in phases:
        for word in pattern.split() * times:
            if counts[word] < num_micro:
                row.append(Action(word[-1], stages[word[:-1]], counts[word]))
            counts[word] += 1
    return tuple(row)


def _grouped(num_ranks: int, num_micro: int) -> tuple[int, dict[int, int]]:
    """Micro-batches in groups of one size, at least `num_ranks`: their number, and those that exist.

    The early groups end with missing micro-batches, at most one each if there are several groups.

        4 ranks, 9 micro-batches:  0 1 2 3 .   4 5 6 7 8
    """
    num_groups = max(1, num_micro // num_ranks)
    real = [(num_micro + i) // num_groups for i in range(num_groups)]
    size = max(real[-1], num_ranks)
    existing = [i * size + k for i, count in enumerate(real) for k in range(count)]
    return size * num_groups, {number: micro for micro, number in enumerate(existing)}


def _ahead_by(ahead: int, forwards: list[_Slot], backwards: list[_Slot]) -> list[_Slot]:
    """1F1B of two equally long lists, the forwards `ahead`."""
    paired = zip(forwards[ahead:], backwards, strict=False)
    rest = backwards[len(forwards) - ahead :]
    return [*forwards[:ahead], *(action for pair in paired for action in pair), *rest]
