"""The programs of one step, by the signature of calls; the least recently called ones go first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tutti.calls.host_draws import HostDraws
from tutti.calls.signature import difference_between
from tutti.capture.alike import difference
from tutti.capture.python.assumed_values import Assumed
from tutti.environment import MOST_PROGRAMS
from tutti.modes.compiled_program import Compiled
from tutti.user_lines import users_level

Fit = tuple[Compiled[Any], Mapping[str, float]]
_MOST_SIGNATURES = 8  # with which a new one is compared, to say why it needs a program


class KnownPrograms:
    """The programs that a step keeps.

    Args:
        key_of: the key of a signature without its gradients of earlier calls, `Mode.signature`. A program is
            valid for those on which it does not depend.
    """

    def __init__(self, key_of: Callable[[Any], Any]) -> None:
        self._key_of = key_of
        self.by_key: dict[Any, list[Compiled[Any]]] = {}
        self.last: Compiled[Any] | None = None  # the program of the last call
        self.signatures: list[Any] = []  # the latest ones
        self._most = MOST_PROGRAMS.read()
        self.num_traces = self._num_forgotten = 0

    def fitting(
        self,
        signature: Any,
        given: Mapping[str, float],
        draws: HostDraws,
        assumed: Assumed | None = None,
        *,
        tries: bool = False,
    ) -> Fit | None:
        """The program of a call with the numbers `given`, and its numbers: with those that it draws. Sets
        the modes of modules as the step does.

        `assumed` are the tensor values that the step has read in a run with other branches. With `tries`, a
        program that reads more of them may be it: that of a loop with more turns.
        """
        found = self.of(signature)
        if len(found) > 1:
            found = sorted(found, key=lambda one: one is not self.last)
        added = ((one, draws.added(given, one.drawn)) for one in found)
        valid = ((one, all_) for one, all_ in added if all_ is not None and one.holds(all_))
        fit = _fitting(valid, assumed, tries=tries)
        if fit is None:
            draws.put_back()
            return None
        compiled, numbers = fit
        for module, training in compiled.modes:
            module.training = training
        if assumed is not None:  # another candidate may have drawn last
            numbers = draws.added(given, compiled.drawn) or numbers
        return compiled, numbers

    def of(self, signature: Any) -> list[Compiled[Any]]:
        """The programs of calls with this signature."""
        found, kept = self.by_key.get(self._key_of(signature[:-1]), []), signature[-1]
        return [one for one in found if one.program.captured.gradients.fits(kept)]

    def why_another(self, signature: Any, python: str) -> str:
        """Why a call needs another program; see `difference_between`."""
        return difference_between(signature, self.signatures, python)

    def enter(self, made: Compiled[Any], signature: Any) -> None:
        """Let later calls with this signature find a program."""
        self.signatures = [*self.signatures, signature][-_MOST_SIGNATURES:]
        entered = self.by_key.setdefault(self._key_of(signature[:-1]), [])
        if made not in entered:
            entered.append(made)

    def keep_few(self, made: Compiled[Any]) -> None:
        """Keep no more than the limit, `made` among them; all ranks make the same calls, and drop the same
        programs."""
        known = {id(one): one for found in self.by_key.values() for one in found}
        known.pop(id(made), None)
        while len(known) >= self._most:
            oldest = min(known.values(), key=lambda one: one.last_call)
            del known[id(oldest)]
            self.drop(oldest)
            self._note_forgotten()

    def drop(self, one: Compiled[Any]) -> None:
        """Forget a program."""
        for key, found in list(self.by_key.items()):
            self.by_key[key] = [x for x in found if x is not one]
            if not self.by_key[key]:
                del self.by_key[key]

    def settle(self, made: Compiled[Any], signature: Any) -> bool:
        """Whether a new program is that of an earlier call, too, which had this signature: the earlier
        programs are dropped, else the new one."""
        earlier = self.of(signature)
        captured = made.program.captured
        is_theirs = any(not difference(captured, one.program.captured) for one in earlier)
        for one in earlier if is_theirs else [made]:
            self.drop(one)
        return is_theirs

    def note_trace(self, why: str) -> None:
        """Note a trace; warn of a value that changes at every call (a switch of a module), and so causes
        endless traces."""
        self.num_traces += 1
        if self.num_traces in (8, 64):
            warnings.warn(
                f"the step has been traced {self.num_traces} times: shapes, options of the optimizer, plain "
                f"attributes of a module, branches or turns of a loop keep changing; the last time {why}",
                stacklevel=users_level(),
            )

    def _note_forgotten(self) -> None:
        self._num_forgotten += 1
        if self._num_forgotten == 1:
            warnings.warn(
                f"the step has more than {self._most} programs, one for each batch of other sizes: "
                "the step drops the least recently called one and captures it again when needed; "
                f"{MOST_PROGRAMS.name} says how many are kept",
                stacklevel=users_level(),
            )


def _fitting(valid: Iterable[Fit], assumed: Assumed | None, *, tries: bool) -> Fit | None:
    """The program for the tensor values of another run; with `tries`, or else the longest that may be."""
    if assumed is None:
        return next(iter(valid), None)
    known = list(valid)
    sure = (fit for fit in known if fit[0].takes(fit[1], assumed))
    if (found := next(sure, None)) is not None:
        return found
    open_ones = [fit for fit in known if tries and fit[0].may_take(fit[1], assumed)]
    return max(open_ones, key=lambda fit: fit[0].num_reads, default=None)
