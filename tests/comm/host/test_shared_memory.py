"""Collectives in shared memory: in arenas as outside, in any order over several groups, at any pace."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranks import Ranks
from tutti.comm.collectives.groups import Groups
from tutti.comm.collectives.process_groups import ProcessGroups
from tutti.comm.host.mailboxes import chunk_nbytes
from tutti.comm.host.reduce import reduce_into
from tutti.comm.host.shared_memory import SharedGroup
from tutti.errors import CommError
from ways import SHARED, by

GRID = {"data": 2, "tensor": 2}
OVER = (("data",), ("tensor",), ("data", "tensor"), ("tensor", "data"))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)
NARROW = (torch.float8_e4m3fn, torch.uint16)
_groups: dict[Any, Groups] = {}


def groups_of(sizes: dict[str, int], used: tuple[tuple[str, ...], ...]) -> Groups:
    key = tuple(sizes.items())
    if key not in _groups:
        with by(SHARED), warnings.catch_warnings():
            warnings.simplefilter("error")
            _groups[key] = Groups(sizes, used)
    return _groups[key]


def line_of(n: int) -> SharedGroup:
    shared = groups_of({"data": n}, (("data",),)).shared(("data",))
    assert shared is not None
    return shared


def values(seed: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same on every rank."""
    numbers = torch.Generator().manual_seed(random.Random(str(seed)).randrange(2**31))
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=numbers, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=numbers).to(dtype)


def reduced(xs: list[Tensor], op: str) -> Tensor:
    """In the group's order, as is promised to the bit."""
    out = torch.empty_like(xs[0])
    reduce_into(out, xs, op)
    return out


def in_arenas_and_outside(n: int, dtype: torch.dtype, size: int) -> None:
    """Every method on a tensor in an arena, against the plain one and the direct computation."""
    shared = line_of(n)
    me, shape = shared.position, (n, size)
    lying = shared.empty(shape, dtype)
    second = shared.empty((2, 3), dtype)
    every = [values(("whole", j), shape, dtype) for j in range(n)]
    lying.copy_(every[me])
    second.copy_(every[me].view(-1)[0].expand(2, 3))
    where = shared.everywhere(lying)
    assert where is not None and where[me].data_ptr() == lying.data_ptr()
    shared.barrier()
    assert all(torch.equal(x, y) for x, y in zip(where, every, strict=True))
    assert shared.everywhere(lying.clone()) is None and shared.everywhere(lying.t()[1:]) is None

    for op in ("sum",) if dtype.is_complex else ("sum", "max", "prod"):
        total = reduced(every, op)
        for x in (lying, every[me]):
            assert torch.equal(shared.all_reduce(x, op), total)
            part = shared.reduce_scatter(x, op)
            assert torch.equal(part, total[me])
        parts = [whole[me] for whole in where]
        (part,) = shared.reduce([parts], op)
        assert torch.equal(part, total[me])
        shared.claim()
        shared.reduce_([parts], op)
        assert torch.equal(lying[me], total[me])
        shared.claim()
        lying[me] = every[me][me]
    assert torch.equal(shared.all_gather(lying), torch.stack(every))
    assert torch.equal(shared.all_gather(every[me]), torch.stack(every))
    turned = torch.stack([whole[me] for whole in every])
    assert torch.equal(shared.all_to_all(lying), turned)
    for root in range(n):
        for x in (lying, every[me]):
            assert torch.equal(shared.broadcast(x, root), every[root])
    assert torch.equal(lying, every[me]), "a collective changed its input"

    lying.zero_()[me].copy_(every[me][me])
    shared.all_gather_([lying])
    shared.claim()
    assert torch.equal(lying, torch.stack([whole[j] for j, whole in enumerate(every)]))
    lying.copy_(every[me])
    shared.all_reduce_([lying, second], "sum")
    assert torch.equal(lying, reduced(every, "sum"))
    first = reduced([whole.view(-1)[:1] for whole in every], "sum")
    assert torch.equal(second, first.expand(6).view(2, 3))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_arenas_as_outside(ranks: Ranks, n: int, dtype: torch.dtype) -> None:
    ranks.run(in_arenas_and_outside, n, dtype, 37, n=n)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16), (8, torch.float32)],
)
def test_tensors_above_a_chunk(ranks: Ranks, n: int, dtype: torch.dtype) -> None:
    size = chunk_nbytes(n) // dtype.itemsize + 13
    ranks.run(in_arenas_and_outside, n, dtype, size, n=n)


