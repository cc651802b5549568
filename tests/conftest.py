"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks with a process group, shared by all tests (`ranks.run(function, *args, n=4)`)."""
    pool = Ranks()
    yield pool
    pool.close()
