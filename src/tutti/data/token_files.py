"""Files of tokens, read through memory maps: plain arrays, and Megatron's `.bin` with its `.idx`.

A plain file holds nothing but token numbers (as nanoGPT writes them). Megatron's index is, in little endian:

    "MMIDIDX\\0\\0"  9 bytes     lengths of sequences    int32 each, in tokens
    version 1       uint64      their first bytes       int64 each, in the .bin file
    dtype code      uint8       documents               int64 each: the number of its first sequence,
    sequences       uint64                              and the number of sequences at the end
    documents       uint64
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tutti.errors import TuttiError

DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
DEFAULT = "uint16"
_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenFile:
    """The tokens of a plain file. Opens at the first read; pickles without the tokens."""

    def __init__(self, path: Path, dtype: str | None) -> None:
        self.path, self.dtype = path, np.dtype(dtype or DEFAULT)
        nbytes = os.path.getsize(path)
        if nbytes % self.dtype.itemsize:
            raise TuttiError(
                f"{path} has {nbytes} bytes, which are no whole number of {self.dtype} tokens",
                why="the file is truncated, or of another dtype",
                fix=f"dtype=, one of {', '.join(DTYPES)}",
            )
        self.num_tokens = nbytes // self.dtype.itemsize
        self._tokens: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens from `start` to `stop`."""
        if self._tokens is None:
            self._tokens = np.memmap(self.path, self.dtype, mode="r")
        return self._tokens[start:stop].astype(np.int64)

    def documents(self, start: int, stop: int) -> list[int]:
        """The first tokens of the documents that begin after `start` and before `stop`."""
        raise TuttiError(
            f"{self.path} has no index, so it does not tell where documents begin",
            fix="documents=ID, the token at the end of each document",
        )


class IndexedTokenFile(TokenFile):
    """The tokens of Megatron's `.bin`, whose `.idx` has the dtype and the begin of each document."""

    def __init__(self, path: Path, dtype: str | None) -> None:
        self.index = path.with_suffix(".idx")
        found, self._num_sequences, self._num_documents = _head(self.index)
        if dtype is not None and np.dtype(dtype) != np.dtype(found):
            raise TuttiError(
                f"{self.index} says that its tokens are {found}, not dtype={dtype}",
                fix="leave dtype out",
            )
        super().__init__(path, found)
        self._pointers: NDArray[np.int64] | None = None
        self._firsts: NDArray[np.int64] | None = None
        self._check_size()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pointers": None, "_firsts": None}

    def _check_size(self) -> None:
        """The index covers exactly the tokens of the file."""
        after = _HEAD.size + 12 * self._num_sequences + 8 * self._num_documents
        if os.path.getsize(self.index) < after:
            raise TuttiError(
                f"{self.index} has {os.path.getsize(self.index)} bytes, but its head tells of {after}",
                why="the file is truncated",
                fix="write it again",
            )
        last = self._num_sequences - 1
        end = 0
        if last >= 0:
            length = np.memmap(self.index, "<i4", "r", _HEAD.size + 4 * last, (1,))[0]
            pointers = self._arrays()[0]
            end = int(pointers[last]) // self.dtype.itemsize + int(length)
        if end != self.num_tokens:
            raise TuttiError(
                f"{self.path} has {self.num_tokens} tokens, but its index tells of {end}",
                why="one of the two files is truncated, or of another data set",
                fix="write both again",
            )

    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first byte of each sequence, and the first sequence of each document."""
        if self._pointers is None or self._firsts is None:
            at = _HEAD.size + 4 * self._num_sequences
            self._pointers = np.memmap(self.index, "<i8", "r", at, (self._num_sequences,))
            at += 8 * self._num_sequences
            self._firsts = np.memmap(self.index, "<i8", "r", at, (self._num_documents,))
        return self._pointers, self._firsts

    def documents(self, start: int, stop: int) -> list[int]:
        pointers, firsts = self._arrays()
        # The last entry is the end of the last document.
        numbers = range(max(0, self._num_documents - 1))

        def begin(document: int) -> int:
            sequence = int(firsts[document])
            if sequence >= self._num_sequences:
                return self.num_tokens
            return int(pointers[sequence]) // self.dtype.itemsize

        found: list[int] = []
        for document in numbers[bisect_left(numbers, start + 1, key=begin) :]:
            token = begin(document)
            if token >= stop:
                break
            if not found or found[-1] != token:  # one without tokens
                found.append(token)
        return found


def _checked(dtype: Any) -> str:
    """The name of a dtype of tokens: a text, or one of PyTorch or NumPy."""
    try:
        name = str(
            np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
        )
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise TuttiError(f"dtype={dtype} is none of tokens", fix=f"one of {', '.join(DTYPES)}")
    return name


def opened(path: str | os.PathLike[str], dtype: Any) -> TokenFile:
    """The file at a path; of Megatron also by its prefix. Raises `TuttiError` for one that does not fit."""
    dtype = None if dtype is None else _checked(dtype)
    given = Path(path)
    prefixed = Path(f"{given}.bin")
    if given.suffix == ".idx":
        given = given.with_suffix(".bin")
    elif not given.is_file() and prefixed.is_file():
        given = prefixed
    if not given.is_file():
        raise TuttiError(f"there is no file {given}", fix="a file of tokens, such as train.bin")
    indexed = given.with_suffix(".idx").is_file()
    return (IndexedTokenFile if indexed else TokenFile)(given.absolute(), dtype)


def _head(path: Path) -> tuple[str, int, int]:
    """The dtype, the number of sequences and that of entries of documents."""
    with path.open("rb") as file:
        data = file.read(_HEAD.size)
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise TuttiError(
            f"{path} is no index of tokens",
            why='it does not begin with "MMIDIDX", as Megatron writes it',
            fix="rename it, if the .bin file beside it is a plain one",
        )
    _, version, code, num_sequences, num_documents = _HEAD.unpack(data)
    if version != 1:
        raise TuttiError(f"{path} has version {version}, not 1", fix="an index of version 1")
    if code not in _CODES:
        raise TuttiError(
            f"{path} has dtype code {code}, which is none of whole numbers",
            fix="a file of tokens",
        )
    return _CODES[code], num_sequences, num_documents
