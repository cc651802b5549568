"""The rounds of replicas beside their steps: seconds and bytes, spread over the steps.

    mean      an all-reduce of the message; late, it runs beside `delay` steps
    push      a message to another replica
    centre    a call to the owners of the centre, beside the steps: nobody waits
    pair      a call to one replica, beside the steps

After the warm-up. Messages have the rate of the links between the ranks that they join.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tutti.costs.collective_seconds import RankGroup, collective_seconds, message_seconds
from tutti.costs.rank_groups import RankGroups
from tutti.hardware.topology import Topology
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.pipeline.ready import in_time
from tutti.planner.estimates.layout_estimate import Estimate
from tutti.replicas import strategies
from tutti.replicas.strategy import CALLS, CENTRE, MEAN, PAIR
from tutti.report.rounds import Exchange, exchanges, kept_nbytes

ROUNDS = "rounds"


@dataclass(frozen=True)
class PricedRounds:
    """What the rounds of `strategy` add to a step.

    seconds: for which a replica waits. hidden_seconds: beside its steps. nbytes: sent by a rank, answers to
    others too. link: `inside` a host, or `between` hosts. kept_nbytes: the strategy's state on a rank.
    """

    strategy: str
    seconds: float
    hidden_seconds: float
    nbytes: float
    link: str
    kept_nbytes: int = 0

    def added_to(self, made: Estimate) -> Estimate:
        """The estimate of a replica's step with them."""
        kept, memory = self.kept_nbytes, made.memory
        if memory is not None:
            memory = replace(
                memory,
                peak_nbytes=memory.peak_nbytes + kept,
                state_nbytes=memory.state_nbytes + kept,
            )
        sent = made.nbytes | {self.link: made.nbytes.get(self.link, 0) + round(self.nbytes)}
        return replace(
            made,
            seconds=made.seconds + self.seconds,
            kinds=made.kinds | ({ROUNDS: self.seconds} if self.seconds else {}),
            hidden_seconds=made.hidden_seconds + self.hidden_seconds,
            nbytes=sent,
            peak_nbytes=made.peak_nbytes + kept,
            memory=memory,
        )


def priced_rounds(
    program: Program, layout: Layout, topology: Topology, step: float, *, cut_at: tuple[str, ...]
) -> PricedRounds:
    """The rounds of a layout with replicas and without servers.

    Args:
        program: of one replica.
        layout: with replicas and their strategy.
        topology: links and hosts.
        step: seconds of a replica's step.
        cut_at: of the job.
    """
    made = in_time(program, cut_at=cut_at) if program.layout.in_time else None
    own = replace(program, layout=layout.with_micro(program.layout.micro))
    groups = RankGroups(layout.mesh, topology.host_size)
    across = groups.crosses_hosts("replica")
    waited = hidden = nbytes = 0.0
    for one in exchanges(own, made):
        seconds = _seconds(one, layout, groups["replica",], topology, across=across)
        free = seconds if one.due.kind in CALLS else min(seconds, one.due.lands * step)
        waited += one.a_step * (seconds - free)
        hidden += one.a_step * free
        nbytes += one.a_step * one.nbytes * _with_answers(one.due.kind, layout.num_replicas)
    link = "between" if across else "inside"
    kept = sum(kept_nbytes(own, made).values())
    return PricedRounds(str(strategies.parse(layout.sync)), waited, hidden, nbytes, link, kept)


def _seconds(
    one: Exchange, layout: Layout, everyone: RankGroup, topology: Topology, *, across: bool
) -> float:
    """Of one round of the kind."""
    if one.due.kind != MEAN:
        return message_seconds(one.nbytes, topology, across_hosts=across)
    apart = layout.num_ranks // layout.num_replicas
    near = RankGroup.strided(one.due.group or 1, apart, topology.host_size)
    group = near if one.due.group else everyone
    return collective_seconds("all_reduce", one.message_nbytes, group, topology)


def _with_answers(kind: str, num_replicas: int) -> float:
    """How many times as many bytes a rank sends as its own messages have, if others call it."""
    if kind == CENTRE:
        return 2.0
    asked = num_replicas // 2  # every other replica asks, the rest answer
    return (num_replicas - asked) / asked if kind == PAIR else 1.0
