"""The options of all benchmarks: one name, one type and one meaning each, whichever command takes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# name -> the type of a value (bool: a switch without one), and what it means.
OPTIONS: dict[str, tuple[type, str]] = {
    # what is run
    "quick": (bool, "run one small model for a few rounds, to see that all works"),
    "models": (str, "which models"),
    "programs": (str, "parts of names of programs or of their families; all without it"),
    "ways": (str, "which ways to run a step or to send a variable"),
    "cases": (str, "parts of names of cases; all without it"),
    "columns": (str, "parts of names of columns; all without it"),
    "strategies": (str, "which values of sync="),
    "layout": (str, "the layout"),
    "layouts": (str, "which layouts"),
    "schedule": (str, "the schedule of the pipeline"),
    "sync": (str, "how workers agree"),
    "no_ranks": (bool, "start no other processes as ranks"),
    "no_moves": (bool, "leave the collectives out"),
    "shared": (bool, "measure reads that ranks share, without a step"),
    "fit": (bool, "fit the constants of the hardware files again, and print them"),
    "held_out": (bool, "count only rows that fit no constant"),
    "rows": (bool, "print every row, too"),
    "tables": (bool, "print tables of errors, too"),
    # how much
    "rounds": (int, "how often each way takes its turn"),
    "turn_seconds": (float, "the length of a turn, about"),
    "builds": (int, "how often all processes are started anew"),
    "steps": (int, "steps of training, or of a turn"),
    "count": (int, "how many runs, programs, schedules or states, at most"),
    "minutes": (float, "how long, at most"),
    "factor": (float, "measure what is predicted within so many times the best prediction"),
    "seed": (int, "the seed, or the first of them"),
    "jobs": (int, "how many run at the same time"),
    # sizes
    "layers": (int, "numbers of layers"),
    "lengths": (int, "measure so many lengths of a GPT-2 of 12 layers instead"),
    "batch": (int, "sequences in a batch, of each replica or worker"),
    "sequence": (int, "tokens in a sequence"),
    "width": (int, "the width of the model"),
    "depth": (int, "blocks of the model"),
    "heads": (int, "attention heads"),
    "size": (int, "numbers of 8 bytes in a variable"),
    "replicas": (int, "replicas"),
    "workers": (int, "workers of servers"),
    "servers": (int, "servers"),
    "pushes": (int, "pushes of a worker"),
    "window": (int, "pushes between two lines of output"),
    # how a model is trained
    "lrs": (float, "learning rates to try; without it the one that was best"),
    "warm_up": (int, "steps in which the learning rate rises"),
    "end": (float, "the last learning rate, as a share of the largest"),
    # faults
    "coupled": (bool, "updates need the gradients of all variables"),
    "drops": (int, "lost messages, at most"),
    "doubles": (int, "doubled messages, at most"),
    "server_crashes": (int, "killed servers, at most"),
    "worker_crashes": (int, "killed workers, at most"),
    "leases": (int, "leases that end, at most"),
    # what becomes of it
    "profile": (str, "the phase to profile"),
    "shrink": (bool, "make failing programs smaller"),
    "out": (Path, "where results are kept"),
    "write": (bool, "write the page of the documentation, too"),
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of some of `OPTIONS`: `parser(__doc__, rounds=7, models=["gpt"])`.

    Args:
        doc: the docstring of the command; its first line is the description.
        defaults: each option with its default. A list or tuple makes an option of several words.

    Raises:
        KeyError: an option that `OPTIONS` lacks.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        kind, meaning = OPTIONS[name]
        word = f"--{name.replace('_', '-')}"
        if kind is bool:
            made.add_argument(word, action="store_true", help=meaning)
            continue
        several = isinstance(default, (list, tuple))
        shown = default if not several else " ".join(map(str, default[:9]))
        more = " ..." if several and len(default) > 9 else ""
        told = meaning if shown in (None, "") else f"{meaning} ({shown}{more})".replace("%", "%%")
        nargs = "+" if several else None
        made.add_argument(word, type=kind, nargs=nargs, default=default, help=told)
    return made


def chosen(
    made: argparse.ArgumentParser, option: str, names: Iterable[str], known: Mapping[str, T]
) -> list[T]:
    """The values of these names; ends the command with a message where one is not known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        made.error(f"--{option}: no {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]
