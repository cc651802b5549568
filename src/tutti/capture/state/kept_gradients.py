"""The gradients that calls leave in `.grad` on one device, parameter by parameter.

A call leaves `.grad` of the user's parameters as it is, so tutti knows itself what an eager run would find
there: no gradient, zeros, or a value of an earlier call. What a program leaves is known from its trace, so a
call notes only when it was. Whether there was a gradient before matters to few traces: each lists its
questions, and the answers belong to the signature of a call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor, nn

from tutti.capture.state.lift import StateTensor, state_of
from tutti.torch_private.autograd_engine import version_of
from tutti.torch_private.module_tables import parameters_of


class Kept(Enum):
    """The gradient of a parameter after a call."""

    NONE = "none"
    ZEROS = "zeros"
    VALUE = "a value, which the next call does not know"
    AS_BEFORE = "as before the call"
    ZEROED = "zeros if there was a gradient before the call"


# What a trace asks about the gradient of a parameter, by its name, before a call.
Question = tuple[str, str]
THERE, VALUE = "there", "value"  # whether there is one; whether it is no zeros

# A module, and the name of its parameter.
Place = tuple[nn.Module, str]
Places = Mapping[
    str, Sequence[Place]
]  # of each parameter, by its name: several for one that is tied


def is_so(question: Question, found: Mapping[str, Kept]) -> bool:
    """The answer to a question for the gradients `found` before a call."""
    name, what = question
    kept = found.get(name, Kept.NONE)
    return kept is Kept.VALUE if what == VALUE else kept is not Kept.NONE


@dataclass(eq=False)
class _Calls:
    """Calls that leave the same gradients: the count of all calls at the last one; 0 before the first."""

    size: int  # the number of parameters
    last: int = 0


@dataclass(eq=False)
class _Parameter:
    calls: list[tuple[_Calls, Kept]] = field(default_factory=list)
    # The gradient that the script has left, and its version.
    seen: tuple[weakref.ref[Tensor], int] | None = None

    def now(self) -> Kept:
        zeroed = False
        for calls, kept in sorted(self.calls, key=lambda one: -one[0].last):
            if not calls.last:
                break
            if kept is Kept.ZEROED:
                zeroed = True
            elif kept is not Kept.AS_BEFORE:
                return Kept.ZEROS if zeroed and kept is Kept.VALUE else kept
        return Kept.NONE


_count = itertools.count(1)
_parameters: weakref.WeakKeyDictionary[nn.Module, dict[str, _Parameter]] = (
    weakref.WeakKeyDictionary()
)
_made: list[int] = [0]  # the number of `_Calls`


def _at(place: Place) -> _Parameter:
    module, key = place
    return _parameters.setdefault(module, {}).setdefault(key, _Parameter())


def places_of(model: nn.Module, state: Sequence[StateTensor]) -> Places:
    """The places of each parameter of `model`, which has this `state`."""
    names = {id(s.tensor): s.name for s in state if s.kind == "parameter"}
    found: dict[str, list[Place]] = {}
    for module in model.modules():
        for key, p in parameters_of(module).items():
            if p is not None and id(p) in names:
                found.setdefault(names[id(p)], []).append((module, key))
    return found


def _calls_that_leave(ends: Mapping[str, Kept], places: Places) -> _Calls:
    """Those known, or new ones."""
    given = [(_at(place), kept) for name, kept in ends.items() for place in places.get(name, ())]
    alike: set[_Calls] | None = None
    for parameter, end in given:
        known = {calls for calls, kept in parameter.calls if kept is end}
        alike = known if alike is None else alike & known
    for calls in alike or ():
        if calls.size == len(given):
            return calls
    made = _Calls(len(given))
    for parameter, end in given:
        parameter.calls.append((made, end))
    _made[0] += 1
    return made


@dataclass
class KeptGradients:
    """The gradients that the calls of one program leave.

    Args:
        ends: by the name of each parameter.
        answers: the questions of its trace, and the answers on which the trace relies.
    """

    ends: Mapping[str, Kept] = field(default_factory=dict)
    answers: Mapping[Question, bool] = field(default_factory=dict)
    _calls: _Calls = field(default_factory=lambda: _Calls(0), repr=False, compare=False)

    @classmethod
    def of(
        cls, ends: Mapping[str, Kept], answers: Mapping[Question, bool], places: Places
    ) -> KeptGradients:
        """Those of a trace of a model with these `places`."""
        return cls(ends, answers, _calls_that_leave(ends, places))

    def note_call(self) -> None:
        """Note a call of the program."""
        self._calls.last = next(_count)

    def fits(self, now: frozenset[Question]) -> bool:
        """Whether the trace applies to a call; `now` has the questions with the answer "yes"."""
        return not self.answers or (self._yes <= now and self._no.isdisjoint(now))

    @cached_property
    def _yes(self) -> frozenset[Question]:
        return frozenset(question for question, so in self.answers.items() if so)

    @cached_property
    def _no(self) -> frozenset[Question]:
        return frozenset(self.answers) - self._yes

    @property
    def may_repeat(self) -> bool:
        """Whether the next call finds gradients to which the same trace applies."""
        return all(self._after(question, so) == so for question, so in self.answers.items())

    def _after(self, question: Question, so: bool) -> bool:
        name, what = question
        kept = self.ends.get(name, Kept.AS_BEFORE)
        if kept is Kept.AS_BEFORE or (kept is Kept.ZEROED and what == THERE):
            return so
        return is_so(question, {name: kept})


def give_kept(model: nn.Module) -> None:
    """Give the parameters the gradients that an eager call of a step finds on one device.

    tutti knows no values of earlier calls: NaN stands for them, and shows where the step reads them.
    """
    places = places_of(model, state_of(model, None))
    for name, kept in found_by(places).items():
        module, key = places[name][0]
        p = parameters_of(module)[key]
        if kept is not Kept.NONE and p is not None and p.grad is None and p.is_floating_point():
            p.grad = torch.full_like(p, 0.0 if kept is Kept.ZEROS else torch.nan)


def found_by(places: Places) -> dict[str, Kept]:
    """What a call would find now, by the name of each parameter."""
    _note_script(places)
    return {name: _at(of[0]).now() for name, of in places.items()}


def _note_script(places: Places) -> None:
    """Note the gradients that the script itself has left since the last look."""
    found: dict[str, Kept] = {}
    for name, of in places.items():
        grad, known = _grad_at(of[0]), _at(of[0])
        if grad is None:
            continue
        if known.seen is None or (known.seen[0]() is not grad or known.seen[1] != version_of(grad)):
            known.seen = weakref.ref(grad), version_of(grad)
            found[name] = _kind_of(grad)
    if found:
        _calls_that_leave(found, places).last = next(_count)


def note_eager_call(model: nn.Module) -> None:
    """Note the gradients after an eager call of a step: those that the parameters have."""
    places = places_of(model, state_of(model, None))
    ends = {name: _kind_of(_grad_at(of[0])) for name, of in places.items()}
    _calls_that_leave(ends, places).last = next(_count)


def _grad_at(place: Place) -> Tensor | None:
    p = parameters_of(place[0]).get(place[1])
    return None if p is None else p.grad


def _kind_of(grad: Tensor | None) -> Kept:
    if grad is None:
        return Kept.NONE
    readable = type(grad) is Tensor and not grad.is_meta and not grad.is_sparse
    return Kept.ZEROS if readable and not grad.any() else Kept.VALUE


class Answers:
    """The answers now to the questions `asked` by the traces of a step on `model`."""

    def __init__(self, model: nn.Module, asked: Collection[Question]) -> None:
        self._model, self._asked = model, asked
        self.renew()

    def renew(self) -> None:
        """Look the parameters up again: the model has other modules."""
        self._looked_up: object = None
        self._calls: list[_Calls] = []
        self._known: dict[tuple[_Calls, ...], frozenset[Question]] = {}

    def now(self) -> frozenset[Question]:
        """The questions with the answer "yes"; they depend on the order of the last calls alone."""
        if not self._asked:
            return _NO_QUESTION
        asked = len(self._asked), _made[0]
        if self._looked_up != asked:
            self._look_up()
            self._looked_up = asked
        order = tuple(sorted([one for one in self._calls if one.last], key=_last))
        found = self._known.get(order)
        if found is None:
            kept = {name: parameter.now() for name, parameter in self._parameters.items()}
            found = self._known[order] = frozenset(q for q in self._asked if is_so(q, kept))
        return found

    def _look_up(self) -> None:
        places = places_of(self._model, state_of(self._model, None))
        names = {name for name, _ in self._asked}
        self._parameters = {name: _at(of[0]) for name, of in places.items() if name in names}
        calls = {calls: None for one in self._parameters.values() for calls, _ in one.calls}
        self._calls, self._known = [*calls], {}


_last = attrgetter("last")
_NO_QUESTION: frozenset[Question] = frozenset()
