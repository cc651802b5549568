"""Records that are damaged, in every way that a file can be: refused with the place, or without effect."""

from __future__ import annotations

import logging
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.protocol.updaters import Sgd
from server.wire.records.kept import Kept, same
from server.wire.running import services, train
from tutti.comm.collectives.payload import octets
from tutti.errors import ServerError
from tutti.server.wire.connections import connection, region
from tutti.server.wire.frames.frames import checksum
from tutti.server.wire.records.journal import HEAD_NBYTES, DamageError, Found, read_entries
from tutti.server.wire.records.push_segments import Slab
from tutti.server.wire.records.store import Store

PUSHES = 12


def no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed before any snapshot but the first is written."""
    monkeypatch.setattr(Store, "_in_background", lambda *_: None)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A directory of one journal, and the states that its pushes made."""
    kept = Kept(tmp_path / "records", log_nbytes=2**20)
    kept.join()
    states = kept.pushes(PUSHES)
    kept.store.close()
    return tmp_path / "records", states


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Any]]:
    """The same with four journals since the snapshot."""
    no_snapshots(monkeypatch)
    kept = Kept(tmp_path / "records", log_nbytes=2**20)
    kept.join()
    states = kept.pushes(3)
    for _ in range(3):
        kept.store.snapshot(kept.ledger)
        states += kept.pushes(3)[1:]
    kept.store.close()
    assert sorted(p.name for p in kept.store.directory.glob("journal-*")) == [  # type: ignore[union-attr]
        f"journal-{n}" for n in range(1, 5)
    ]
    return tmp_path / "records", states


def again(directory: Path, **options: Any) -> Kept:
    kept = Kept(directory, start=False, log_nbytes=2**20, **options)
    kept.store.close()
    return kept


def entries(directory: Path, number: int = 1) -> list[Found]:
    return list(read_entries(directory / f"journal-{number}", number))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def test_a_torn_tail_is_cut_at_every_byte(made: tuple[Path, list[Any]]) -> None:
    directory, states = made
    path, last = directory / "journal-1", entries(directory)[-1].offset
    whole = path.read_bytes()
    assert same(again(directory).state, states[-1])
    for length in range(last, len(whole), 7):
        path.write_bytes(whole[:length])
        assert same(again(directory).state, states[-2])


@pytest.mark.parametrize("where", ["magic", "length", "check", "text", "tag"])
@pytest.mark.parametrize("which", [4, -1])
def test_a_bad_entry_is_refused_with_its_offset(
    where: str, which: int, made: tuple[Path, list[Any]]
) -> None:
    """Also the last one: it was answered, so it may not be lost in silence."""
    directory, _ = made
    offset = entries(directory)[which].offset
    byte = {"magic": 1, "length": 17, "check": 33, "text": HEAD_NBYTES + 5, "tag": 42}[where]
    flip(directory / "journal-1", offset + byte)
    with pytest.raises(ServerError, match=rf"damaged at byte {offset} of journal-1") as caught:
        again(directory)
    assert "--repair" in str(caught.value) and str(directory / "journal-1") in str(caught.value)


def test_repair_keeps_what_precedes(
    made: tuple[Path, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, states = made
    bad = entries(directory)[5]  # the first is of the worker that joined
    flip(directory / "journal-1", bad.offset + HEAD_NBYTES)
    damaged = (directory / "journal-1").read_bytes()
    with caplog.at_level(logging.WARNING):
        kept = Kept(directory, log_nbytes=2**20, repair=True)
    assert same(kept.state, states[4])
    assert f"at least {PUSHES - 4} records" in caplog.text
    assert (directory / "journal-1.damaged").read_bytes() == damaged
    assert stat.S_IMODE((directory / "journal-1.damaged").stat().st_mode) == 0o600
    last = kept.pushes(3)[-1]
    kept.store.close()
    assert same(again(directory).state, last)  # it is whole again


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("first", r"byte 0 of journal-1"),
        ("middle", r"byte 0 of journal-3"),
        ("last", r"byte 0 of journal-4"),
    ],
)
def test_a_missing_journal_is_refused(
    what: str, said: str, several: tuple[Path, list[Any]]
) -> None:
    directory, states = several
    assert same(again(directory).state, states[-1])
    (directory / f"journal-{ {'first': 1, 'middle': 3, 'last': 4}[what] }").unlink()
    with pytest.raises(DamageError, match=said):
        again(directory)
    kept = again(directory, repair=True)
    assert same(kept.state, states[{"first": 0, "middle": 6, "last": 9}[what]]) or what == "first"
    assert what != "first" or kept.ledger.version == 0


def _cut(directory: Path) -> None:
    path = directory / "journal-2"
    path.write_bytes(path.read_bytes()[:-20])


def _at_entry(directory: Path) -> None:
    path, every = directory / "journal-2", entries(directory, 2)
    path.write_bytes(path.read_bytes()[: every[2].offset])


def _swapped(directory: Path) -> None:
    shutil.copy(directory / "journal-2", directory / "journal-3")


def _zeros(directory: Path) -> None:
    with open(directory / "journal-4", "ab") as file:
        file.write(bytes(4096))


def _left_out(directory: Path) -> None:
    path, every = directory / "journal-3", entries(directory, 3)
    raw = path.read_bytes()
    path.write_bytes(raw[: every[1].offset] + raw[every[2].offset :])


