"""What a user's training script comes down to, and the register of such scripts."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import tutti

CALLS = 4
SAME, SINGLE, HALF = 1e-9, 2e-4, 2e-2


@dataclass
class Script:
    """One training script, ready to run: what its user has before the loop.

    batches: the arguments of each call, a tuple; a dict is given by name (`step(**batch)`).
    between: what the script does after call `i`; what it returns is compared, too.
    watch: what else the script keeps (an average of the weights, a counter), compared at the end.
    """

    train_step: Callable[..., Any]
    model: Any
    optimizer: Any
    batches: Sequence[tuple[Any, ...] | dict[str, Any]]
    between: Callable[[int], Any] = lambda call: None
    watch: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Program:
    """A script by name.

    idiom: what in it is worth a row.
    changes: lines of the original that had to change, beside `step = tutti.distribute(...)`.
    place: for `tensor=2`; by default every linear layer by its outputs, where two divide them.
    packages: modules that it needs; where one is missing, the row says so.
    within: relative differences that are rounding: more where it computes in float32 or bfloat16 somewhere.
    """

    name: str
    family: str
    idiom: str
    build: Callable[[], Script]
    changes: int = 0
    place: Mapping[str, str] | None = None
    packages: tuple[str, ...] = ()
    within: float = SAME

    @property
    def needs_whole(self) -> bool:
        """Whether it reads or writes weights in between: one line more, where ranks keep shards."""
        return re.search(r"\bwhole\b", inspect.getsource(self.build)) is not None

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [p for p in self.packages if importlib.util.find_spec(p) is None]


@dataclass
class Register:
    """The programs of one family (a file), in the order of its lines."""

    family: str
    programs: dict[str, Program] = field(default_factory=dict)

    def __call__(
        self, name: str, idiom: str, **options: Any
    ) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
        """Note the function below as the program `name`."""

        def note(build: Callable[[], Script]) -> Callable[[], Script]:
            assert name not in self.programs, name
            self.programs[name] = Program(name, self.family, idiom, build, **options)
            return build

        return note


def whole(model: Any, *, slots: bool = False) -> AbstractContextManager[Any]:
    """Weights at hand within the block, also where ranks keep shards; `slots`: the optimizer's state too."""
    return tutti.whole(model, slots=slots)