def narrow(dtype: torch.dtype) -> None:
    shared = line_of(4)
    xs = [values(j, (4, 5), torch.uint8).to(dtype) for j in range(4)]
    total = sum(x.float() for x in xs)
    assert isinstance(total, Tensor)
    assert torch.equal(shared.all_reduce(xs[shared.position], "sum").float(), total)
    part = shared.reduce_scatter(xs[shared.position], "sum")
    assert torch.equal(part.float(), total[shared.position])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_dtypes_that_torch_does_not_add(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(narrow, dtype)


def empties() -> None:
    shared = line_of(4)
    lying, nothing = shared.empty((4, 0), torch.float32), torch.empty(4, 0)
    for x in (lying, nothing):
        assert shared.all_reduce(x, "sum").shape == (4, 0)
        assert shared.all_gather(x).shape == (4, 4, 0)
        assert shared.reduce_scatter(x, "sum").shape == (0,)
        assert shared.all_to_all(x).shape == (4, 0)
        assert shared.broadcast(x, 1).shape == (4, 0)
    shared.all_reduce_([lying], "sum")
    shared.all_reduce_([], "sum")
    shared.all_gather_([lying])
    assert shared.reduce([[lying[0]] * 4], "sum")[0].shape == (0,)


def test_empty_tensors(ranks: Ranks) -> None:
    ranks.run(empties)


def given_back() -> int:
    """The tensor is written again as soon as a collective returns; count the wrong results."""
    shared = line_of(4)
    lying = shared.empty((4, 500), torch.float64)
    chance, wrong = random.Random(shared.position), 0
    for number in range(150):
        lying.fill_(number)
        name = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")[number % 4]
        got = getattr(shared, name)(lying, *(["sum"] if "reduce" in name else []))
        lying.fill_(-1)
        wrong += not bool((got == number * (4 if "reduce" in name else 1)).all())
        if chance.random() < 0.1:
            time.sleep(chance.random() * 3e-3)
    return wrong


def test_what_was_given_may_be_written_again(ranks: Ranks) -> None:
    assert ranks.run(given_back) == [0] * 4


# Random sequences: each entry is a collective, its axes, dtype, size, and whether it lies in an arena.
MOVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "all_reduce_",
    "barrier",
)
ENTRIES = st.tuples(
    st.sampled_from(MOVES),
    st.sampled_from(OVER),
    st.sampled_from(FLOATS),
    st.sampled_from([1, 3, 64, 1000, 70_001]),
    st.booleans(),
)
_lying: dict[Any, Tensor] = {}


def sequence(seed: int, entries: list[tuple[str, tuple[str, ...], torch.dtype, int, bool]]) -> None:
    groups = groups_of(GRID, OVER)
    chance = random.Random(f"{seed} {groups.rank}")
    for number, (name, axes, dtype, size, inside) in enumerate(entries):
        shared, group = groups.shared(axes), groups[axes]
        assert shared is not None
        if chance.random() < 0.2:
            time.sleep(chance.random() * 4e-3)
        whole = [values((seed, number, r), (group.size, size), dtype) for r in group.ranks]
        x = whole[shared.position]
        if inside or name == "all_reduce_":
            key = (axes, dtype, size)
            if key not in _lying:
                _lying[key] = shared.empty((group.size, size), dtype)
            shared.claim()
            x = _lying[key].copy_(x)
        got, want = played(shared, name, x, whole)
        assert torch.equal(got, want), (number, name, axes, dtype, size, inside)


def played(shared: SharedGroup, name: str, x: Tensor, every: list[Tensor]) -> tuple[Tensor, Tensor]:
    me, root = shared.position, len(every) - 1
    if name == "all_reduce":
        return shared.all_reduce(x, "sum"), reduced(every, "sum")
    if name == "all_reduce_":
        shared.all_reduce_([x], "max")
        return x, reduced(every, "max")
    if name == "all_gather":
        return shared.all_gather(x), torch.stack(every)
    if name == "reduce_scatter":
        return shared.reduce_scatter(x, "sum"), reduced(every, "sum")[me]
    if name == "all_to_all":
        return shared.all_to_all(x), torch.stack([whole[me] for whole in every])
    if name == "broadcast":
        return shared.broadcast(x, root), every[root]
    shared.barrier()
    return x, every[me]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), entries=st.lists(ENTRIES, min_size=1, max_size=25))
