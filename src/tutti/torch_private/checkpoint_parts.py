"""The private classes in the index of a `torch.distributed.checkpoint`.

Why: an index is a pickle, read with a list of allowed names; and tutti writes one. Public: none.
"""

from typing import Any

from torch.distributed.checkpoint.filesystem import (
    _StorageInfo as StorageInfo,  # the file, offset and length of a part
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MEMORY_FORMATS,  # the memory format of a tensor's properties
)
from torch.serialization import (
    _get_layout as layout_by_name,  # the name of a `torch.layout` in a pickle
)

__all__ = ["MEMORY_FORMATS", "StorageInfo", "layout_by_name", "remote_files", "remote_writer"]


def remote_files() -> Any:
    """The access of `torch.distributed.checkpoint` to files behind URLs.

    Why: its reader for them cannot be told how to read the index. Public: none.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

    return FileSystem()


def remote_writer(url: str) -> Any:
    """The writer of `torch.distributed.checkpoint` into a folder behind a URL.

    Why: as `remote_files`. Public: none.
    """
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(url, sync_files=False)
