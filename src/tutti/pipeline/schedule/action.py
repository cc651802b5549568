"""One action of a rank in a pipeline, as a value and as a short word that parses back.

| word | kind | meaning |
| --- | --- | --- |
| `2F0` | F | stage 2 runs its forward on micro-batch 0 |
| `2I0` | I | ... makes the gradients of its inputs |
| `2W0` | W | ... makes the gradients of its weights |
| `2B0` | B | ... does I and W in one |
| `2F0>3` | S | the rank of stage 2 sends the result of `2F0` to stage 3 |
| `3<2F0` | R | the rank of stage 3 receives it |
| `2G` | G | the rank of stage 2 gathers its weights |
| `2A` | A | ... reduces its gradients |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.errors import ScheduleError

# Computations on one micro-batch.
COMPUTE = ("F", "I", "W", "B")
# Kinds that make the gradients of a stage's inputs, and kinds that end its work on a micro-batch.
INPUT_GRADIENTS = ("I", "B")
WEIGHT_GRADIENTS = ("W", "B")
KINDS = (*COMPUTE, "S", "R", "G", "A")

_NUMBER = "([0-9]{1,6})"
_COMPUTED = re.compile(f"{_NUMBER}([FIWB]){_NUMBER}")
_OF_WEIGHTS = re.compile(f"{_NUMBER}([GA])")
_SENT = re.compile(f"{_NUMBER}([FIB]){_NUMBER}>{_NUMBER}")
_RECEIVED = re.compile(f"{_NUMBER}<{_NUMBER}([FIB]){_NUMBER}")


@dataclass(frozen=True)
class Action:
    """An action of the rank of `stage`. Prints as a word (`2F0`, `2F0>3`, `3<2F0`, `2G`) and parses back.

    kind: one of `F I W B` (compute), `S R` (send, receive), `G A` (gather weights, reduce gradients).
    stage: the stage that acts; for a receive the one that reads the value.
    micro: the micro-batch, from 0; for `G` and `A` 0, without meaning.
    peer: for `S` and `R` the stage at the other end, else -1.
    moved: for `S` and `R` the kind of the action that made the value (`F`, `I` or `B`), else "".
    """

    kind: str
    stage: int
    micro: int = 0
    peer: int = -1
    moved: str = ""

    @classmethod
    def send(cls, made: Action, to: int) -> Action:
        """The send of the result of `made` to stage `to`."""
        return cls("S", made.stage, made.micro, to, made.kind)

    @classmethod
    def receive(cls, made: Action, to: int) -> Action:
        """The other end of `Action.send(made, to)`."""
        return cls("R", to, made.micro, made.stage, made.kind)

    @property
    def computes(self) -> bool:
        """Whether it is one of F, I, W, B."""
        return self.kind in COMPUTE

    @property
    def made(self) -> Action:
        """The action that made the value of a send or a receive."""
        assert self.kind in ("S", "R"), self
        return Action(self.moved, self.stage if self.kind == "S" else self.peer, self.micro)

    @property
    def counterpart(self) -> Action:
        """The receive of a send, the send of a receive."""
        kind = {"S": "R", "R": "S"}[self.kind]
        return Action(kind, self.peer, self.micro, self.stage, self.moved)

    def __str__(self) -> str:
        if self.kind == "S":
            return f"{self.made}>{self.peer}"
        if self.kind == "R":
            return f"{self.stage}<{self.made}"
        return f"{self.stage}{self.kind}" + (str(self.micro) if self.computes else "")

    @classmethod
    def parse(cls, word: str) -> Action:
        """Read one word. Raises `ScheduleError` for anything else."""
        if found := _COMPUTED.fullmatch(word):
            return cls(found[2], int(found[1]), int(found[3]))
        if found := _OF_WEIGHTS.fullmatch(word):
            return cls(found[2], int(found[1]))
        if found := _SENT.fullmatch(word):
            return cls.send(cls(found[2], int(found[1]), int(found[3])), int(found[4]))
        if found := _RECEIVED.fullmatch(word):
            return cls.receive(cls(found[3], int(found[2]), int(found[4])), int(found[1]))
        raise ScheduleError(
            f'cannot read "{word}" as an action',
            why="an action is a stage, a kind (F I W B) and a micro-batch; a transfer is 2F0>3 or 3<2F0, "
            "with F, I or B; 2G gathers weights, 2A reduces gradients",
            fix=_nearest(word),
        )


def _nearest(word: str) -> str:
    """The nearest valid word."""
    upper = word.upper()
    if upper != word and any(p.fullmatch(upper) for p in _PATTERNS):
        return f"write {upper}"
    if found := re.fullmatch(f"([FIWB]){_NUMBER}", upper):
        return f"write the stage first, as in 0{found[0]}"
    if found := re.fullmatch(f"{_NUMBER}([FIWB])", upper):
        return f"add the micro-batch, as in {found[0]}0"
    return "write it like 2F0"


_PATTERNS = (_COMPUTED, _OF_WEIGHTS, _SENT, _RECEIVED)
