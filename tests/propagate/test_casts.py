"""A weight that is computed with in bf16 is cast where it is stored: what is gathered is bf16."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

import zoo
from subjects import program
from tutti.graph.ops.collectives import all_gather
from tutti.layout import Layout
from tutti.partition.partition import Program
from tutti.report.explanation import records
from tutti.verification.verdict import Subject

aten = torch.ops.aten
HALF = torch.bfloat16


def gathered(made: Program) -> dict[str, dict[str, list[fx.Node]]]:
    """The gathers of each weight, by parameter and the region that they are for."""
    found: dict[str, dict[str, list[fx.Node]]] = {}
    for n in made.collectives:
        kind = made.plan.boundaries.get(n.meta["user"])
        if n.target is all_gather and kind is not None and kind.parameter:
            found.setdefault(kind.parameter, {}).setdefault(kind.into, []).append(n)
    return found


def matrices(made: Program) -> set[str]:
    """The weights of linear layers: the parameters that autocast casts."""
    return {n for n in gathered(made) if n.endswith("weight") and "norm" not in n} - {
        n for n in gathered(made) if "embed" in n or n == "pos.weight"
    }


def casts(made: Program) -> Counter[str]:
    """How often each parameter is cast to bf16 in the program of one rank."""
    found: Counter[str] = Counter()
    for n in made.graph.nodes:
        if n.target is aten._to_copy.default and n.meta["val"].dtype == HALF:
            name = n.args[0].meta.get("name", "")
            if made.captured.kinds.get(name) == "parameter":
                found[name] += 1
    return found


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "data=2 zero=3") for name in ("resnet", "llama", "checkpoint", "gpt")),
        *((name, "data=2 tensor=2 zero=3") for name in ("llama", "checkpoint")),
    ],
)
def test_zero_3_gathers_linear_weights_in_bf16(name: str, layout: str) -> None:
    made = program(name, f"{layout} precision=bf16")
    found = gathered(made)
    assert matrices(made)
    for weight, regions in found.items():
        for nodes in regions.values():
            assert len(nodes) == 1, f"{weight} is gathered once for each region"
    narrow = {w for w, r in found.items() if all(n.meta["val"].dtype == HALF for n in r["forward"])}
    if name != "resnet":
        assert matrices(made) <= narrow
    assert narrow and {n for n in found if "norm" in n}.isdisjoint(narrow)
    # Each is cast once, on the part that is stored, and gathered from there in every region.
    assert casts(made) == Counter(dict.fromkeys(narrow, 1))
    for weight in narrow:
        for nodes in found[weight].values():
            (source,) = nodes[0].all_input_nodes
            assert source.target is aten._to_copy.default
            assert source.args[0].meta["name"] == weight  # type: ignore[union-attr]
            part = made.storage[weight].local_shape(made.mesh)
            assert tuple(source.meta["val"].shape) == tuple(part)


def test_half_the_bytes() -> None:
    half, full = (program("gpt", f"data=2 zero=3{p}") for p in (" precision=bf16", ""))
    found = matrices(full)

    def nbytes(made: Program) -> int:
        users = {n.meta["user"] for w in found for r in gathered(made)[w].values() for n in r}
        pairs = zip(made.collectives, records(made), strict=True)
        return sum(r.nbytes for n, r in pairs if n.meta["user"] in users)

    assert 2 * nbytes(half) == nbytes(full) > 0


@pytest.mark.parametrize("zero", [1, 2])
def test_whole_weights_are_cast_where_they_are_and_stay_float32_between_steps(zero: int) -> None:
    made = program("gpt", f"data=2 zero={zero} precision=bf16")
    assert gathered(made) == {}
    assert set(casts(made).values()) == {1}
    moved = [n for n in made.collectives if n.target is all_gather]
    assert {n.meta["val"].dtype for n in moved} == {torch.float32}


def test_a_weight_that_is_needed_both_ways_is_gathered_once_as_it_is_stored() -> None:
    """A tied embedding: rows in float32, logits in bf16. The backward needs the narrow one only."""
    made = program("gpt_tied", "data=2 zero=3 precision=bf16")
    (tied,) = [n for n in gathered(made) if "embed" in n]
    regions = gathered(made)[tied]
    kinds = {r: [n.meta["val"].dtype for n in nodes] for r, nodes in regions.items()}
    assert kinds == {"forward": [torch.float32], "backward": [HALF]}


def test_what_is_gathered_for_the_forward_is_not_kept_for_the_backward() -> None:
    made = program("gpt", "data=2 zero=3 precision=bf16")
    order = {n: i for i, n in enumerate(made.graph.nodes)}
    first = min(i for n, i in order.items() if n.meta.get("region") == "backward")
    for regions in gathered(made).values():
        reach = list(regions["forward"])
        while reach:
            node = reach.pop()
            for user in node.users:
                assert order[user] < first
                if user.target in (aten.permute.default, aten.reshape.default):
                    reach.append(user)


class Parts(nn.Module):
    """One packed weight, used in two parts and through a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.packed.chunk(2)
        return (x @ a.t()).relu() @ b


def parts_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_a_weight_seen_through_views_is_gathered_in_bf16_too() -> None:
    torch.manual_seed(0)
    model = Parts()
    subject = Subject(parts_step, model, zoo.sgd(model), (torch.randn(8, 8),), precision="bf16")
    made = subject.program(Layout.parse("data=2 zero=3 precision=bf16"))
    dtypes = [n.meta["val"].dtype for r in gathered(made)["packed"].values() for n in r]
    assert set(dtypes) == {HALF}
    assert casts(made) == {"packed": 1}
    assert subject.verdict(made.layout, program=made).ok


def test_explain_names_the_weight_its_type_and_its_bytes() -> None:
    made = program("gpt", "data=2 zero=3 precision=bf16")
    found = {(r.value, r.region): r for r in records(made) if r.cause.startswith("weight")}
    one = found["blocks.0.up.weight", "forward"]
    assert (one.dtype, one.cause) == ("bf16", "weight for the forward")
    assert one.nbytes == 128 * 32 * 2 // 2
    assert found["norm.weight", "forward"].dtype == "f32"
