"""Paths behind a URL, such as s3://bucket/run: folders of whatever fsspec reaches."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, cast

from tutti.argument_types import check_type
from tutti.errors import TuttiError

# Each process has one of its own: others do not see its files.
_OF_ONE_PROCESS = ("memory",)


def path_of(text: str | Path, name: str = "path") -> Path:
    """A local path; for a URL one with the same methods, which is no `pathlib.Path`.

    Args:
        name: of the argument, for errors.

    Raises:
        TuttiError: it is no path, or an empty text; fsspec does not know the protocol of the URL, or its
            package is not installed.
    """
    if not hasattr(text, "fs"):  # a path of fsspec
        kinds, fix = (str, os.PathLike), f'{name}="runs/gpt"'
        check_type(name, text, kinds, wanted="a text or a path", fix=fix)
    if isinstance(text, str) and not text.strip():
        why = "it would be the current folder"
        raise TuttiError(f"{name}={text!r} names no place", why=why, fix=f'{name}="runs/gpt"')
    if "://" not in str(text):
        return Path(text)
    from upath import UPath

    try:
        found = UPath(text)
        _ = found.fs  # now, rather than at the first save
    except (ValueError, ImportError) as error:
        raise TuttiError(
            f"{text} is no folder that can be reached",
            why=str(error),
            fix="a URL of a protocol of fsspec, such as s3:// with the package s3fs, or a local path",
        ) from error
    return cast(Path, found)


def is_remote(path: Path) -> bool:
    """Whether it is behind a URL: without locks, renames and flushes, but a file appears whole."""
    return not isinstance(path, Path)


def is_of_one_process(path: Path) -> bool:
    """Whether other processes do not see its files."""
    return is_remote(path) and cast(Any, path).protocol in _OF_ONE_PROCESS


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it, as far as possible; a file or a link alone."""
    if is_remote(path):
        with contextlib.suppress(OSError):
            cast(Any, path).fs.rm(str(cast(Any, path).path), recursive=True)
    elif path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