def test_random_sequences_over_several_groups(
    ranks: Ranks, seed: int, entries: list[tuple[str, tuple[str, ...], torch.dtype, int, bool]]
) -> None:
    ranks.run(sequence, seed, entries)


def progress_of(num_rounds: int) -> tuple[int, int]:
    """How many voluntary switches (sleeps) eight ranks on few cores take a collective."""
    import resource

    shared, x = line_of(8), torch.ones(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(num_rounds):
        x = shared.all_reduce(x, "max")
    return int(x.sum()), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


def test_more_ranks_than_cores_sleep_instead_of_polling(ranks: Ranks) -> None:
    """A rank sleeps at most once for each of the others and a few times for looks."""
    num_rounds = 300
    for total, sleeps in ranks.run(progress_of, num_rounds, n=8):
        assert total == 100 and sleeps < 7 * num_rounds + 200


def different(kind: str) -> str:
    shared = SharedGroup(
        groups_of(GRID, OVER)[("data",)].ranks,
        groups_of(GRID, OVER)[("data",)].position,
        groups_of(GRID, OVER).shared(("data",))._exchange,  # type: ignore[union-attr]
        20.0,
    )
    first = shared.position == 0
    lying = shared.empty((2, 8), torch.float32)
    calls: dict[str, tuple[str, Tensor, tuple[str, ...]]] = {
        "op": ("all_reduce", torch.ones(8), ("sum" if first else "max",)),
        "size": ("all_reduce", torch.ones(8 if first else 9), ("sum",)),
        "dtype": ("all_gather", torch.ones(8, dtype=torch.float32 if first else torch.int32), ()),
        "name": ("reduce_scatter" if first else "all_reduce", torch.ones(2, 4), ("sum",)),
        "place": ("all_reduce", lying[0] if first else lying[1], ("sum",)),
        "arena": ("all_reduce", lying if first else torch.ones(2, 8), ("sum",)),
    }
    name, x, args = calls[kind]
    try:
        getattr(shared, name)(x, *args)
    except RuntimeError as error:
        return f"{type(error).__name__} {error.ranks}"  # type: ignore[attr-defined]
    return "it went through"


@pytest.mark.parametrize("kind", ["op", "size", "dtype", "name", "place", "arena"])
def test_ranks_in_different_collectives_are_told_so(ranks: Ranks, kind: str) -> None:
    over_data = {0: 2, 1: 3, 2: 0, 3: 1}
    wanted = [f"PeerDiffers ({other},)" for other in over_data.values()]
    assert ranks.run(different, kind) == wanted


def told() -> str:
    groups = Groups({"data": 2}, [("data",)])
    x = torch.ones(4 + groups.rank)
    with pytest.raises(CommError) as error:
        ProcessGroups(groups).all_reduce(x, ("data",), "sum")
    return error.value.what


def test_the_error_names_the_rank_that_differs(ranks: Ranks) -> None:
    for rank, what in enumerate(ranks.run(told, n=2)):
        assert what.startswith(
            f"rank {1 - rank} came to another collective than rank {rank} in all_"
        )


def many_groups() -> int:
    """Groups made again and again hold no descriptors when they are gone."""
    import gc
    import os

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def use() -> None:
        groups = Groups({"data": 4}, [("data",)])
        shared = groups.shared(("data",))
        assert shared is not None
        shared.empty((4,), torch.float32)
        shared.all_reduce(torch.ones(3), "sum")

    use()
    before = count()
    for _ in range(5):
        use()
    return count() - before


def test_groups_leave_no_descriptors(ranks: Ranks) -> None:
    assert max(ranks.run(many_groups)) <= 0  # an earlier object may end meanwhile


def same_memory() -> bool:
    sizes = {"data": 4, "pipe": 1}
    groups = Groups(sizes, [("data",), ("data", "pipe"), ("pipe", "data")])
    return len({id(groups.shared(axes)) for axes in (("data",), ("data", "pipe"))}) == 1


def test_axes_of_size_one_take_no_memory_of_their_own(ranks: Ranks) -> None:
    assert all(ranks.run(same_memory))


def test_reductions_run_in_order() -> None:
    for dtype, n in itertools.product(FLOATS, (2, 3, 4)):
        xs = [values(j, (50,), dtype) for j in range(n)]
        for target in range(n):  # the result may take the place of any part
            parts = [x.clone() for x in xs]
            reduce_into(parts[target], parts, "sum")
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            total = xs[0].to(wide)
            for x in xs[1:]:
                total = total + x.to(wide)
            assert torch.equal(parts[target], total.to(dtype))