def _emptied(directory: Path) -> None:
    (directory / "journal-2").write_bytes(b"")


@pytest.mark.parametrize("harm", [_cut, _at_entry, _swapped, _zeros, _left_out, _emptied])
def test_other_damage_is_refused(
    harm: Callable[[Path], None], several: tuple[Path, list[Any]]
) -> None:
    harm(several[0])
    with pytest.raises(DamageError):
        again(several[0])
    kept = again(several[0], repair=True)
    assert any(same(kept.state, known) for known in several[1])


def test_bytes_of_a_push_that_have_changed_are_refused(made: tuple[Path, list[Any]]) -> None:
    directory, states = made
    found = entries(directory)[3]
    _, _, (_, _, segment, begin, _), _ = found.text["parts"][0]
    flip(directory / f"segment-{segment}", begin + 6)
    with pytest.raises(DamageError, match=f"byte {found.offset} of journal-1") as caught:
        again(directory)
    assert f"of segment-{segment} have a wrong checksum" in str(caught.value)
    assert same(again(directory, repair=True).state, states[2])


def test_a_damaged_snapshot_is_refused_also_with_repair(made: tuple[Path, list[Any]]) -> None:
    directory, _ = made
    path = directory / "snapshot-1"
    whole = path.read_bytes()
    for harm in (whole[:-5], whole[:200] + b"x" + whole[201:], whole + b"\0" * 64, b""):
        path.write_bytes(harm)
        for repair in (False, True):
            with pytest.raises(ServerError, match=r"damaged at byte \d+ of snapshot-1") as caught:
                again(directory, repair=repair)
        assert "--repair" not in str(caught.value)
    path.unlink()
    with pytest.raises(ServerError, match="no snapshot to begin with"):
        again(directory)


def test_a_thousand_flipped_bits(several: tuple[Path, list[Any]]) -> None:
    """Each is refused, or the state is the same: no acknowledged push is lost without a word."""
    directory, states = several
    paths = [p for p in sorted(directory.iterdir()) if p.stat().st_size]
    chance, refused = random.Random(5), 0
    for _ in range(1000):
        path = chance.choice(paths)
        byte, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, byte, bit)
        try:
            assert same(again(directory).state, states[-1]), (path, byte, bit)
        except ServerError:
            refused += 1
        flip(path, byte, bit)
    assert 300 < refused < 1000  # room in segments that no record names has no effect
    assert same(again(directory).state, states[-1])


def test_only_the_owner_may_open_records(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        kept = Kept(tmp_path / "run" / "server0")
        kept.join()
        kept.pushes(40)
        kept.store.close()
    finally:
        os.umask(old)
    found = list((tmp_path / "run").rglob("*"))
    assert {p.name.partition("-")[0] for p in found} >= {"lock", "segment", "journal", "snapshot"}
    for path in (tmp_path / "run", *found):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_directory_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(ServerError, match="no directory of a server's records"):
        Kept(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_thousands_of_pushes_take_a_few_segments(tmp_path: Path) -> None:
    """Descriptors, mappings and files do not grow with the pushes, nor do slabs beyond the log's length."""
    kept = Kept(tmp_path / "records", log_nbytes=2**19)
    kept.join()
    before, most = len(os.listdir("/proc/self/fd")), kept.store._most_slabs
    for _ in range(2500):
        kept.push()
    assert len(kept.store.segments) <= 10
    assert len(os.listdir("/proc/self/fd")) - before <= len(kept.store.segments) + 4
    mapped = sum(str(tmp_path) in x for x in Path("/proc/self/maps").read_text().splitlines())
    assert mapped <= len(kept.store.segments)
    assert len(kept.store.segments.slabs) <= 4 * most and kept.store._number > 3
    kept.store.close()
    assert same(again(tmp_path / "records").state, kept.state)


@pytest.mark.parametrize("way", ["between hosts", "socket", "shared"])
def test_checksums_of_the_wire_are_those_of_the_records(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken once, while bytes come in; a server that starts again takes them anew."""
    taken: list[int] = []
    note = Slab.note
    monkeypatch.setattr(region, "LEAST_NBYTES", 1)
    monkeypatch.setattr(Slab, "note", lambda *x: (taken.append(len(x[1])), note(*x)))
    if way != "shared":
        monkeypatch.setenv("TUTTI_SHARED_MEMORY", "off")
    if way == "between hosts":
        monkeypatch.setattr(connection, "within_host", lambda sock: False)
    with services(Sgd(), "async", 1, directory=tmp_path / "records") as running:
        train(Sgd(), "async", [running[0].address], 0, 5)
        state, blocks = running[0].machine.ledger.state, len(running[0].machine.ledger.blocks)
    assert len(taken) == 5 * blocks
    with services(Sgd(), "async", 1, directory=tmp_path / "records") as running:
        for key, slots in running[0].machine.ledger.state.items():
            assert all(torch.equal(x, state[key][slot]) for slot, x in slots.items())
    assert len(taken) == 5 * blocks


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 2**18 - 8, 2**18 + 4104, 3 * 2**18])
def test_a_copy_is_summed_as_a_whole(nbytes: int) -> None:
    memory = torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8)
    into = torch.zeros(nbytes, dtype=torch.uint8)
    assert region.Half(memory).take(64, into, summed=True) == checksum(octets(memory[64:]))
    assert torch.equal(into, memory[64:])
