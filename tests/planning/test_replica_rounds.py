"""Rounds of replicas spread over steps: as many bytes and seconds as each strategy sends and waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

import replicas_train as training
import tutti
from tutti.costs.collective_seconds import RankGroup, collective_seconds, message_seconds
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Topology
from tutti.layout import Layout
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.planning.replica_rounds import PricedRounds, priced_rounds

NBYTES = 8 * 212  # of the model
TOPOLOGY = Cluster.parse("8 x h100").topology
HALF = replace(TOPOLOGY, devices_per_host=replace(TOPOLOGY.devices_per_host, value=4.0))


def priced(text: str, step: float = 1.0, topology: Topology = TOPOLOGY) -> PricedRounds:
    layout = Layout.parse(text)
    program = tutti.distribute(training.train_step, *training.make(), layout).program_of(
        training.batch_at(0)
    )
    one = replace(program, layout=Layout(layout.axes | {"replica": 1}, micro=layout.micro))
    return priced_rounds(one, layout, topology, step, cut_at=())


def mean(nbytes: float, size: int, per_host: int = 8) -> float:
    return collective_seconds("all_reduce", nbytes, RankGroup(size, per_host), TOPOLOGY)


def test_a_mean_is_waited_for() -> None:
    found = priced("replica=4 sync=average(every=5)")
    assert found.nbytes == pytest.approx(2 * 3 / 4 * NBYTES / 5)
    assert found.seconds == pytest.approx(mean(NBYTES, 4) / 5) and found.hidden_seconds == 0
    assert (found.link, found.strategy) == ("inside", "average(every=5)")


def test_groups_average_between_rounds_of_all() -> None:
    found = priced("replica=4 sync=average(every=2, then=6, group=2, after=7)")
    assert found.nbytes == pytest.approx(
        (2 * NBYTES + 1.5 * NBYTES) / 6
    )  # two of groups, one of all
    assert found.seconds == pytest.approx((2 * mean(NBYTES, 2) + mean(NBYTES, 4)) / 6)


def test_a_late_mean_is_beside_steps() -> None:
    sync = "replica=2 sync=diloco(every=6, delay=2, traffic=bf16)"
    whole = mean(NBYTES / 4, 2)
    hidden = priced(sync)
    assert (hidden.seconds, hidden.hidden_seconds) == (0.0, pytest.approx(whole / 6))
    assert hidden.nbytes == pytest.approx(NBYTES / 4 / 6)
    short = priced(sync, step=whole / 8)  # two steps hide a fourth
    assert short.seconds == pytest.approx(0.75 * whole / 6)


def test_messages_to_one_replica() -> None:
    one = message_seconds(NBYTES, HALF, across_hosts=True)
    pushed = priced("replica=8 sync=gossip(every=3)", topology=HALF)
    assert (pushed.nbytes, pushed.link) == (pytest.approx(NBYTES / 3), "between")
    assert pushed.seconds == pytest.approx(one / 3)
    called = priced("replica=8 sync=pairs(every=4)", topology=HALF)
    assert (called.nbytes, called.seconds) == (pytest.approx(NBYTES / 4), 0.0)
    assert called.hidden_seconds == pytest.approx(one / 4)


def test_answers_are_sent_too() -> None:
    assert priced("replica=4 sync=elastic(every=2)").nbytes == pytest.approx(1.5 * NBYTES / 2)
    assert priced("replica=4 sync=pairs(every=2)").nbytes == pytest.approx(NBYTES / 2)


def test_each_rank_sends_its_shards() -> None:
    found = priced("replica=2 data=2 zero=3 sync=average(every=1)")
    assert found.nbytes == pytest.approx(NBYTES / 2)
    assert found.seconds == pytest.approx(mean(NBYTES / 2, 2))


def test_the_estimate_has_them() -> None:
    made = Estimate(Layout(), 1.0, {"compute": 1.0}, 0.25, {"inside": 10}, 0)
    found = PricedRounds("", 0.5, 0.25, 5.0, "inside").added_to(made)
    assert (found.seconds, found.hidden_seconds) == (1.5, 0.5)
    assert (found.kinds, found.nbytes) == ({"compute": 1.0, "rounds": 0.5}, {"inside": 15})


def test_the_state_of_a_strategy_counts_in_the_memory() -> None:
    found = priced("replica=2 sync=diloco(every=4)")
    assert found.kept_nbytes == 2 * NBYTES
    layout = Layout.parse("replica=2 sync=diloco(every=4)")
    one = Estimate(layout, 1.0, {}, 0.0, {}, 1000)
    assert found.added_to(one).peak_nbytes == 1000 + 2 * NBYTES
    assert priced("replica=2 sync=average(every=4)").kept_nbytes == 0
