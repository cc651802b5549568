"""Checksums of files: all bytes are under one, and ranks share the work."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tutti.checkpoint import digest


def test_segments_cover_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SEGMENT_NBYTES", 1000)
    file = tmp_path / "file"
    content = bytes(range(256)) * 10
    file.write_bytes(content)
    found = digest.digest_of(file)
    pieces = [content[k : k + 1000] for k in range(0, len(content), 1000)]
    assert found.nbytes == 2560
    assert list(found.sha256) == [hashlib.sha256(piece).hexdigest() for piece in pieces]


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_one_of_all_shares_finds_a_change(
    shares: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SEGMENT_NBYTES", 100)
    contents = {"a": bytes(450), "b": bytes(30), "c": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = {name: digest.digest_of(tmp_path / name) for name in contents}
    for name, content in contents.items():
        for at in range(0, len(content), 29):
            damaged = bytearray(content)
            damaged[at] = 1
            (tmp_path / name).write_bytes(damaged)
            found = [
                digest.find_damage(tmp_path, files, share=k, shares=shares) for k in range(shares)
            ]
            assert sum(map(bool, found)) == 1, (name, at)
        (tmp_path / name).write_bytes(content)
    assert not any(
        digest.find_damage(tmp_path, files, share=k, shares=shares) for k in range(shares)
    )
