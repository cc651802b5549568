"""What a strategy is: a value that says when replicas exchange, what they send, and what they make of it.

A strategy moves nothing itself. It names its exchanges, as a partitioned graph names its collectives, and
players answer them: `virtual.Replicas` for all replicas in one process, `member.ReplicaMember` with
`between.Between` for one rank of a run.

    step        1   2   3   4   5   6   7   8
    replica 0   .   .   .   o   .   x   .   o       o  offer: a message is made, the exchange begins
    replica 1   .   .   .   o   .   x   .   o       x  take: its result lands, `delay` steps later

Without a delay both happen after the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tutti.errors import LayoutError

# This rank's shards by parameter name; what a strategy remembers of them, by `kind.name`.
Weights = dict[str, Tensor]
State = dict[str, Tensor]

# What replicas can take the mean of.
AVERAGED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# How the replicas of a round reach each other.
MEAN, PUSH = "mean", "push"
# Without waiting: a call that a thread of another replica answers.
CENTRE, PAIR = "centre", "pair"
CALLS = (CENTRE, PAIR)


@dataclass(frozen=True)
class Round:
    """One exchange.

    begins, lands: the number of steps taken when the messages are made, and when the result is used.
    kind: `mean` (each gets the mean of the messages) or `push` (each sends its own to the replica `hop`
        places on, and gets that of the replica as many places back); without waiting `centre` (each
        part goes to the replica that looks after it) or `pair` (all goes to one partner): the reply
        lands when it has come.
    fragment: which part of the weights takes part.
    group: of so many neighboring replicas each the mean is taken; 0: of all.
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

    Steps are counted from 1: what is due "after step 8" follows the eighth step. All functions are pure:
    they change nothing that they are given, and what they return shares no memory with it, unless it is
    returned as it came.
    """

    every: int

    @property
    def period(self) -> int:
        """After so many steps the schedule repeats."""
        return self.every

    @property
    def warm_up(self) -> int:
        """The step after which it begins."""
        return 0

    @property
    def longest_delay(self) -> int:
        """No result lands more steps after its round begins."""
        return 0

    @property
    def num_fragments(self) -> int:
        """In how many parts the weights go."""
        return 1

    @property
    def compression(self) -> str:
        """In what messages travel: a name in `comm.compression.NAMES`."""
        return "fp32"

    def check(self, num_replicas: int) -> None:  # noqa: B027  # most fit any number
        """Raise `LayoutError` where the strategy cannot work with so many replicas."""

    @abstractmethod
    def rounds(self, step: int, num_replicas: int) -> list[Round]:
        """The exchanges that begin after `step`, in order; the same on every replica."""

    @abstractmethod
    def init(self, weights: Weights) -> State:
        """What a replica remembers at the start."""

    @abstractmethod
    def offer(
        self, state: State, weights: Weights, due: Round
    ) -> tuple[State, Weights, dict[str, Tensor]]:
        """What changed in the state, the weights, and the message, for the weights of one fragment."""

    @abstractmethod
    def take(
        self, state: State, weights: Weights, received: dict[str, Tensor], due: Round
    ) -> tuple[State, Weights]:
        """What changed in the state, and the weights, when the result of an exchange lands."""

    @property
    def answers_from(self) -> str:
        """The kind of state that `answer` is about."""
        raise NotImplementedError(f"{self} is not called")

    def answer(
        self, mine: dict[str, Tensor], theirs: dict[str, Tensor], num_replicas: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What `mine`, pieces of this replica's state, become by another's call, and the reply."""
        raise NotImplementedError(f"{self} is not called")

    def partner(self, step: int, replica: int, here: Sequence[int]) -> int | None:
        """Whom `replica` calls in a `pair` after `step`, of the replicas that are `here`."""
        return None

    def __str__(self) -> str:
        """`name(every=8, option=value, ...)`, without the options that have their default value."""
        options = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in fields(self)
            if f.name == "every" or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__.lower()}({', '.join(options)})"


def of_kind(kind: str, weights: Weights) -> State:
    """Copies of `weights` to remember as `kind`."""
    return {f"{kind}.{name}": x.clone() for name, x in weights.items()}


def refuse(strategy: Strategy, what: str, fix: str, why: str = "") -> LayoutError:
    """The error for an option with a value that cannot be."""
    return LayoutError(f"{what} in sync={strategy}", why=why, fix=fix)


def check_dtypes(strategy: Strategy, weights: Weights) -> None:
    """Raise `LayoutError` for a weight of which replicas cannot take the mean."""
    for name, x in weights.items():
        if x.dtype not in AVERAGED:
            raise refuse(
                strategy,
                f'replicas cannot average "{name}" ({str(x.dtype).removeprefix("torch.")})',
                "parameters in a real floating dtype (torch.view_as_real), or data= instead of replica=",
                "they average " + ", ".join(str(d).removeprefix("torch.") for d in AVERAGED),
            )


def at_least(strategy: Strategy, option: str, least: float) -> None:
    """Raise unless an option is a number from `least` on."""
    value = getattr(strategy, option)
    if not value >= least:  # NaN is not either
        raise refuse(
            strategy, f"{option}={value} is below {least:g}", f"{option}={least:g} or more"
        )


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
