"""A batch that another rank unpacks is the batch that was packed; what cannot be is named."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tutti.data.batch_frames import NotSendable, packed, unpacked

Pair = namedtuple("Pair", "one other")


@dataclasses.dataclass
class Item:
    x: Tensor
    count: int


class Encoding(UserDict):
    pass


@dataclasses.dataclass
class Slots:
    __slots__ = ("x",)
    x: int


@dataclasses.dataclass
class Output(dict):
    x: int


def sent(batch: Any, in_place: Callable[[Tensor], bool] = lambda _: False) -> Any:
    """The batch after its way through text and bytes, which then change."""
    said, parts = packed(batch)
    memory = torch.zeros(64 + max((low + len(x) for low, x in parts), default=0), dtype=torch.uint8)
    memory = memory[64:]
    for low, x in parts:
        memory[low : low + len(x)] = x
    found = unpacked(json.loads(json.dumps(said)), memory, in_place=in_place)
    memory.zero_()
    return found


BASE = torch.arange(130).view(2, 65)
TENSORS = {
    "rows": torch.randn(3, 4),
    "part": BASE[:, 1:],
    "turned": torch.randn(4, 6).t(),
    "expanded": torch.randn(3).expand(2, 3),
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
    "odd": torch.arange(7, dtype=torch.int8)[3:],
    "gradient": torch.randn(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    x = TENSORS[name]
    y = sent({"a": x, "more": torch.ones(3)})["a"]
    assert type(y) is Tensor and y.dtype == x.dtype and y.stride() == x.stride()
    assert y.requires_grad == x.requires_grad
    assert y.shape == x.shape and y.tolist() == x.tolist()


def test_tensors_keep_their_common_memory() -> None:
    x, y, same, again = sent([BASE[:, :-1], BASE[:, 1:], BASE[0], BASE[0]])
    y[0, 0] = -1
    assert x[0, 1] == same[1] == again[1] == -1
    one, other = sent([TENSORS["rows"]] * 2)
    assert one is other


def test_a_part_of_a_large_storage_travels_alone() -> None:
    _, parts = packed(torch.zeros(1000, 1000)[500:502])
    assert sum(len(x) for _, x in parts) <= 8000 + 64


def test_other_leaves_and_containers() -> None:
    batch = {
        **{"text": "a\u00e9\ud800", "none": None, "yes": True, "big": 2**70, "bytes": b"\x00\xff"},
        **{3: (1, [2.5, -0.0]), (1, "k"): 1j, "pair": Pair(1, "b"), "order": OrderedDict(b=1, a=2)},
    }
    found = sent(batch)
    assert found == batch and list(found) == list(batch)
    assert isinstance(found["pair"], Pair) and isinstance(found["order"], OrderedDict)
    assert found["yes"] is True and math.copysign(1, found[3][1][1]) == -1
    assert math.isnan(sent(float("nan")))


def test_classes_of_containers() -> None:
    item = sent(Item(torch.ones(2), 3))
    assert isinstance(item, Item) and item.x.tolist() == [1, 1] and item.count == 3
    encoding = sent(Encoding({"x": torch.ones(2)}))
    assert isinstance(encoding, Encoding) and encoding["x"].tolist() == [1, 1]
    sequence = pack_sequence([torch.ones(3), torch.ones(2)])
    assert isinstance(sent(sequence), PackedSequence)
    assert sent(sequence).batch_sizes.tolist() == [2, 2, 1]


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "u2", "?", "c8"])
def test_arrays(dtype: str) -> None:
    x = np.arange(6).astype(dtype).reshape(2, 3)
    found = sent({"x": x, "one": x[1, 2], "none": x[:0]})
    assert found["x"].dtype == x.dtype and found["x"].tolist() == x.tolist()
    assert found["one"] == x[1, 2] and type(found["one"]) is type(x[1, 2])
    assert found["none"].shape == (0, 3)


def test_tensors_in_place_are_views() -> None:
    x, y = sent([torch.ones(4, 2), torch.ones(3)], in_place=lambda x: len(x) == 4)
    assert x.tolist() == [[0, 0]] * 4 and y.tolist() == [1, 1, 1]  # the memory has changed since


def loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "leaf",
    [
        *({1, 2}, object(), Item, defaultdict(list), torch.Size([1]), np.array(["a"])),
        *(torch.zeros(2).to_sparse(), torch.nn.Parameter(torch.zeros(1)), loop()),
        *(
            torch.zeros(2, device="meta"),
            torch.ones(1, requires_grad=True) * 2,
            Slots(1),
            Output(1),
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_sent(leaf: Any) -> None:
    with pytest.raises(NotSendable):
        packed({"leaf": [leaf]})


@pytest.mark.parametrize("name", ["os:system", "nowhere:X", "builtins:dict", "torch:Tensor"])
@pytest.mark.parametrize("kind", ["named", "object"])
def test_a_text_names_no_other_class(kind: str, name: str) -> None:
    with pytest.raises(NotSendable):
        unpacked({"value": [kind, name], "regions": []}, torch.zeros(0), in_place=lambda _: False)


def test_a_class_inside_a_function_is_not_sent() -> None:
    @dataclasses.dataclass
    class Inner:
        x: int

    with pytest.raises(NotSendable, match="Inner"):
        packed(Inner(1))
