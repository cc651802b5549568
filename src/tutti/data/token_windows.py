"""Windows over files of tokens, as samples: `tokens`."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tutti.argument_types import whole_number
from tutti.data.token_files import IndexedTokenFile, TokenFile, opened
from tutti.errors import TuttiError

IGNORED = -100  # the default `ignore_index` of PyTorch's losses

Path = str | os.PathLike[str]


def tokens(
    files: Path | Sequence[Path],
    window: int,
    *,
    dtype: str | torch.dtype | None = None,
    documents: bool | int | None = None,
) -> TokenWindows:
    """A dataset of windows over files of tokens: sample `i` is `t[i w : i w + w]` and the same one token on.

    It reads through memory maps: a large file takes no memory and no time at the start. Windows do not
    cross files; the rest of a file that fills no window is left out.

    Args:
        files: one or several: plain arrays, as nanoGPT's `train.bin`; or Megatron's `.bin` with an `.idx`
            beside it, also by their common prefix.
        window: the number of tokens of a sample.
        dtype: of plain files: `uint8`, `uint16` (the default), `int32`, `uint32` or `int64`; also as
            `torch.int32`.
        documents: tell documents apart: True by Megatron's index, or the number of the token at the end of
            each document. Samples then have two more tensors, and the target of the last token of a document
            is -100, which losses ignore.

    Returns:
        A `torch.utils.data.Dataset` for `tutti.loader`. A sample is a tuple of int64 tensors of shape
        (window,): tokens and targets; with `documents` also positions, which begin at 0 in each document
        and window, and segments, the number of the document in the window: attention stays within equal ones.

    Raises:
        TuttiError: a file that is missing, truncated or of another format, or no whole window.
    """
    window = whole_number("window", window, 1, fix="window=1024")
    one = isinstance(files, str | os.PathLike)
    paths = [files] if one else list(files) if isinstance(files, Sequence) else [files]
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TuttiError(
                f"{path!r} is no file of tokens",
                fix='a path such as "train.bin", or a list of paths',
            )
    end = _end_of(documents)
    found = [opened(path, dtype) for path in paths]
    by_index = documents is True
    plain = next((f for f in found if not isinstance(f, IndexedTokenFile)), None)
    if by_index and plain is not None:
        plain.documents(0, 0)  # raises
    data = TokenWindows(found, window, by_index=by_index, end=end)
    if not len(data):
        most = max((f.num_tokens for f in found), default=0)
        raise TuttiError(
            f"the files hold no sample of window={window}: the largest has {most} tokens",
            why="a sample and its targets take window + 1 tokens of one file",
            fix=f"window={most - 1}" if most > 1 else "files with tokens",
        )
    return data


def _end_of(documents: Any) -> int | None:
    """The token at the end of each document, if `documents` is one."""
    if documents is None or isinstance(documents, bool):
        return None
    try:
        return index(documents)
    except TypeError:
        raise TuttiError(
            f"documents={documents!r} is neither True nor a token",
            fix="documents=True for files with an index of Megatron, or the number of the token that ends "
            "each document",
        ) from None


class TokenWindows(Dataset[tuple[Tensor, ...]]):
    """Windows over some files of tokens; made by `tokens`."""

    def __init__(
        self, files: Sequence[TokenFile], window: int, *, by_index: bool, end: int | None
    ) -> None:
        self.files, self.window, self.by_index, self.end = files, window, by_index, end
        counts = [max(0, f.num_tokens - 1) // window for f in files]
        self._firsts = list(accumulate(counts, initial=0))  # the first sample of each file

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        k = bisect_right(self._firsts, i) - 1
        file, start = self.files[k], int(i - self._firsts[k]) * self.window
        read = file.read(start, start + self.window + 1)
        sample = torch.from_numpy(read)
        inputs, targets = sample[:-1], sample[1:]
        if not self.by_index and self.end is None:
            return inputs, targets
        begins = self._begins(file, start, read)
        return inputs, *_apart(targets, begins)

    def _begins(self, file: TokenFile, start: int, read: Any) -> np.ndarray:
        """Where in the window and its last target a document begins, the first one left out."""
        if self.by_index:
            found = file.documents(start, start + self.window + 1)
            return np.array(found, dtype=np.int64) - start
        return np.flatnonzero(read[:-1] == self.end) + 1


def _apart(targets: Tensor, begins: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Targets without those of another document; positions and segments."""
    size = len(targets)
    targets = targets.clone()
    targets[begins - 1] = IGNORED
    inside = begins[begins < size]
    marks = np.zeros(size, dtype=np.int64)
    marks[inside] = 1
    segments = np.cumsum(marks)
    starts = np.concatenate([[0], inside])
    positions = np.arange(size) - starts[segments]
    return targets, torch.from_numpy(positions), torch.from_numpy(segments)
