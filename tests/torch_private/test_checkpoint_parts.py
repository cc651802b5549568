"""Contracts of `torch_private/checkpoint_parts.py`."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tutti.torch_private.checkpoint_parts import MEMORY_FORMATS, StorageInfo, layout_by_name


class _Named(pickle.Unpickler):
    """Notes what a pickle names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[Any] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        self.names.add(found)
        return found


def test_an_index_names_the_private_parts(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    named = _Named(io.BytesIO((tmp_path / ".metadata").read_bytes()))
    named.load()
    assert {MEMORY_FORMATS, StorageInfo, layout_by_name} <= named.names


def test_a_part_lies_in_a_file_from_an_offset_for_a_length(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    (found,) = FileSystemReader(tmp_path).read_metadata().storage_data.values()
    again = StorageInfo(found.relative_path, found.offset, found.length)
    assert again == found
    assert (tmp_path / found.relative_path).stat().st_size >= found.offset + found.length


def test_a_layout_is_found_by_its_name() -> None:
    assert layout_by_name("torch.strided") is torch.strided
    assert MEMORY_FORMATS.TORCH_CONTIGUOUS_FORMAT in list(MEMORY_FORMATS)
