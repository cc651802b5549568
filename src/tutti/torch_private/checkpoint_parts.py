"""What the index of a `torch.distributed.checkpoint` is made of beside its public classes.

Why: an index is a pickle, read with a list of what it may name; and tutti writes one. Public: none.
"""

from torch.distributed.checkpoint.filesystem import (
    _StorageInfo as StorageInfo,  # where in which file the bytes of a part lie
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MEMORY_FORMATS,  # the memory format of a tensor's properties
)
from torch.serialization import (
    _get_layout as layout_by_name,  # by which a pickle names a `torch.layout`
)

__all__ = ["MEMORY_FORMATS", "StorageInfo", "layout_by_name"]
