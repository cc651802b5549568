"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from ranks import COLLECT_AFTER, Ranks

# The longest files, which a second worker must not be left with at the end.
FIRST = ("test_examples.py", "test_models.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order is otherwise as it was."""
    items.sort(
        key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST)
    )


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector, which runs at every capture, need not walk it."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


@pytest.fixture(scope="module", autouse=True)
def what_lasts() -> Iterator[None]:
    """Nor what the tests of a module leave for all others, such as the subjects that they captured."""
    yield
    if subjects := sys.modules.get("subjects"):
        subjects.program.cache_clear()  # these do not stay, and would never go once frozen
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks with a process group, shared by all tests (`ranks.run(function, *args, n=4)`)."""
    pool = Ranks()
    yield pool
    pool.close()
