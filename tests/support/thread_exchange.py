"""An exchange of texts between threads of this process, which stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable


def exchange_of(n: int) -> list[Callable[[str], list[str]]]:
    """For each of `n` positions the function that gives a text to all and returns every position's."""
    barrier, texts = threading.Barrier(n, timeout=20), [""] * n

    def of(position: int) -> Callable[[str], list[str]]:
        def exchange(text: str) -> list[str]:
            texts[position] = text
            barrier.wait()
            found = list(texts)
            barrier.wait()
            return found

        return exchange

    return [of(position) for position in range(n)]
