"""The private classes in the index of a `torch.distributed.checkpoint`.

Why: an index is a pickle, read with a list of allowed names; and tutti writes one. Public: none.
"""

from torch.distributed.checkpoint.filesystem import (
    _StorageInfo as StorageInfo,  # the file, offset and length of a part
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MEMORY_FORMATS,  # the memory format of a tensor's properties
)
from torch.serialization import (
    _get_layout as layout_by_name,  # the name of a `torch.layout` in a pickle
)

__all__ = ["MEMORY_FORMATS", "StorageInfo", "layout_by_name"]
