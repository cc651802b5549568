"""Contracts of `torch_private/checkpoint_parts.py`."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tutti.torch_private.checkpoint_parts import (
    MEMORY_FORMATS,
    StorageInfo,
    layout_by_name,
    remote_files,
    remote_writer,
)


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


def test_a_reader_of_files_behind_urls_reads_what_their_writer_writes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    dcp.save({"x": torch.arange(3)}, storage_writer=remote_writer(url), no_dist=True)
    reader = FileSystemReader(str(tmp_path))
    reader.fs = remote_files()
    reader.path = reader.fs.init_path(url)
    state = {"x": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["x"].tolist() == [0, 1, 2]
