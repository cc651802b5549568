"""Two hosts under plain `torchrun`, each a network namespace: the same numbers as on one host."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import runs
from network_hosts import network_hosts, torchrun
from ranks import Ranks
from tests.launch.two_hosts import total

TRAINING = Path(__file__).parent / "two_hosts_train.py"


@pytest.fixture(scope="module")
def found() -> list[float]:
    """What rank 0 prints: a total and losses. The namespaces have no way but the cable between them,
    so it carried the collectives."""
    with network_hosts() as hosts:
        outputs = torchrun(hosts, 2, TRAINING)
    (line,) = [x for out in outputs for x in out.splitlines() if x.startswith("found")]
    return [float(word) for word in line.split()[1:]]


def test_two_hosts_compute_what_one_computes(found: list[float], ranks: Ranks) -> None:
    for one in ranks.run(total, n=4):
        assert found[0] == pytest.approx(one, rel=1e-12, abs=1e-12)


def test_two_hosts_train_as_one_device(found: list[float]) -> None:
    runs.assert_same_losses(found[1:], runpy.run_path(str(TRAINING))["losses"](""))
