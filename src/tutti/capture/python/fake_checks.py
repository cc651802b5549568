"""Libraries ask whether a tensor is fake, and then do without its values.

    position_ids = torch.arange(n).unsqueeze(0)
    is_fake_tensor(position_ids)        ->  False: made of constants, so Python may read its values

Transformers of Hugging Face look into positions to see that no sequences are packed; then attention is causal
without a mask, by a faster kernel and without the mask's memory. Of a fake tensor they make a mask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tutti.capture.python.known_values import UNKNOWN, known
from tutti.graph.edits.patch import Patch, replaced
from tutti.torch_private.fake_tensors import FakeTensor

# Module and function of each library that asks.
CHECKS = (("transformers.utils.import_utils", "is_fake_tensor"),)


def is_fake(x: Any) -> bool:
    """Whether `x` is a tensor of a trace whose values are not known."""
    return isinstance(x, FakeTensor) and known(x, lambda _: None) is UNKNOWN


@contextlib.contextmanager
def constants_are_not_fake() -> Iterator[None]:
    """Context in which these functions, of libraries that are imported, take constants for plain tensors."""
    patches = [
        Patch(sys.modules[module], name, "a tensor of constants has values")
        for module, name in CHECKS
        if hasattr(sys.modules.get(module), name)
    ]
    with replaced(*((patch, is_fake) for patch in patches)):
        yield
