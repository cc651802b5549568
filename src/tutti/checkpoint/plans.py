"""Exchanges the ranks' plans of a save as JSON, without pickles.

`torch.distributed.checkpoint` plans and writes; it would exchange plans between ranks as pickles.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from tutti.checkpoint.manifest import dtype_name, dtype_of
from tutti.torch_private.checkpoint_parts import StorageInfo


def plan_text(plan: SavePlan) -> str:
    """A local plan, of tensors only, as JSON."""
    return json.dumps([_item(item) for item in plan.items])


def plan_of(text: str) -> SavePlan:
    """Parse a plan."""
    items = [_item_of(*found) for found in json.loads(text)]
    names = {item.index.fqn: (item.index.fqn,) for item in items}
    return SavePlan(items, planner_data=names)


def _item(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None, item.index.fqn
    return [
        item.type.name,
        *_index(item.index),
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        list(data.size),
        dtype_name(data.properties.dtype),
    ]


def _item_of(
    kind: str,
    name: str,
    offset: list[int] | None,
    index: int | None,
    offsets: list[int],
    sizes: list[int],
    size: list[int],
    dtype: str,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype=dtype_of(dtype))
    data = TensorWriteData(chunk, properties, torch.Size(size))
    where = MetadataIndex(name, offset, index)
    return WriteItem(where, WriteItemType[kind], tensor_data=data)


def results_text(results: list[WriteResult]) -> str:
    """The locations of a rank's shards, as JSON."""
    found = []
    for one in results:
        place = one.storage_data
        at = [place.relative_path, place.offset, place.length]
        found.append([*_index(one.index), one.size_in_bytes, *at])
    return json.dumps(found)


def results_of(text: str) -> list[WriteResult]:
    """Parse the locations."""
    return [
        WriteResult(MetadataIndex(name, at, index), nbytes, StorageInfo(file, begin, length))
        for name, at, index, nbytes, file, begin, length in json.loads(text)
    ]


def within(folder: str, results: list[list[WriteResult]]) -> list[list[WriteResult]]:
    """The same results, relative to the folder above `folder`."""
    return [[_below(folder, one) for one in found] for found in results]


def _below(folder: str, one: WriteResult) -> WriteResult:
    place = one.storage_data
    return replace(
        one, storage_data=replace(place, relative_path=f"{folder}/{place.relative_path}")
    )


def _index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]
