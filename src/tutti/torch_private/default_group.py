"""The default process group of `torch.distributed`."""

from typing import Any

from torch.distributed import distributed_c10d

# The property that has the default group: its class and its name, to patch. While it gives None,
# `torch.distributed.is_initialized()` is false.
# Why: code that acts on its own where there are several processes is traced as that of one device, while
# other threads communicate. Public: none.
DEFAULT_GROUP: tuple[Any, str] = (type(distributed_c10d._world), "default_pg")
