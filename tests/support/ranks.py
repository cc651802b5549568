"""Ranks that tests share: started once, each answers one call after another.

    def on_rank(x): ...            # at module level; it runs on every rank
    def test_it(ranks):            # the fixture of conftest.py
        results = ranks.run(on_rank, 3, n=4)     # one result for each rank

Each pool of n ranks has a default process group of its own. An exception on a rank is raised here
with its traceback, and the pool starts anew at the next call.

    one = ranks.after(train, "", 20)         # what it returns, in a process without ranks
    results = one.run(train, "data=2", 20, n=2)      # on copies of that process, captured programs and all
    assert all(found == one.result for found in results)

The second form is for what one device does too, and for what several ranks would each do alike: see
`captured_once.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rank_pools import Original, Pool, RankFailed, can_be_copied, collect_seldom, context

__all__ = ["After", "RankFailed", "Ranks", "collect_seldom", "context"]


class Ranks:
    """Pools of ranks by size, each started at its first use; collectives wait `timeout_seconds` at most."""

    def __init__(self, timeout_seconds: float = 30.0) -> None:
        self._pools: dict[int, Pool] = {}
        self._original: Original | None = None
        self._known: dict[Any, Any] = {}
        self._timeout_seconds = timeout_seconds

    def after(self, function: Callable[..., Any], *args: Any) -> After:
        """`function(*args)` in a process without ranks, of which ranks can be copies; done once."""
        return After(self, self._ask(0, function, args))

    def _ask(self, n: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The results of `n` copies; of the process itself where `n` is 0."""
        if not can_be_copied():
            return self.run(function, *args, n=n) if n else self._here(function, args)
        if self._original is None:
            self._original = Original(self._timeout_seconds)
        try:
            return self._original.run(n, function, args)
        finally:
            if not self._original.lives:
                self._original = None

    def _here(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """As the process of which ranks would be copies."""
        if (function, args) not in self._known:
            self._known[function, args] = function(*args)
        return self._known[function, args]

    def run(self, function: Callable[..., Any], *args: Any, n: int = 4) -> list[Any]:
        """`function(*args)` on each of `n` ranks; the results in the order of ranks."""
        if n not in self._pools:
            self._pools[n] = Pool(n, self._timeout_seconds)
        try:
            return self._pools[n].run(function, args)
        except BaseException:  # a test's timeout: the next call would get this one's answers
            self._pools.pop(n).close()
            raise

    def renew(self) -> None:
        """End every pool; the next call starts it anew, in 0.1 s.

        Every Gloo group that a call has made lasts, with a thread that wakes 100 times a second: a rank
        that waits with seven groups takes 0.5 to 0.7 % of a processor.
        """
        for pool in self._pools.values():
            pool.kill()
        self._pools.clear()
        if self._original is not None:
            self._original.rest()

    def close(self) -> None:
        """End every rank."""
        if self._original is not None:
            self._original.close()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@dataclass(frozen=True)
class After:
    """The result of what has been done, and ranks that have done it."""

    ranks: Ranks
    result: Any

    def run(self, function: Callable[..., Any], *args: Any, n: int) -> list[Any]:
        """As `Ranks.run`, on copies of the process."""
        return self.ranks._ask(n, function, args)
