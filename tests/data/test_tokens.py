"""Windows over files of tokens."""

from __future__ import annotations

import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forked
import tutti
from ranks import context

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def plain(path: Path, values: Any, dtype: str = "uint16") -> Path:
    np.asarray(values, dtype).tofile(path)
    return path


def indexed(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32") -> Path:
    """The two files of documents, each of several sequences, written from the public description."""
    sequences = [s for d in documents for s in d]
    np.array([t for s in sequences for t in s], dtype).tofile(f"{prefix}.bin")
    lengths = np.array([len(s) for s in sequences], np.int32)
    nbytes = lengths.astype(np.int64) * np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.int64)
    firsts = np.cumsum([0] + [len(d) for d in documents]).astype(np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(firsts))
    data = head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes()
    Path(f"{prefix}.idx").write_bytes(data)
    return prefix


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
def test_samples_are_windows_and_their_targets(tmp_path: Path, dtype: str) -> None:
    values = np.arange(23) * 3
    path = plain(tmp_path / "train.bin", values, dtype)
    data = tutti.tokens(path, 5, dtype=dtype)
    assert len(data) == 4
    for i in range(4):
        inputs, targets = data[i]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == values[5 * i : 5 * i + 5].tolist()
        assert targets.tolist() == values[5 * i + 1 : 5 * i + 6].tolist()
    for i in (-1, 4):
        with pytest.raises(IndexError):
            data[i]


def test_uint16_is_the_default_and_large_tokens_stay_positive(tmp_path: Path) -> None:
    inputs, targets = tutti.tokens(str(plain(tmp_path / "a.bin", [65535, 1, 40000])), 2)[0]
    assert inputs.tolist() == [65535, 1] and targets.tolist() == [1, 40000]


def test_windows_do_not_cross_files(tmp_path: Path) -> None:
    parts = [list(range(9)), [50], list(range(100, 113)), list(range(200, 205))]
    paths = [plain(tmp_path / f"{i}.bin", part) for i, part in enumerate(parts)]
    data = tutti.tokens(paths, 4)
    expected = [p[i : i + 5] for p in parts for i in range(0, len(p) - 4, 4)]
    assert [[*a.tolist(), b[-1].item()] for a, b in (data[i] for i in range(len(data)))] == expected


@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx"])
@pytest.mark.parametrize("dtype", CODES)
def test_the_index_of_megatron_tells_the_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    indexed(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]]], dtype)
    data = tutti.tokens(tmp_path / name, 4)
    assert [[x.tolist() for x in data[i]] for i in range(len(data))] == [
        [[1, 2, 3, 4], [2, 3, 4, 5]],
        [[5, 6, 7, 8], [6, 7, 8, 9]],
    ]


def test_documents_end_attention_and_loss(tmp_path: Path) -> None:
    # Documents of 3, 1, 6 and 3 tokens, 0 at the end of each; windows of 4.
    values = [7, 8, 0, 0, 1, 2, 3, 4, 5, 0, 6, 6, 0]
    end: Any = np.int64(0)
    data = tutti.tokens(plain(tmp_path / "a.bin", values), 4, documents=end)
    found = [[x.tolist() for x in data[i]] for i in range(3)]
    assert found == [
        [[7, 8, 0, 0], [8, 0, -100, -100], [0, 1, 2, 0], [0, 0, 0, 1]],
        [[1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 3], [0, 0, 0, 0]],
        [[5, 0, 6, 6], [0, -100, 6, 0], [0, 1, 0, 1], [0, 0, 1, 1]],
    ]
    assert F.cross_entropy(torch.zeros(4, 9), data[0][1]).item() == pytest.approx(np.log(9))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(1, 99), max_size=6), max_size=3), min_size=1, max_size=9
    ),
    window=st.integers(1, 9),
)
def test_index_and_end_token_agree(
    tmp_path: Path, documents: list[list[list[int]]], window: int
) -> None:
    """With a token 0 at the end of each document, and an index of them; some sequences are empty."""
    ended = [[*d, [0]] for d in documents]
    flat = [t for d in ended for s in d for t in s]
    if len(flat) <= window:
        return
    by_index = tutti.tokens(indexed(tmp_path / "with", ended), window, documents=True)
    by_end = tutti.tokens(plain(tmp_path / "without.bin", flat), window, documents=0)
    assert len(by_index) == len(by_end)
    for i in range(len(by_end)):
        for one, other in zip(by_index[i], by_end[i], strict=True):
            assert torch.equal(one, other)


def test_documents_without_tokens_are_passed_over(tmp_path: Path) -> None:
    indexed(tmp_path / "a", [[[1, 2]], [], [[]], [[3, 4, 5]], []])
    found = [x.tolist() for x in tutti.tokens(tmp_path / "a", 4, documents=True)[0]]
    assert found == [[1, 2, 3, 4], [2, -100, 4, 5], [0, 1, 0, 1], [0, 0, 1, 1]]


