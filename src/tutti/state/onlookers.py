"""Warns of tensors outside of the model that share its memory, before the model leaves that memory.

    flat = torch.cat(...); p.data = flat[a:b].view_as(p)      before the first step
    kept = model.state_dict()

On one device they follow each step. They no longer follow weights that are sharded or move to shared memory.
A tensor in whose place the step itself puts another one does not count: `weight` beside the `weight_orig` of
`nn.utils.spectral_norm`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from tutti.capture.state.lift import StateTensor
from tutti.torch_private.storages import memory_id, num_uses, storage_id
from tutti.user_lines import users_level


def warn_of_onlookers(
    state: Iterable[StateTensor], leaving: Iterable[str], known: Iterable[Tensor] = ()
) -> bool:
    """Warn of the first of the state tensors `leaving` that shares memory with an outside tensor, if any.

    Those `known`, each given once, do not count.
    """
    plain = [s for s in state if type(s.tensor) in (Tensor, torch.nn.Parameter)]
    held = [s for s in plain if s.tensor.device.type != "meta" and s.tensor.numel()]
    own = Counter(memory_id(x) for x in (*(s.tensor for s in held), *known))
    wanted = {*leaving}
    for s in held:
        storage = s.tensor.untyped_storage()
        # the state's own, and the one just made to ask
        if s.name in wanted and num_uses(storage) > own[storage_id(storage)] + 1:
            warnings.warn(
                f'another tensor shares the memory of "{s.name}" (a flat view, a state_dict() that is '
                "kept): it stays as it is now, while steps change the weight; step.model_state() gives the "
                "weights of then",
                stacklevel=users_level(),
            )
            return True
    return False
