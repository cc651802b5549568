"""A call of PyTorch that may wait without a limit, made in limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def bounded(call: Callable[[], _Result], seconds: float, name: str) -> _Result:
    """What `call` returns or raises. A thread makes it in the caller's place, and outlives a late one.

    Args:
        name: that of the thread.

    Raises:
        TimeoutError: it does not end within `seconds`.
    """
    made: list[_Result] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(call())
        except BaseException as error:  # raised in the thread of the caller
            failed.append(error)

    thread = threading.Thread(target=make, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not made:
        raise TimeoutError
    return made[0]