LARGE = """
import pickle, resource, sys, time
import torch, tutti, tutti.api
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, began = rss(), time.perf_counter()
data = tutti.tokens(sys.argv[1], 1024)
loader = tutti.loader(data, 8, shuffle=True, layout="")
first = next(iter(loader))
seconds, grown = time.perf_counter() - began, rss() - before
assert len(pickle.dumps(data)) < 2000
print(len(data), tuple(first[0].shape), seconds, grown)
"""


def test_a_large_file_costs_no_memory_and_no_start(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 10 * 2**30)  # sparse
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    done = forked.run([script, path], env=dict(os.environ), cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    length, shape, seconds, grown = done.stdout.replace("(8, 1024)", "shape").split()
    assert int(length) == (5 * 2**30 - 1) // 1024 and shape == "shape"
    assert float(seconds) < 5 and int(grown) < 60 * 2**20


def test_it_pickles_by_path(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "a", [[list(range(1, 99))]] * 50)
    data = tutti.tokens(prefix, 8, documents=True)
    expected = [x.tolist() for x in data[7]]
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 2000
    assert [x.tolist() for x in again[7]] == expected


def test_workers_read_it(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.bin", np.arange(1000))
    plainly = tutti.loader(tutti.tokens(path, 16), 8, shuffle=True)
    # A worker of that context is sent the dataset, as one that is spawned.
    options: Any = {"num_workers": 1, "multiprocessing_context": context()}
    by_worker = tutti.loader(tutti.tokens(path, 16), 8, shuffle=True, **options)
    for one, other in zip(plainly, by_worker, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"window": 0}, "window=0 is no whole number from 1"),
        ({"window": 30}, "no sample of window=30: the largest has 20 tokens"),
        ({"files": "missing.bin"}, "there is no file missing.bin"),
        ({"files": []}, "hold no sample"),
        ({"dtype": "float32"}, "dtype=float32 is none of tokens"),
        ({"dtype": "int64", "files": "odd.bin"}, "no whole number of int64 tokens"),
        ({"documents": True}, "has no index"),
        ({"files": "corpus", "dtype": "uint16"}, "tokens are int32, not dtype=uint16"),
        ({"files": "short"}, "has 3 tokens, but its index tells of 4"),
        ({"files": "cut"}, "has 60 bytes, but its head tells of"),
        ({"files": "empty"}, "is no index of tokens"),
        ({"files": "version"}, "has version 2, not 1"),
        ({"files": "floats"}, "has dtype code 6"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plain(Path("a.bin"), range(20))
    plain(Path("odd.bin"), range(9))
    for name in ("corpus", "short", "cut", "empty", "version", "floats"):
        indexed(Path(name), [[[1, 2], [3]], [[4]]])
    plain(Path("short.bin"), [1, 2, 3], "int32")
    for name, change in {
        "cut": lambda data: data[:60],
        "empty": lambda data: b"",
        "version": lambda data: data[:9] + b"\2" + data[10:],
        "floats": lambda data: data[:17] + b"\6" + data[18:],
    }.items():
        file = Path(f"{name}.idx")
        file.write_bytes(change(file.read_bytes()))
    arguments: Any = {"files": "a.bin", "window": 2} | given
    with pytest.raises(tutti.TuttiError) as error:
        tutti.tokens(**arguments)
    assert what in str(error.value) and "fix " in str(error.value)


def test_opening_is_quick_with_many_documents(tmp_path: Path) -> None:
    prefix = tmp_path / "many"
    count = 300_000
    np.zeros(4 * count, np.int32).tofile(f"{prefix}.bin")
    lengths, pointers = np.full(count, 4, np.int32), np.arange(count, dtype=np.int64) * 16
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, count, count + 1)
    firsts = np.arange(count + 1, dtype=np.int64)
    Path(f"{prefix}.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes()
    )
    began = time.perf_counter()
    data = tutti.tokens(prefix, 8, documents=True)
    found = data[len(data) - 1]
    assert time.perf_counter() - began < 1
    assert found[2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_dtypes_of_pytorch(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.bin", range(9), "int32")
    assert tutti.tokens(path, 8, dtype=torch.int32)[0][0].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16 is none of tokens"),
        ({"dtype": "words"}, "dtype=words is none of tokens"),
        ({"files": None}, "None is no file of tokens"),
        ({"files": [3]}, "3 is no file of tokens"),
        ({"documents": "a"}, "documents='a' is neither True nor a token"),
    ],
)
def test_arguments_of_another_kind(tmp_path: Path, given: dict[str, Any], what: str) -> None:
    arguments: Any = {"files": plain(tmp_path / "a.bin", range(9)), "window": 2} | given
    with pytest.raises(tutti.TuttiError) as error:
        tutti.tokens(**arguments)
    assert what in str(error.value)
