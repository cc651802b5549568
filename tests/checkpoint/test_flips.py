"""A bit that flips anywhere in a checkpoint: it is refused, or the flip has no effect."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from checkpoint import saved
from tutti.checkpoint.folder import INDEX, index_damage
from tutti.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest
from tutti.errors import CheckpointError

NUM_FLIPS = 1000


def test_a_thousand_flips(tmp_path: Path) -> None:
    """In every file, in the manifest most of all; what loads is what was saved."""
    path = tmp_path / "saved"
    saved.save(path, 3)
    files = sorted(f for f in path.rglob("*") if f.is_file())
    chooses, refused = random.Random(0), 0
    for _ in range(NUM_FLIPS):
        file = chooses.choice(files)
        content = file.read_bytes()
        bit = chooses.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert saved.number_of(path) == 3, (file, bit)
        except CheckpointError:
            refused += 1
        file.write_bytes(content)
    # of four files, plain PyTorch's index and the lock are not read
    assert len(files) == 5 and refused > NUM_FLIPS / 2


@pytest.mark.parametrize("how", ["half", "bit", "gone"])
def test_a_damaged_index_of_plain_pytorch_is_named(how: str, tmp_path: Path) -> None:
    """tutti has an index of its own, so the checkpoint is whole for it."""
    path = tmp_path / "saved"
    saved.save(path, 3)
    file = path / INDEX
    content = file.read_bytes()
    assert index_damage(path, parse_manifest(read_manifest(path), path)) == ""
    file.unlink() if how == "gone" else file.write_bytes(
        content[: len(content) // 2] if how == "half" else content[:-9] + b"!" + content[-8:]
    )
    said = {"half": "truncated", "gone": "has no bytes of", "bit": "has another checksum"}[how]
    with pytest.warns(UserWarning, match=rf"\.metadata {said if how != 'half' else ''}"):
        assert saved.number_of(path) == 3
    assert said in index_damage(path, parse_manifest(read_manifest(path), path))
    without = json.loads((path / MANIFEST).read_text())
    del without["index"], without["sha256"]
    assert parse_manifest(json.dumps({**without, "format": 1}), path).index is None


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_truncated_is_told_apart_from_changed(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved.save(path, 3)
    (shard,) = path.rglob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[:nbytes])
    with pytest.raises(CheckpointError, match=f"has {nbytes} bytes of {len(content)}"):
        saved.load(path)
    shard.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match=f"has {len(content) + 1} bytes"):
        saved.load(path)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="another checksum: a bit between bytes 0 and"):
        saved.load(path)
