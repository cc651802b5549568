"""The default process group of `torch.distributed`."""

from typing import Any

from torch.distributed import distributed_c10d

# The property of the default group: its class and its name, to patch. While it returns None,
# `torch.distributed.is_initialized()` is false.
# Why: code with a branch for several processes traces as that of one device, while other threads
# communicate. Public: none.
DEFAULT_GROUP: tuple[Any, str] = (type(distributed_c10d._world), "default_pg")
