"""The table of programs: what counts as the same, what is refused, what is raw; a few rows as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.programs import programs
from benchmarks.programs.isolated import Ended, Isolated, Ranks
from benchmarks.programs.play import Cell, compared, distance, distributed, eager, failed, nudged
from benchmarks.programs.report import counts, document
from benchmarks.verify_programs import COLUMNS, built, placed
from tutti.errors import CaptureError, CommError

KNOWN = programs()
# One of each kind of script, quick to capture.
FEW = ("llama2.c", "DQN", "VQ-VAE", "LoRA", "matrix factorization")


@pytest.fixture(autouse=True)
def no_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_there_are_many() -> None:
    assert len(KNOWN) >= 100
    assert sum(p.changes == 0 for p in KNOWN.values()) >= 0.9 * len(KNOWN)


@pytest.mark.parametrize("name", FEW)
def test_a_script_is_the_same_each_time(name: str) -> None:
    first, second = eager(built(KNOWN[name])), eager(built(KNOWN[name]))
    assert compared(second, first) == Cell("same", "0e+00")
    assert (
        compared(distributed(built(KNOWN[name]), ""), first, nudged(built(KNOWN[name]))).kind
        == "same"
    )


def test_linear_layers_are_placed_by_their_outputs() -> None:
    place = placed(KNOWN["DQN"], built(KNOWN["DQN"]))
    assert place["policy.0.weight"] == "tensor, -"


def test_what_differs_is_wrong_unless_it_is_rounding() -> None:
    wanted = {"weights.a": np.array([1.0, 2.0]), "call 0 returned": np.array(3.0)}
    off = wanted | {"weights.a": np.array([1.0, 2.0 + 1e-6])}
    assert compared(off, wanted).kind == "WRONG"
    assert compared(off, wanted, wanted).kind == "WRONG"
    assert compared(off, wanted, off).kind == "same"  # a nudge of the last bits does as much
    assert compared({"weights.a": wanted["weights.a"]}, wanted).kind == "WRONG"
    assert compared(Cell("refused", "x"), wanted).kind == "refused"


def test_shapes_and_what_is_not_a_number_are_seen() -> None:
    assert distance(np.zeros(2), np.zeros(3)) == np.inf
    assert distance(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0.0
    assert distance(np.array([np.nan]), np.array([1.0])) == np.inf
    assert distance(np.array(True), np.array(False)) == 1.0


def test_only_a_mistake_that_is_named_is_a_refusal() -> None:
    assert failed(CaptureError("no", fix="do")).kind == "refused"
    assert failed(CommError("a rank waits")).kind == "RAW"
    assert failed(KeyError("x")).kind == "RAW"


def chatty() -> Iterator[int]:
    yield 1
    raise SystemExit(4)


def rank_number() -> Iterator[int]:
    import torch.distributed as dist

    yield dist.get_rank()


def test_a_process_that_ends_early_says_so() -> None:
    assert list(Isolated(chatty, ()).answers(60)) == [1, Ended("the process ended with 4")]


def test_ranks_answer_side_by_side() -> None:
    assert list(Ranks(rank_number, (), n=2).answers(60)) == [[0, 1]]


def test_the_page_counts_its_cells() -> None:
    row = dict.fromkeys(COLUMNS, Cell("same", "1e-15")) | {"one": Cell("RAW", "KeyError: x")}
    found = {"DQN": row, "SAC": dict.fromkeys(COLUMNS, Cell("refused", "CaptureError: no"))}
    assert "1 programs have a cell that is wrong or a raw traceback" in counts(found, KNOWN)
    page = document(KNOWN, found, COLUMNS)
    assert "**RAW** (1)" in page and "1. KeyError: x" in page and "2. CaptureError: no" in page
