"""Updates that an optimizer makes of rounding are no differences; faults in just these entries are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import tutti
from rounding_steps import CASES, Lion, Make, adam_without_eps, adamw
from tutti.capture.state.found_gradients import noted
from tutti.graph.ops import collectives
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.verification.verdict import Subject
from wrong_programs import drop

aten = torch.ops.aten
OPTIMIZERS: dict[str, Make] = {"adamw": adamw, "no eps": adam_without_eps, "lion": Lion}


@cache
def subject(name: str, optimizer: str) -> Subject:
    torch.manual_seed(0)
    return Subject(*CASES[name][0](OPTIMIZERS[optimizer]))


LAYOUTS = ("data=2", "data=2 zero=3", "tensor=2")
# Cases of which faults are made below meet several optimizers, each under another layout; others meet one.
FAULTY = {"clip": tuple(OPTIMIZERS), "mobilenet": ("no eps", "lion")}
MET = FAULTY | {"mae": ("lion",), "byol": ("adamw",), "transformer": ("no eps",), "unet": ("lion",)}
PAIRS = [
    (name, optimizer, LAYOUTS[(i + j) % 3])
    for i, name in enumerate(CASES)
    for j, optimizer in enumerate(OPTIMIZERS)
    if optimizer in MET[name]
]


@pytest.mark.parametrize(("name", "optimizer", "layout"), PAIRS)
def test_rounding_is_no_difference(name: str, optimizer: str, layout: str) -> None:
    place = CASES[name][1] if "tensor" in layout else None
    found = subject(name, optimizer).verdict(Layout.parse(layout), place)
    assert found.ok and found.max_error < 1e-9, str(found)


# --- faults -------------------------------------------------------------------------------------

KEYS, QUERIES = (16, 32), (0, 16)  # of the bias of `qkv`, of width 16
KEY_BIAS = ("clip", "image.qkv.bias", KEYS)
QUERY_BIAS = ("clip", "image.qkv.bias", QUERIES)
BIAS_BEFORE_NORM = ("mobilenet", "0.bias", (0, 8))
ENTRIES = {"keys": KEY_BIAS, "before BatchNorm": BIAS_BEFORE_NORM}


def made(name: str, optimizer: str, layout: str = "data=2") -> Program:
    """A program of its own, to be edited."""
    return subject(name, optimizer).program(Layout.parse(layout))


def gradient_of(program: Program, parameter: str) -> tuple[int, fx.Node]:
    """What the update takes as a parameter's gradient on a rank, and at which place it stands in `made`."""
    value = noted(program.captured.graph)[f"0/{parameter}"]
    (mark,) = (m for m in value.users if m in program.plan.boundaries)
    return next((i, n) for i, (v, n, _) in enumerate(program.made) if v is mark)


