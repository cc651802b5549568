"""Options of libraries that leave out what capture refuses, by the function that does it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import CodeType

_BATCHED_EXPERTS = 'model.set_experts_implementation("batched_mm")'
_SPEC_AUGMENT = (
    "config.apply_spec_augment = False, which leaves the masks of SpecAugment out; masks that you draw "
    "before the step may be arguments of it"
)
# By the end of a path (or "" for any file of transformers) and the name of a function.
_OF_TRANSFORMERS = {
    ("integrations/moe.py", "forward"): _BATCHED_EXPERTS,
    ("", "_mask_hidden_states"): _SPEC_AUGMENT,
    ("", "_mask_input_features"): _SPEC_AUGMENT,
}


def option_of(codes: Iterable[CodeType]) -> str:
    """The option for the functions that have called each other; "" without one."""
    for code in codes:
        path = code.co_filename.replace(os.sep, "/")
        if "/transformers/" not in path:
            continue
        for (end, function), option in _OF_TRANSFORMERS.items():
            if code.co_name == function and path.endswith(end):
                return option
    return ""
