"""A hostile checkpoint runs nothing: it is refused, with the name that it asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from checkpoint import saved
from tutti.checkpoint.digest import digest_of
from tutti.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from tutti.errors import CheckpointError
from tutti.torch_private.checkpoint_parts import MEMORY_FORMATS


class Evil:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    saved.save(tmp_path / "saved", 3)
    return tmp_path / "saved"


def manifest_of(path: Path) -> Manifest:
    return parse_manifest((path / MANIFEST).read_text(), path)


def write(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and let the manifest say that it is right: a foe can do that, too."""
    manifest = manifest_of(path)
    file = path / manifest.folder / name
    file.write_bytes(content)
    files = {**manifest.files, name: digest_of(file)}
    (path / MANIFEST).write_text(replace(manifest, files=files).text())


def index_of(path: Path) -> Metadata:
    return pickle.loads((path / manifest_of(path).folder / ".metadata").read_bytes())


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        saved.load(path)
    assert caught.value.why
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "posix.system"), (eval, "builtins.eval"), (getattr, "builtins.getattr")],
)
def test_an_index_that_would_run_code_is_refused_by_name(
    function: Callable[..., Any], name: str, path: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    given = {
        os.system: (f"touch {made}",),
        eval: (f"open({str(made)!r}, 'w')",),
        getattr: ("text", "format"),
    }
    write(path, ".metadata", pickle.dumps(Evil(function, *given[function])))
    assert name in refused(path)
    assert not made.exists()


def test_an_index_that_an_early_python_3_11_wrote_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a memory format as `getattr` of the enumeration; no other `getattr` is called."""
    monkeypatch.setattr(
        MEMORY_FORMATS, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    content = pickle.dumps(index_of(path))
    assert b"getattr" in content
    write(path, ".metadata", content)
    saved.load(path)
    for name in (b"__reduce_ex__", b"__members__"):
        text = b"c%s\n%s\n" % (
            MEMORY_FORMATS.__module__.encode(),
            MEMORY_FORMATS.__qualname__.encode(),
        )
        write(path, ".metadata", b"cbuiltins\ngetattr\n(" + text + b"V" + name + b"\ntR.")
        assert "builtins.getattr" in refused(path)


def test_code_within_an_index_that_is_right_otherwise_is_refused(
    path: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    index = index_of(path)
    index.planner_data = Evil(os.mkdir, str(made))
    write(path, ".metadata", pickle.dumps(index))
    assert "posix.mkdir" in refused(path)
    assert not made.exists()


@pytest.mark.parametrize("attribute", ["load", "hub", "ops", "Tensor", "no_such_name"])
def test_of_torch_only_dtypes_and_sizes_are_built(attribute: str, path: Path) -> None:
    write(path, ".metadata", f"ctorch\n{attribute}\n.".encode())
    assert f"torch.{attribute}" in refused(path)


def test_an_entry_that_is_an_object_is_refused(path: Path) -> None:
    """`torch.distributed.checkpoint` would unpickle it without a list."""
    index = index_of(path)
    index.state_dict_metadata["up.bias"] = BytesStorageMetadata()
    write(path, ".metadata", pickle.dumps(index))
    assert "BytesStorageMetadata" in refused(path)


def test_a_shard_that_holds_an_object_is_refused(path: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    buffer = io.BytesIO()
    torch.save(Evil(os.mkdir, str(made)), buffer)
    index = index_of(path)
    place = next(p for i, p in index.storage_data.items() if i.fqn == "up.weight")
    name = place.relative_path
    place.offset, place.length = 0, len(buffer.getvalue())
    write(path, name, buffer.getvalue())
    write(path, ".metadata", pickle.dumps(index))
    refused(path)
    assert not made.exists()


@pytest.mark.parametrize("elsewhere", ["/etc/hostname", "../../other", "another.distcp"])
def test_a_place_outside_of_the_checkpoint_is_refused(elsewhere: str, path: Path) -> None:
    index = index_of(path)
    for place in index.storage_data.values():
        place.relative_path = elsewhere
    write(path, ".metadata", pickle.dumps(index))
    assert elsewhere in refused(path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"N.", b"].", b"I1\n."], ids=repr)
def test_what_is_no_index_is_refused(content: bytes, path: Path) -> None:
    write(path, ".metadata", content)
    assert "index of the checkpoint cannot be read" in refused(path)


def test_an_index_of_other_shapes_is_refused(path: Path) -> None:
    index = index_of(path)
    form = index.state_dict_metadata["up.bias"]
    assert isinstance(form, TensorStorageMetadata)
    form.size = torch.Size([2**40])
    form.chunks[0].sizes = torch.Size([2**40])
    write(path, ".metadata", pickle.dumps(index))
    refused(path)


def test_a_manifest_cannot_lead_elsewhere(path: Path) -> None:
    body = json.loads((path / MANIFEST).read_text())
    for folder in ("..", "/etc", "state-../../../x"):
        text = replace(manifest_of(path), folder=folder).text()
        with pytest.raises(CheckpointError, match="cannot be read"):
            parse_manifest(text, path)
    assert body["folder"].startswith("state-")
