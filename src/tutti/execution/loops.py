"""Plays the loops of a program on this rank: generated code of the parts, channels between pipeline ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.comm.collectives.channel import Channel
from tutti.comm.collectives.failure import Wait, waiting, with_line
from tutti.errors import CommError
from tutti.execution.generate import generate
from tutti.execution.profiling import ProgramProfile
from tutti.graph.ops.loop import SEND, Body, Do, LoopPart
from tutti.graph.players.dim_segments import join
from tutti.graph.players.player import Player
from tutti.graph.players.playing import ADD, Row, play
from tutti.layout import Mesh

Key = Callable[[int], int]
# The function `(inputs, key, micro, post) -> (outputs, summed)` of a part.
Function = Callable[..., tuple[list[Any], list[Any]]]
Functions = Mapping[tuple[int, bool], Function]
# The sending stage, what it has done, the receiving stage.
Message = tuple[int, str, int]


class Loops:
    """Makes the function that plays a body's row on the rank at `coordinates`.

    Args:
        rank_of: the rank of this run that plays a stage, with this rank's other coordinates.
        channels: to and from those ranks, by (sending rank, receiving rank).
        profile: of the program.
    """

    def __init__(
        self,
        owner: nn.Module,
        player: Player | None,
        mesh: Mesh,
        coordinates: Mapping[str, int],
        rank_of: Mapping[int, int],
        channels: Mapping[tuple[int, int], Channel],
        profile: ProgramProfile | None = None,
    ) -> None:
        self.owner, self.player, self.mesh, self.coordinates = owner, player, mesh, coordinates
        self.rank_of, self.channels = rank_of, channels
        self._numbers = itertools.count()
        self._profile = profile

    def __call__(self, body: Body) -> Callable[[list[Any], Key], list[Any]]:
        functions = {
            (id(part), adding): self._written(key, graph)
            for key, part in body.every_part()
            for adding, graph in ((False, part.graph), (True, part.adding))
            if graph is not None
        }

        return partial(self.play, Row(body), functions)

    def play(self, row: Row, functions: Functions, values: list[Any], key: Key) -> list[Any]:
        """Play a row with `functions` for its parts, by the `id` of each and whether it adds."""
        given = (row.body, functions, key, self.rank_of, self.channels, self._profile)
        return play(row, values, RowEngine(*given))

    def _written(self, key: tuple[int, str], graph: fx.Graph) -> Function:
        name = f"part_{key[0]}{key[1]}_{next(self._numbers)}"
        given = (graph, self.owner, self.player, self.mesh, self.coordinates)
        return generate(*given, name=name, profile=self._profile).function


class RowEngine:
    """One pass through a row.

    `current` is the message that this rank waits for, or the one that failed, and `line` the user's line
    of its first value; reports of waiting ranks show both.
    """

    def __init__(
        self,
        body: Body,
        functions: Functions,
        key: Key,
        rank_of: Mapping[int, int],
        channels: Mapping[tuple[int, int], Channel],
        profile: ProgramProfile | None = None,
    ) -> None:
        self.body, self.functions, self.key = body, functions, key
        self._profile = profile
        self.current: Wait | None = None
        self.line = ""
        self.rank_of, self.channels = rank_of, channels
        self.keys = {id(part): key for key, part in body.every_part()}
        # The number of a message's values sent early, while its part ran.
        self.ahead: Counter[Message] = Counter()

    def call(
        self, part: LoopPart, inputs: list[Any], micro: int, *, adding: bool
    ) -> tuple[list[Any], list[Any]]:
        def post(x: Tensor, name: str) -> None:
            self._post(*self.keys[id(part)], micro, x, name)

        function = self.functions[id(part), adding]
        if self._profile is None:
            return function(inputs, self.key, micro, post)
        stage, kind = self.keys[id(part)]
        with self._profile.span(str(Do(kind, stage, micro)), "micro-batch"):
            return function(inputs, self.key, micro, post)

    def _post(self, stage: int, kind: str, micro: int, x: Tensor, name: str) -> None:
        """Send `x` if it is the next value of a message; else the row's entry sends it later."""
        for (sender, made, other), names in self.body.messages.items():
            message = sender, made, other
            at = self.ahead[message]
            if (sender, made) == (stage, kind) and names[at : at + 1] == (name,):
                self.ahead[message] += 1
                with self._moving(Do(kind, stage, micro, SEND, other), [x]) as channel:
                    channel.send(x, more=at + 1 < len(names))

    def add(self, total: Tensor, value: Tensor, op: str) -> Tensor:
        return ADD[op](total, value)

    def join(self, values: list[Tensor], dim: int, outer: int) -> Tensor:
        return join(torch.stack(values), dim, outer)

    def send(self, do: Do, values: list[Any]) -> None:
        rest = values[self.ahead.pop((do.stage, do.kind, do.other), 0) :]
        with self._moving(do, rest) as channel:
            for left, x in zip(reversed(range(len(rest))), rest, strict=True):
                channel.send(x, more=left > 0)

    def receive(self, do: Do, likes: list[Tensor]) -> list[Any]:
        with self._moving(do, likes) as channel:
            return [channel.recv(like.shape, like.dtype) for like in likes]

    @contextmanager
    def _moving(self, do: Do, values: list[Tensor]) -> Iterator[Channel]:
        """Context of a message, with its channel."""
        sends = do.way == SEND
        source, to = (do.stage, do.other) if sends else (do.other, do.stage)
        edge = self.rank_of[source], self.rank_of[to]
        nbytes = sum(x.nbytes for x in values)
        self.line = self.body.source_of(source, do.kind, to)
        self.current = waiting("send" if sends else "recv", edge, nbytes)
        try:
            with self._span_of(do):
                yield self.channels[edge]
        except CommError as error:
            raise with_line(error, self.line) from error
        self.current, self.line = None, ""

    def _span_of(self, do: Do) -> AbstractContextManager[None]:
        """The span of a message in the profile, if there is one."""
        if self._profile is None:
            return nullcontext()
        way = (
            f"send {do.kind}{do.micro} to"
            if do.way == SEND
            else f"receive {do.kind}{do.micro} from"
        )
        return self._profile.span(f"{way} stage {do.other}", "collective")
