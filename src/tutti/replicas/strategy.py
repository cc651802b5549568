"""A strategy: a value that defines the replicas' exchanges, their messages, and the use of the results.

A strategy moves no data itself. It names its exchanges, as a partitioned graph names its collectives, and
players run them: `virtual.Replicas` for all replicas in one process, `member.ReplicaMember` with
`between.Between` for one rank of a run.

    step        1   2   3   4   5   6   7   8
    replica 0   .   .   .   o   .   x   .   o       o  offer: makes a message, the exchange begins
    replica 1   .   .   .   o   .   x   .   o       x  take: its result lands, `delay` steps later

Without a delay both happen after the same step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from tutti.errors import LayoutError

# This rank's shards by parameter name; a strategy's state for them, by `kind.name`.
Weights = dict[str, Tensor]
State = dict[str, Tensor]

# The dtypes that replicas can average.
AVERAGED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The kinds of exchanges in a round.
MEAN, PUSH = "mean", "push"
# Asynchronous kinds: a call that a thread of another replica answers.
CENTRE, PAIR = "centre", "pair"
CALLS = (CENTRE, PAIR)


@dataclass(frozen=True)
class Round:
    """One exchange.

    begins, lands: the step after which replicas make the messages, and the step after which they use the
        result.
    kind: `mean` (each gets the mean of the messages) or `push` (each sends its own to the replica `hop`
        places on, and gets that of the replica as many places back); asynchronous: `centre` (each part
        goes to the replica that owns it) or `pair` (all goes to one partner): the reply lands when it
        arrives.
    fragment: the index of the part of the weights.
    group: the number of neighboring replicas of a mean; 0: all.
    """

    begins: int
    lands: int
    kind: str = MEAN
    fragment: int = 0
    group: int = 0
    hop: int = 0


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A way for replicas to agree; prints as in a layout and parses back (`strategies.parse`).

    Steps count from 1: "after step 8" is after the eighth step. All functions are pure: they change no
    argument, and their results share no memory with one, unless they return it unchanged.
    """

    every: int
    # Options without effect unless another one is given.
    needs: ClassVar[Mapping[str, str]] = {}

    @property
    def period(self) -> int:
        """The length in steps after which the schedule repeats."""
        return self.every

    @property
    def warm_up(self) -> int:
        """The step after which the schedule begins."""
        return 0

    @property
    def longest_delay(self) -> int:
        """The most steps between the begin of a round and its result."""
        return 0

    @property
    def num_fragments(self) -> int:
        """The number of parts of the weights."""
        return 1

    @property
    def settles(self) -> bool:
        """Whether all replicas have the same value of a weight that rests once its round has landed."""
        return False

    def fragment(self, names: Sequence[str], due: Round) -> list[str]:
        """The weights of a round's fragment: every n-th, so that each fragment has weights of every depth."""
        return list(names[due.fragment :: self.num_fragments])

    @property
    def keeps_state(self) -> bool:
        """Whether a replica keeps a value of each weight between rounds, which begins as the weight."""
        return True

    @property
    def shares(self) -> bool:
        """Whether several steps may train one weight, each with rounds of its own."""
        return False

    @property
    def compression(self) -> str:
        """The format of messages: a name in `comm.collectives.compression.NAMES`."""
        return "fp32"

    def check(self, num_replicas: int) -> None:  # noqa: B027  # most fit any number
        """Raise `LayoutError` if the strategy cannot work with this number of replicas."""

    @abstractmethod
    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """The exchanges that begin after `step`, in order; the same on every replica."""

    @abstractmethod
    def init(self, weights: Weights) -> State:
        """A replica's initial state of weights that join; each has state of its own."""

    @abstractmethod
    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """The changes of the state, the weights, and the message, for the weights of one fragment."""

    @abstractmethod
    def take(
        self,
        state: State,
        weights: Weights,
        received: dict[str, Tensor],
        due: Round,
        still: Collection[str] = (),
    ) -> tuple[State, Weights]:
        """The changes of the state, and the weights, when the result of an exchange lands.

        `still` are the weights that no step has trained since the round began.
        """

    @property
    def answers_from(self) -> str:
        """The kind of state that `answer` reads and changes; "" if others never call."""
        return ""

    def answer(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], num_replicas: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The new values of `mine`, pieces of this replica's state, after another's call, and the reply."""
        raise NotImplementedError(f"{self} is not called")

    def partner(self, step: int, replica: int, here: Sequence[int]) -> int | None:
        """The replica, of those `here`, that `replica` calls in a `pair` after `step`."""
        return None

    def __str__(self) -> str:
        """`name(every=8, option=value, ...)`, without options at their default."""
        options = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in fields(self)
            if f.name == "every" or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__.lower()}({', '.join(options)})"


def of_kind(kind: str, weights: Weights) -> State:
    """Copies of `weights` as state of a `kind`."""
    return {f"{kind}.{name}": x.clone() for name, x in weights.items()}


def refuse(strategy: Strategy, what: str, fix: str, why: str = "") -> LayoutError:
    """The error for an option with an impossible value."""
    return LayoutError(f"{what} in sync={strategy}", why=why, fix=fix)


def check_dtypes(strategy: Strategy, weights: Weights) -> None:
    """Raise `LayoutError` for a weight that replicas cannot average."""
    for name, x in weights.items():
        if x.dtype not in AVERAGED:
            raise refuse(
                strategy,
                f'replicas cannot average "{name}" ({str(x.dtype).removeprefix("torch.")})',
                "parameters in a real floating dtype (torch.view_as_real), or data= instead of replica=",
                "they average " + ", ".join(str(d).removeprefix("torch.") for d in AVERAGED),
            )


def at_least(strategy: Strategy, option: str, least: float) -> None:
    """Raise unless an option is a number of at least `least`."""
    value = getattr(strategy, option)
    if value == math.inf:
        default = next(f.default for f in fields(strategy) if f.name == option)
        raise refuse(strategy, f"{option}={value} is not finite", f"{option}={default}")
    if not value >= least:  # NaN is not either
        raise refuse(
            strategy, f"{option}={value} is below {least:g}", f"{option}={least:g} or more"
        )


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