def spoil(
    program: Program,
    parameter: str,
    entries: tuple[int, int],
    wrong: Callable[[Callable[..., fx.Node], fx.Node], fx.Node],
    *,
    unseen: bool = False,
) -> None:
    """Let `wrong` make some entries of a gradient, before the update takes it or, `unseen`, as it does."""
    place, node = gradient_of(program, parameter)
    users, graph = list(node.users), program.graph
    size = node.meta["val"].shape[0]

    def call(target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        fake = fx.map_arg(args, lambda n: n.meta["val"])
        with program.captured.mode:
            new.meta = {**node.meta, "val": target(*fake)}
        return new

    with graph.inserting_before(node.next):
        parts = [
            call(aten.slice.Tensor, node, 0, begin, end)
            for begin, end in ((0, entries[0]), entries, (entries[1], size))
        ]
        parts[1] = wrong(call, parts[1])
        new = call(aten.cat.default, parts)
    for user in users:
        user.replace_input_with(node, new)
    if not unseen:
        value, _, sharding = program.made[place]
        program.made[place] = value, new, sharding
    graph.lint()


def doubled(call: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
    return call(aten.mul.Tensor, x, 2.0)


def flipped(call: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
    return call(aten.neg.default, x)


def shifted(call: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
    return call(aten.add.Tensor, x, 1e-7)


def caught(program: Program, name: str, optimizer: str) -> bool:
    return not subject(name, optimizer).errors(program).worst <= 1e-9


# Each kind of entry with each of its optimizers, seen by one and unseen by the other.
SHIFTED = [
    (which, optimizer, (i + j) % 2 == 1)
    for i, (which, (name, _, _)) in enumerate(ENTRIES.items())
    for j, optimizer in enumerate(FAULTY[name])
]


@pytest.mark.parametrize(("which", "optimizer", "unseen"), SHIFTED)
def test_an_error_added_to_a_gradient_of_rounding(which: str, optimizer: str, unseen: bool) -> None:
    name, parameter, entries = ENTRIES[which]
    program = made(name, optimizer)
    spoil(program, parameter, entries, shifted, unseen=unseen)
    assert caught(program, name, optimizer)


@pytest.mark.parametrize(
    ("which", "wrong", "optimizer"),
    [
        *(("keys", doubled, "no eps"), ("keys", flipped, "lion")),
        *(("before BatchNorm", doubled, "lion"), ("before BatchNorm", flipped, "no eps")),
    ],
)
def test_an_update_that_takes_another_gradient_than_there_is(
    which: str, wrong: Callable[..., fx.Node], optimizer: str
) -> None:
    """On its own scale: even where that is rounding, the new state is made of this gradient."""
    name, parameter, entries = ENTRIES[which]
    program = made(name, optimizer)
    spoil(program, parameter, entries, wrong, unseen=True)
    assert caught(program, name, optimizer)


@pytest.mark.parametrize(
    ("which", "optimizer"),
    [("keys", "adamw"), ("keys", "lion"), ("before BatchNorm", "no eps")],
)
def test_a_gradient_of_one_rank_only(which: str, optimizer: str) -> None:
    """Each rank's part is not zero before BatchNorm; that of keys is, and the ranks drift apart."""
    name, parameter, _ = ENTRIES[which]
    program = made(name, optimizer)
    node = gradient_of(program, parameter)[1]
    while node.target is not collectives.all_reduce:
        node = node.all_input_nodes[0]
    drop(program, node)
    program.made = [m for m in program.made if m[1] is not node]
    assert caught(program, name, optimizer)


@pytest.mark.parametrize(
    ("wrong", "optimizer"), [(flipped, "adamw"), (flipped, "no eps"), (doubled, "lion")]
)
def test_beside_a_gradient_of_rounding(wrong: Callable[..., fx.Node], optimizer: str) -> None:
    program = made("clip", optimizer)
    spoil(program, "image.qkv.bias", QUERIES, wrong)
    assert caught(program, "clip", optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_lies_below_rounding_is_the_same_step(optimizer: str) -> None:
    """Twice zero is zero: nothing tells this from another order of sums."""
    program = made("clip", optimizer)
    spoil(program, "image.qkv.bias", KEYS, doubled)
    assert not caught(program, "clip", optimizer)


@pytest.mark.parametrize("optimizer", ["no eps", "lion"])
def test_an_update_that_is_left_out(optimizer: str) -> None:
    """Of a weight whose gradient is rounding."""
    program = made("mobilenet", optimizer)
    output = program.graph.output_node()
    both: Any = output.args[0]
    returned, updates = both
    k = program.captured.updated.index("0.bias")
    old = next(n for n in program.graph.nodes if n.meta.get("name") == "0.bias")
    updates = [*updates[:k], old, *updates[k + 1 :]]
    output.args = ((returned, updates),)
    found = subject("mobilenet", optimizer).verdict(program.layout, program=program)
    assert not found.ok and found.worst.startswith("0.bias"), str(found)


# --- replicas, servers and pipelines ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "optimizer"),
    [
        ("clip", "replica=2 data=2 sync=average(every=1)", "lion"),
        ("mobilenet", "replica=2 data=2 zero=1 sync=diloco(every=2)", "no eps"),
        ("mobilenet", "replica=2 server=1 sync=step", "lion"),
        ("clip", "replica=2 server=1 sync=async", "lion"),
    ],
)
def test_programs_that_agree(name: str, layout: str, optimizer: str) -> None:
    torch.manual_seed(0)
    step, model, one, batch = CASES[name][0](OPTIMIZERS[optimizer])
    found = tutti.verify(step, model, one, batch, layout)
    assert found.ok and found.max_error < 1e-9, str(found)


@pytest.mark.parametrize(
    ("name", "layout", "optimizer"),
    [
        ("mae", "pipe=2 micro=2", "lion"),
        ("transformer", "data=2 micro=2 zero=1", "no eps"),
    ],
)
def test_stages_and_micro_batches(name: str, layout: str, optimizer: str) -> None:
    found = subject(name, optimizer).verdict(Layout.parse(layout))
    assert found.ok and found.max_error < 1e-9, str(found)


def test_a_lost_gradient_that_no_update_shows() -> None:
    """A schedule that starts at almost nothing, or at nothing, and an optimizer without slots."""
    torch.manual_seed(0)
    built = CASES["mae"][0](lambda params: torch.optim.SGD(params, lr=1e-9))
    one = Subject(*built)
    program = one.program(Layout.parse("data=2"))
    assert one.verdict(program.layout, program=program).ok
    node = gradient_of(program, "encoder.up.weight")[1]
    assert node.target is collectives.all_reduce
    program.made = [(v, node.args[0] if n is node else n, s) for v, n, s in program.made]  # type: ignore[misc]
    drop(program, node)
    for lr in (1e-9, 0.0):
        one.feed["optim.0.lr"] = lr
        found = one.errors(program)
        assert not found.worst <= 1e-9 and "the gradient" in found.name
