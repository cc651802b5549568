"""Messages between pipeline ranks: never before what they carry is there, never after it is needed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import stacks
import subjects
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import loop
from tutti.layout import Layout
from tutti.pipeline.ranks.pipe_ranks import Transfer, bundles
from tutti.pipeline.ready import in_time

NUM_PIPE_RANKS, END = 3, 12


@st.composite
def transfers(draw: st.DrawFn) -> list[Transfer]:
    """Nodes of several pipeline ranks, each there at one position and needed at a later one."""
    graph, found = fx.Graph(), []
    for i in range(draw(st.integers(1, 12))):
        source, to = draw(st.permutations(range(NUM_PIPE_RANKS)))[:2]
        after = draw(st.integers(0, END - 1))
        until = draw(st.integers(after + 1, END))
        found.append(Transfer(graph.placeholder(f"x{i}"), source, to, after, until))
    return found


@given(transfers())
def test_in_time_and_not_too_soon(given_: list[Transfer]) -> None:
    by_node = {t.node: t for t in given_}
    found = bundles(given_)
    carried = Counter(n for *_, nodes in found for n in nodes)
    assert carried == Counter(list(by_node))  # each once
    for at, source, to, nodes in found:
        for one in map(by_node.__getitem__, nodes):
            assert (source, to) == (one.source, one.to)
            assert one.after < at <= one.until
        # As late as may be: one of them is needed right then.
        assert any(by_node[n].until == at for n in nodes)
    assert [m[:3] for m in found] == sorted(m[:3] for m in found)


@given(transfers())
def test_no_two_messages_where_one_would_do(given_: list[Transfer]) -> None:
    """On an edge a message takes along all that is there: the next one carries what came later."""
    after = {t.node: t.after for t in given_}
    last: dict[tuple[int, int], int] = {}
    for at, source, to, nodes in bundles(given_):
        before = last.get((source, to))
        assert before is None or all(after[n] >= before for n in nodes)
        last[source, to] = at


@pytest.mark.parametrize("layout", ["pipe=2 micro=4", "pipe=4 micro=4 schedule=zb"])
@pytest.mark.parametrize("name", ["stack", "thrice", "common", "telling", "summed"])
def test_pipe_ranks_send_and_receive_in_one_order(name: str, layout: str) -> None:
    """Played one after the other in the order of the list, every receive finds its send done."""
    made = in_time(stacks.subject(name).program(Layout.parse(layout)))
    rows = [
        [(n.target, *_edge(n)) for n in one.graph.nodes if n.target in _MESSAGES]
        for one in made.programs
    ]
    at, flying = [0] * len(rows), Counter[tuple[int, int]]()
    moved = True
    while moved:
        moved = False
        for pipe_rank, row in enumerate(rows):
            while at[pipe_rank] < len(row):
                target, source, to = row[at[pipe_rank]]
                assert pipe_rank == (source if target is collectives.send else to)
                if target is collectives.receive and not flying[source, to]:
                    break
                flying[source, to] += 1 if target is collectives.send else -1
                at[pipe_rank] += 1
                moved = True
    assert at == [len(row) for row in rows] and not any(flying.values())
    assert any(rows)


_MESSAGES = (collectives.send, collectives.receive)


def _edge(node: fx.Node) -> tuple[int, int]:
    source, to = node.args[1:3] if node.target is collectives.send else node.args[:2]
    return source, to  # type: ignore[return-value]


def test_state_lives_where_it_is_read_and_slots_beside_it() -> None:
    made = in_time(stacks.subject("stack").program(Layout.parse("pipe=3 micro=4")))
    everywhere = set().union(*made.owners.values())
    assert everywhere == {0, 1, 2}
    for entry in made.programs[0].captured.state:
        if entry.kind == "slot":
            assert made.owners[entry.name] == made.owners[entry.owner]
    updated = [set(one.captured.updated) for one in made.programs]
    assert all(a.isdisjoint(b) for i, a in enumerate(updated) for b in updated[:i])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_tied_weight_crosses_once_as_the_last_stage_reads_it(dtype: str, remat: str) -> None:
    layout = f"pipe=2 micro=4 precision={dtype} remat={remat}"
    (program, _) = in_time(subjects.program("gpt_tied", layout)).programs
    before = itertools.takewhile(lambda n: n.target is not loop, program.graph.nodes)
    sent = [x for n in before if n.target is collectives.send for x in n.args[0]]  # type: ignore[union-attr]
    assert [str(x.meta["val"].dtype) for x in sent] == [
        "torch.float32" if dtype == "fp32" else "torch.bfloat16"
    ]
