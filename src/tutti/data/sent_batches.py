"""A batch on its way from a worker: what cannot be sent is an error in the worker, with its samples.

PyTorch's worker sends it from a thread of its queue. If that fails, the thread prints a traceback and the
batch is lost: the loop would wait for it without an end.
"""

from __future__ import annotations

import io
import pickle
import re
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from tutti.capture.forms import flattened
from tutti.errors import TuttiError

_PLAIN = (str, bytes, int, float, bool, type(None))
# As PyTorch says that it cannot make, size or map a file of shared memory.
_SHARED_MEMORY = re.compile(r"file </torch_|shared memory|object </torch_")
_FIXES = {
    "(24)": "more open files: ulimit -n; or torch.multiprocessing.set_sharing_strategy('file_system')",
    "(27)": "larger files: ulimit -f; or num_workers=0",
}
_ROOM = "more room in /dev/shm, fewer workers, a smaller prefetch_factor=, or num_workers=0"


def sendable(batch: Any, samples: str) -> Any:
    """A batch of a worker, its tensors in shared memory; in the loop's process as it is.

    Args:
        samples: the text of its samples.

    Raises:
        TuttiError: there is no room in shared memory, or something in the batch cannot be sent.
    """
    if get_worker_info() is None:
        return batch
    leaves = flattened(batch)[0]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = [x for x in leaves if not isinstance(x, (Tensor, *_PLAIN)) and not _is_numbers(x)]
    try:
        if others:
            tensors += _tensors_inside(others)
        for x in tensors:
            if x.is_cpu and not x.is_sparse:
                x.share_memory_()
    except Exception as error:
        raise no_room(error, samples) or _unsendable(error, samples) from error
    return batch


def _is_numbers(x: Any) -> bool:
    """Whether `x` is an array that holds no objects."""
    return isinstance(x, np.ndarray) and not x.dtype.hasobject


def no_room(error: Exception, samples: str) -> TuttiError | None:
    """The error of a batch for which PyTorch has no shared memory; None for another error."""
    said = str(error).splitlines()[0] if str(error) else ""
    if get_worker_info() is None or not _SHARED_MEMORY.search(said):
        return None
    fix = next((fix for number, fix in _FIXES.items() if number in said), _ROOM)
    return TuttiError(
        f"no shared memory for the batch of {samples}",
        why=f"workers of a loader send batches through /dev/shm: {said}",
        fix=fix,
    )


def _unsendable(error: Exception, samples: str) -> TuttiError:
    return TuttiError(
        f"a worker cannot send the batch of {samples}: {type(error).__name__}: {error}",
        why="what a worker reads is pickled for the process of the loop",
        fix="leave out of the batch what cannot be pickled, or num_workers=0",
    )


class _Trial(ForkingPickler):
    """Pickles as the queue of a worker does, but for the tensors, which it collects."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        self.tensors.append(x)
        return len(self.tensors)


def _tensors_inside(values: list[Any]) -> list[Tensor]:
    """The tensors within objects; raises what a pickle of them raises."""
    trial = _Trial()
    trial.dump(values)
    return trial.tensors
