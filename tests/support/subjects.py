"""The zoo's cases captured once for all tests, and partitioned once a layout."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache

import zoo
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.verification.verdict import Subject, Verdict


def subject(name: str, precision: str = "fp32") -> Subject:
    """The case `name`, captured and compared with the eager step; one object however it is asked for."""
    return _captured(name, precision)


@cache
def _captured(name: str, precision: str) -> Subject:
    step, model, optimizer, batches = zoo.CASES[name].build()
    return Subject(step, model, optimizer, batches[0], precision=precision)


@lru_cache(maxsize=8)  # a program holds thousands of nodes
def program(name: str, layout: str) -> Program:
    """The case's program under `layout`, with the case's placement; a warning is an error."""
    place = zoo.CASES[name].place if "tensor" in layout else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "[a-z]+=[0-9]+ splits nothing")  # slow, not wrong
        parsed = Layout.parse(layout)
        return subject(name, parsed.precision).program(parsed, place)


def verdict(name: str, layout: str, edited: Program | None = None) -> Verdict:
    """The verdict on the case's program, or on `edited` in its place."""
    made = edited or program(name, layout)
    return subject(name, made.layout.precision).verdict(made.layout, program=made)
