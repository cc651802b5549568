"""Faults in how a step is split in time and into stages: `verify` sees each, and says where it comes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import stacks
from pass_rows import replace_row
from subjects import verdict
from tutti.errors import ShardingError
from tutti.graph.ops import collectives
from tutti.graph.ops.loop import Body, Do, LoopPart
from tutti.graph.players import playing, virtual_ranks
from tutti.passes.accumulate import accumulate
from tutti.pipeline import timed
from tutti.pipeline.ranks import pipe_rank_graph
from tutti.pipeline.ranks.pipe_ranks import PipelinePlan
from tutti.pipeline.stages import tied
from tutti.verification.verdict import IN_TIME, Verdict
from wrong_programs import SHORT, assert_caught, drop, fresh, mean_of_means


def assert_caught_in_time(found: Verdict) -> None:
    """Wrong by far, right before the batch was split in time."""
    assert not found.ok and found.max_error > 1e-6
    assert found.wrong_pass == IN_TIME and found.first_difference is None
    assert "wrong after it\n" in f"{found}\n" and IN_TIME in str(found)


def test_a_gradient_that_is_not_added_up_over_micro_batches() -> None:
    made = fresh("micro=4")
    node = next(n for n in made.collectives if tuple(n.meta["val"].shape) == (64, 32))
    assert node.target is collectives.all_reduce and node.args[1] == ("micro",)
    drop(made, node)
    with pytest.raises(ShardingError, match="embedding_dense_backward"):  # refused, never played
        verdict(SHORT, "", made)


def test_a_mean_of_means_over_micro_batches() -> None:
    made = fresh("micro=4")
    mean_of_means(made, "micro")
    assert_caught(verdict(SHORT, "", made), "F.cross_entropy(")


def test_a_sum_that_keeps_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(entry: Any, values: list[Any], summed: list[Any], engine: Any) -> None:
        for (k, *_), x in zip(entry.sums, summed, strict=True):
            values[k] = x

    monkeypatch.setattr(playing._Called, "gather", last)
    replace_row(monkeypatch, "accumulate", on_loop=lambda body: body)
    assert_caught_in_time(stacks.verdict("stack", "pipe=2 micro=4"))


def test_what_another_micro_batch_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of micro-batch 1 reads what micro-batch 0 has saved."""
    call = virtual_ranks._VirtualEngine.call
    first: dict[int, list[Any]] = {}

    def confused(
        engine: Any, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool
    ) -> Any:
        if micro == 0:
            first[id(part)] = list(inputs)
        backward = engine.body.parts.get((1, "B")) is part
        saved = first[id(part)]
        mine = saved + inputs[len(saved) :] if backward and micro == 1 else inputs
        return call(engine, part, mine, micro, adding=adding)

    monkeypatch.setattr(virtual_ranks._VirtualEngine, "call", confused)
    assert_caught_in_time(stacks.verdict("stack", "pipe=2 micro=4"))


def test_a_pass_that_adds_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(body: Body) -> Body:
        made = accumulate(body)
        for part in made.parts.values():
            for node in list(part.adding.nodes) if part.adding else ():
                if node.target is torch.ops.aten.add_.Tensor:
                    node.kwargs = {"alpha": 2}
        return made

    replace_row(monkeypatch, "accumulate", on_loop=twice)
    found = stacks.verdict("stack", "pipe=2 micro=4")
    assert not found.ok and found.wrong_pass == "accumulate"


def test_the_random_numbers_of_another_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    at = virtual_ranks.VirtualRanks.at
    monkeypatch.setattr(
        virtual_ranks.VirtualRanks, "at", lambda ranks, micro, count: at(ranks, 0, count)
    )
    assert_caught_in_time(verdict("gpt_tied", "pipe=2 micro=4"))


def swapped(names: Sequence[str], body: Body) -> tuple[str, ...]:
    """`names` with two of one shape in each other's place, if there are two."""
    found = list(names)
    for i, one in enumerate(found):
        for j in range(i + 1, len(found)):
            if body.vals[one].shape == body.vals[found[j]].shape:
                found[i], found[j] = found[j], found[i]
                return tuple(found)
    return tuple(found)


def test_values_that_arrive_under_each_others_name(monkeypatch: pytest.MonkeyPatch) -> None:
    written = timed._TimedProgramWriter._body
    swaps = []

    def wrong(writer: Any, pipe_rank: int, row: list[Do]) -> Body:
        body = written(writer, pipe_rank, row)
        if pipe_rank == 0:
            return body
        messages = {k: swapped(v, body) for k, v in body.messages.items()}
        swaps.extend(k for k in messages if messages[k] != body.messages[k])
        return replace(body, messages=messages)

    monkeypatch.setattr(timed._TimedProgramWriter, "_body", wrong)
    assert_caught_in_time(stacks.verdict("common", "pipe=2 micro=4"))
    assert swaps


def test_weight_gradients_of_one_micro_batch_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = timed.rows_of

    def fewer(*args: Any) -> list[list[Do]]:
        return [[d for d in row if str(d) != "1W2"] for row in rows_of(*args)]

    monkeypatch.setattr(timed, "rows_of", fewer)
    assert_caught_in_time(stacks.verdict("stack", "pipe=2 micro=4 schedule=zb"))


def test_an_early_sum_over_fewer_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of targets that lacks those of the last micro-batch."""
    play = pipe_rank_graph.PipeRankGraph._play

    def fewer(graph: Any, body: Body, *rest: Any) -> None:
        early = body.results[0] in {t.name for level in graph.moments.early for t in level}
        play(graph, replace(body, row=body.row[:-1]) if early else body, *rest)

    monkeypatch.setattr(pipe_rank_graph.PipeRankGraph, "_play", fewer)
    assert_caught_in_time(stacks.verdict("stack", "pipe=2 micro=4"))


def test_a_tied_gradient_that_one_pipe_rank_does_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pipeline ranks of the addition work with what is theirs alone."""
    apart = tied.add_apart

    def half(moments: Any, stages: Any, total: Any) -> bool:
        before = list(moments.sums)
        done = apart(moments, stages, total)
        if done:
            mine, other = moments.sums[-2:]
            other.replace_all_uses_with(mine)
            assert other not in before
        return done

    monkeypatch.setattr(timed, "add_apart", half)
    assert_caught_in_time(stacks.verdict("thrice", "pipe=2 micro=4"))


def test_what_runs_at_no_pipe_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that forgets to send the parts of the gradient norm cannot be written at all."""
    plan = timed.plan_pipe_ranks

    def silent(*args: Any) -> PipelinePlan:
        made = plan(*args)
        made.transfers.clear()
        return made

    monkeypatch.setattr(timed, "plan_pipe_ranks", silent)
    with pytest.raises(KeyError):
        stacks.verdict("stack", "pipe=2 micro=4")
