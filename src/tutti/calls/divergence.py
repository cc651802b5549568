"""Detects ranks of one program in different calls or with different inputs, and reports the difference.

At each call each rank publishes its inputs (`comm.host.board`), and compares those of the others: before
the call, while it waits for them, and after it. So the check adds no wait, and a rank with another batch,
shape or learning rate fails before its collectives meet others. `samples` compares replicated state.
Between hosts the entries travel outside of the step (`comm.collectives.bulletin`), and ranks compare them
at the next call.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tutti.calls.sharded_batch import kind_of, shardings_of
from tutti.calls.weight_samples import Samples, offset_sample
from tutti.capture.state.free_numbers import FreeInt, is_free_number
from tutti.capture.unread import is_unread, unread_kind
from tutti.comm.collectives.bulletin import Bulletin
from tutti.comm.collectives.exchange import exchange_texts
from tutti.comm.collectives.group import Group, collective_timeout
from tutti.comm.collectives.payload import octets
from tutti.comm.host.awake import AwakeClock
from tutti.comm.host.board import DATA_NBYTES, TEXT_NBYTES, Board
from tutti.comm.host.segment import SharedMemoryError, memory_host
from tutti.comm.host.signals import WATCHES
from tutti.errors import CommError
from tutti.layout import Layout
from tutti.torch_private.dtensors import local_part
from tutti.user_lines import is_users, users_level

WAIT_SECONDS = 10.0  # after which a rank reports the ranks that it waits for
WHOLE_NBYTES = 2**15  # a tensor's hash covers all of it up to this size, else a sample
_SAMPLE = 2048
_POLL_SECONDS = 5e-4
_ALL_SECONDS = 0.3
_FIRST = 1 << 63  # the first call of a step, before the ranks agree on its number
# The program (0: none yet), the step's number, the batch's form, and the counts of values and numbers.
_HEAD = struct.Struct("<qqQII")


Said = tuple[str, str, str]  # what, why, fix
_DRAW = "draw."  # begins the name of a random number of the host


class Divergence:
    """Watches one step on this rank.

    Args:
        name: of the step, for errors.
        layout: the layout of `distribute`: each replica is watched separately.
    """

    def __init__(self, name: str, layout: Layout) -> None:
        self._name, self._layout = name, layout
        self._board: Board | Bulletin | None = None
        self.anew = ""  # why this rank traces the step anew
        self._number = 0  # of this step, the same on all ranks
        self._count = 0
        self._leaves: Sequence[Any] = ()
        self._sharded: dict[int, frozenset[str]] = {}  # the axes that split a leaf
        self._given: Mapping[str, Any] = {}
        self._num_steps = 0
        self._forms: dict[Any, tuple[int, list[str]]] = {}
        self._texts: dict[Any, bytes] = {}
        self._samples: dict[int, Samples] = {}
        self._call, self._mine = 0, b""
        self._unseen: list[int] = []
        self._began_ns = 0
        self._waited = False
        self._failed = ""
        self._past: deque[tuple[int, bytes, list[int]]] = deque(maxlen=2)
        self._equal_at: int | None = None  # the last checkpoint with equal values on all ranks

    def given(self, leaves: Sequence[Any], given: Mapping[str, Any], num_steps: int) -> None:
        """Begin a call: the leaves of its batch, its numbers, and the number of earlier steps."""
        self._leaves, self._given, self._num_steps = leaves, given, num_steps
        found = shardings_of(leaves, self._layout.mesh)
        self._sharded = {k: sharding.axes for k, sharding in found.items()}

    def note_equal(self, num_steps: int) -> None:
        """Ranks hold the same values of what they have in common, and a checkpoint has them."""
        self._equal_at = num_steps

    @property
    def fix_of_state(self) -> str:
        """What to do about ranks with other values of a tensor."""
        known = "the last checkpoint"
        if self._equal_at is not None:
            known = f"the checkpoint of step {self._equal_at}, with the same values on all ranks"
        return f"change weights on every rank, or load {known}"

    def first(self) -> None:
        """At the first call of this step all ranks agree on a number for it."""
        self._board = _board_of(self._layout)
        if self._board is None:
            return
        name = _FIRST | zlib.crc32(self._name.encode())
        self._enter(name, 0, b"")
        try:
            if isinstance(self._board, Bulletin):
                self._board.settle()
            self._meet(name)
            made = exchange_texts(str(int.from_bytes(os.urandom(3))), Group.world())
        except BaseException:
            self._board.fail(name)
            raise
        finally:
            self._leave()
        self._number = int(made[self._board.ranks[0]]) + 1

    def before_compiling(self) -> None:
        """All ranks compile this call, or none: returns when all have reached this point."""
        if self._board is not None:
            self._count += 1
            self._enter(self._number << 32 | self._count, 0, b"")
            try:
                if isinstance(self._board, Bulletin):
                    self._board.settle()
                self._meet(self._call)
            except BaseException:
                self._board.fail(self._call)
                raise
            finally:
                self._leave()

    def watching(self, program: int, samples: Samples | None, own: Sequence[Tensor]) -> _Watching:
        """A context for one call of a compiled program: its number from 1, samples of its state."""
        return _Watching(self, program, samples, own)

    def enter(self, program: int, samples: Samples | None, own: Sequence[Tensor]) -> None:
        """Publish this rank's inputs, and compare the others'."""
        if self._board is None:
            return
        if self._failed:
            raise CommError(
                f"an earlier call differed between ranks ({self._failed})",
                why="the ranks are no longer at the same place",
                fix="start again from the last checkpoint",
            )
        self._count += 1
        if isinstance(self._board, Bulletin):
            self._board.settle()
        for call, mine, unseen in self._past:
            self._compare(call, mine, unseen)
        self._past.clear()
        data = samples.of(own, self._count) if samples is not None else b""
        self._enter(self._number << 32 | self._count, program, data)
        if samples is not None:
            self._samples[program] = samples
        self._look_around()

    def leave(self, error: BaseException | None) -> None:
        """After the call, which has raised `error`, if any: a difference between ranks explains it."""
        if self._board is None or self._board.now(self._board.position) != self._call:
            return
        try:
            if error is None or (isinstance(error, CommError) and not self._failed):
                self._look_around()
            if error is None and self._unseen:  # a program without a meeting of all ranks
                self._past.append((self._call, self._mine, self._unseen))
        finally:
            if error is not None:
                self._board.fail(self._call)
            self._leave()

    # Publication

    def _enter(self, call: int, program: int, samples: bytes) -> None:
        assert self._board is not None
        form, names = self._form()
        values = (
            () if program == 0 else tuple(self._value(k, x) for k, x in enumerate(self._leaves))
        )
        numbers = tuple(map(_as_float, self._given.values()))
        packed = struct.pack(f"<{len(values)}Q{len(numbers)}d", *values, *numbers)
        head = _HEAD.pack(program, self._num_steps, form, len(values), len(numbers))
        self._call, self._mine = call, (head + packed + samples)[:DATA_NBYTES]
        self._unseen, self._waited = list(self._board.others), False
        self._began_ns = time.monotonic_ns()
        self._board.write(call, self._text(names, "" if program else self.anew), self._mine)
        WATCHES.append(self._look_around)

    def _leave(self) -> None:
        assert self._board is not None
        self._board.leave()
        if self._look_around in WATCHES:
            WATCHES.remove(self._look_around)

    def _form(self) -> tuple[int, list[str]]:
        """A hash of the batch without its tensors' values, and a text for each leaf."""
        key = tuple(map(_kind, self._leaves))
        found = self._forms.get(key)
        if found is None:
            words = [_said(x) for x in self._leaves]
            found = self._forms[key] = zlib.crc32("\n".join(words).encode()), words
        return found

    def _value(self, k: int, x: Any) -> int:
        if isinstance(x, DTensor):
            x = local_part(x) if k in self._sharded else None
        if not isinstance(x, Tensor) or not x.is_cpu:
            return 0
        if x.layout is not torch.strided:
            return 0
        if x.nbytes > WHOLE_NBYTES:
            x = offset_sample(x.detach(), self._count, _SAMPLE)
        # By the fewest calls; the memory of other kinds of tensors is not at their address.
        plain = type(x) is Tensor and not (x.dtype.is_complex or x.is_neg())
        if plain and x.is_contiguous() and x.numel():
            return zlib.crc32((ctypes.c_char * x.nbytes).from_address(x.data_ptr()))
        return zlib.crc32(octets(x))

    def _text(self, words: list[str], anew: str) -> bytes:
        line = _line()
        key = (id(words), line, len(self._given), anew)
        if key not in self._texts:
            said = {"step": self._name, "at": line, "anew": anew[:200]}
            said |= {"leaves": words, "numbers": [*self._given]}
            text = json.dumps(said).encode()
            if len(text) > TEXT_NBYTES:
                text = json.dumps({**said, "leaves": [], "numbers": []}).encode()[:TEXT_NBYTES]
            self._texts[key] = text
        return self._texts[key]

    # Comparison

    def _look(self) -> None:
        self._unseen = self._compare(self._call, self._mine, self._unseen)

    def _compare(self, call: int, mine: bytes, positions: Sequence[int]) -> list[int]:
        """Those of `positions` that have not reached `call`; raises if one has other inputs there."""
        assert self._board is not None
        unseen = []
        for j in positions:
            theirs = self._board.data(j, call)
            if theirs is None:
                unseen.append(j)
            elif theirs != mine:
                fixed = _num_fixed(mine)
                here, there = mine[:fixed], theirs[:fixed]
                if apart := self._apart(j):
                    here, there = _without(apart, here), _without(apart, there)
                if there != here or self._unlike(j, call, mine, theirs):
                    self._tell(j, call, mine, theirs)
        return unseen

    def _apart(self, j: int) -> Sequence[int]:
        """The positions of the leaves of which the rank at position j has other shards."""
        if not self._sharded:
            return ()
        assert self._board is not None
        mesh, ranks = self._layout.mesh, self._board.ranks
        here, there = (mesh.coordinates(ranks[k]) for k in (self._position, j))
        differ = {axis for axis in here if here[axis] != there[axis]}
        return [k for k, axes in self._sharded.items() if axes & differ]

    def _look_around(self) -> None:
        """Compare with the ranks that have reached this call; check the calls of the others."""
        self._look()
        if self._unseen:
            self._look_elsewhere()  # `waits` reports long waits

    def _meet(self, call: int) -> None:
        """Return when all ranks have reached `call`."""
        assert self._board is not None
        awake = AwakeClock()
        while True:
            if call & _FIRST:  # an entry may be that of another step of this name
                self._unseen = [j for j in self._unseen if self._board.now(j) != call]
            else:
                self._look()
            if not self._unseen:
                return
            waited = awake.look()
            self._look_elsewhere(waited)
            self._give_up(waited)
            time.sleep(_POLL_SECONDS if waited < 1 else 20 * _POLL_SECONDS)

    def _look_elsewhere(self, waited_seconds: float = 0.0) -> None:
        """Raise if a rank is in another call that this one has not reached; report long waits."""
        assert self._board is not None
        board = self._board
        for j in self._unseen:
            other = board.now(j) or board.failed(j, self._began_ns)
            if not other or other == self._call or _has_reached(board, board.position, other):
                continue
            if not self._call & _FIRST and board.reached(j, self._call):
                continue  # it has left the call: a program without a collective waits for nobody
            self._fail("another call")
            raise CommError(
                "the ranks call different steps:\n"
                + self._calls({board.position: self._call, j: other}),
                why="all ranks take part in every step, whatever is printed or saved on one alone",
                fix="call it on every rank: take it out of `if rank == 0:`",
            )
        if waited_seconds > WAIT_SECONDS and not self._waited:
            self._waited = True
            ranks = _ranks([board.ranks[j] for j in self._unseen])
            text = json.loads(self._text(self._form()[1], ""))
            warnings.warn(
                f"rank {board.ranks[board.position]} has waited {waited_seconds:.0f} s in {self._name} "
                f"({text['at']}) for {ranks}, which {'has' if len(self._unseen) == 1 else 'have'} not "
                "called it: all ranks must call every step, an evaluation, too",
                stacklevel=users_level(),
            )

    def _give_up(self, waited_seconds: float) -> None:
        assert self._board is not None
        board = self._board
        mine = board.ranks[board.position]
        gone = [board.ranks[j] for j in self._unseen if board.ended(j)]
        if gone:
            are = "is" if len(gone) == 1 else "are"
            raise CommError(f"{_ranks(gone)} {are} gone; it left rank {mine} in {self._name}")
        seconds = collective_timeout().total_seconds()
        if waited_seconds > seconds:
            late = _ranks([board.ranks[j] for j in self._unseen])
            raise CommError(
                f"{late} did not call {self._name} within {seconds:g} s of rank {mine}",
                at=_line(),
                why="all ranks must call every step, an evaluation, too",
                fix="if a rank is only slow, set TUTTI_TIMEOUT to more seconds",
            )

    # Errors

    def _tell(self, j: int, call: int, mine: bytes, theirs: bytes) -> None:
        """Raise, unless only rounding differs."""
        assert self._board is not None
        board = self._board
        here, there = _HEAD.unpack_from(mine), _HEAD.unpack_from(theirs)
        until = time.monotonic() + _ALL_SECONDS * isinstance(board, Board)
        while time.monotonic() < until and not all(board.has(k, call) for k in board.others):
            time.sleep(_POLL_SECONDS)  # so that the error names all of them
        found = (
            self._other_form(j, call, here, there)
            or self._other_program(j, call, here, there)
            or self._other_values(j, call, mine, theirs)
            or self._other_state(j, call, here[0], mine, theirs)
        )
        if found:
            what, why, fix = found
            self._fail(what)
            at = json.loads(board.text(board.position, call) or "{}").get("at", "")
            raise CommError(what, at=at, why=why, fix=fix)

    def _fail(self, what: str) -> None:
        self._failed = what

    def _other_form(self, j: int, call: int, here: Any, there: Any) -> Said | None:
        if here[2] == there[2]:
            return None
        mine, theirs = (self._words(k, call)["leaves"] for k in (self._position, j))
        pairs = enumerate(zip(mine, theirs, strict=False))
        at = next((k for k, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
        shown = self._by_ranks(
            call, lambda k: ([*self._words(k, call)["leaves"], *["nothing"] * 99])[at]
        )
        return (
            f"the ranks were given different batches at step {self._num_steps}: batch tensor {at} is "
            + shown,
            self._lines(call),
            "give every rank the same *global* batch (one seed, no DistributedSampler): each rank takes its "
            "own part of it",
        )

    def _other_program(self, j: int, call: int, here: Any, there: Any) -> Said | None:
        heads = {k: _HEAD.unpack_from(x) for k, x in self._written(call).items()}
        if here[1] != there[1]:
            return (
                f"the ranks are at different steps of {self._name}: "
                + self._by_ranks(call, lambda k: f"step {heads[k][1]}"),
                "random masks and checkpoints count the calls of a step",
                "load the same checkpoint on every rank, and call the step equally often",
            )
        if here[0] == there[0]:
            return None

        def played(k: int) -> str:
            why = self._words(k, call).get("anew", "")
            anew = f"traced anew ({why})" if why else "traced anew"
            return f"program {heads[k][0]}" if heads[k][0] else anew

        return (
            f"the ranks would play different programs of {self._name} at step {here[1]}: "
            + self._by_ranks(call, played),
            "what a trace depends on differs: an option of the optimizer, an attribute or the mode of a "
            "module, a hook, requires_grad, or a number the step branches on; " + self._lines(call),
            "change it on every rank",
        )

    def _other_values(self, j: int, call: int, mine: bytes, theirs: bytes) -> Said | None:
        num_values, num_numbers = _HEAD.unpack_from(mine)[3:]
        form = f"<{num_values}Q{num_numbers}d"
        if _HEAD.unpack_from(theirs)[3:] != (num_values, num_numbers):
            names = {k: [*map(str, self._words(k, call)["numbers"])] for k in (self._position, j)}
            drawn = {k: sum(x.startswith(_DRAW) for x in names[k]) for k in names}
            if len({*drawn.values()}) == 1:
                return None
            step = self._num_steps
            return _drew(step, self._by_ranks(call, lambda k: f"{drawn[k]} numbers", drawn))
        every = {
            k: struct.unpack_from(form, x, _HEAD.size)
            for k, x in self._written(call).items()
            if _HEAD.unpack_from(x)[3:] == (num_values, num_numbers)
        }
        a, b = every[self._position], every[j]
        apart = self._apart(j)
        at = next(
            (
                k
                for k in range(len(a))
                if a[k] != b[k] and (a[k] == a[k] or b[k] == b[k]) and k not in apart
            ),
            None,
        )
        if at is None:
            return None
        words, step = self._words(self._position, call), self._num_steps
        if at < num_values:
            return (
                f"the ranks were given different batches at step {step}: batch tensor {at} "
                f"({words['leaves'][at]}) has "
                + self._by_ranks(call, lambda k: str(every[k][at]), every),
                self._lines(call)
                + "; a rank that draws more random numbers than others draws another batch next",
                "give every rank the same *global* batch: a generator of its own for what one rank alone "
                "draws, and no DistributedSampler",
            )
        name = words["numbers"][at - num_values]
        shown = self._by_ranks(call, lambda k: _number(every[k][at]), every)
        if name.startswith(_DRAW):
            return _drew(step, f"draw {name.removeprefix(_DRAW)} is {shown}")
        return (
            f'the ranks have different numbers at step {step}: "{name}" is {shown}',
            "learning rates and the like are inputs of a step, the same on every rank",
            "step schedulers on every rank, by numbers that all ranks have",
        )

    def _other_state(
        self, j: int, call: int, program: int, mine: bytes, theirs: bytes
    ) -> Said | None:
        assert self._board is not None
        name = self._unlike(j, call, mine, theirs)
        if not name:
            return None
        samples, count = self._samples[program], call & 0xFFFFFFFF
        both = sorted(self._board.ranks[k] for k in (self._position, j))
        ago = count - samples.since(count)
        return (
            f'"{name}" has other values on rank {both[0]} than on rank {both[1]} '
            f"before step {self._num_steps}",
            "ranks that hold the same part of a weight must hold the same values; it was looked at "
            f"{ago} {'call' if ago == 1 else 'calls'} before",
            self.fix_of_state,
        )

    def _unlike(self, j: int, call: int, mine: bytes, theirs: bytes) -> str:
        """The name of a state tensor that differs on the rank at position j; or ""."""
        samples, begin = self._samples.get(_HEAD.unpack_from(mine)[0]), _num_fixed(mine)
        if samples is None:
            return ""
        count = call & 0xFFFFFFFF
        return samples.differing(count, self._position, mine[begin:], j, theirs[begin:])

    @property
    def _position(self) -> int:
        assert self._board is not None
        return self._board.position

    def _written(self, call: int) -> dict[int, bytes]:
        """The inputs of each rank that has reached a call, by position."""
        assert self._board is not None
        found = {k: self._board.data(k, call) for k in range(len(self._board.ranks))}
        found[self._position] = self._mine if call == self._call else found[self._position]
        return {k: x for k, x in found.items() if x is not None}

    def _by_ranks(
        self, call: int, show: Callable[[int], str], among: Collection[int] | None = None
    ) -> str:
        """The different values, each with its ranks; without the text of hashes."""
        assert self._board is not None
        ranks: dict[str, list[int]] = {}
        for k in self._written(call) if among is None else among:
            ranks.setdefault(show(k), []).append(self._board.ranks[k])
        hashes = all(text.isdigit() for text in ranks)
        texts = (["values", "others"] + ["others"] * len(ranks)) if hashes else list(ranks)
        return ", ".join(f"{t} on {_ranks(r)}" for t, r in zip(texts, ranks.values(), strict=False))

    def _words(self, k: int, call: int) -> dict[str, Any]:
        assert self._board is not None
        empty = {"step": self._name, "at": "", "leaves": [], "numbers": []}
        return {**empty, **_loaded(self._board.text(k, call))}

    def _lines(self, call: int) -> str:
        return "called at " + self._by_ranks(call, lambda k: self._words(k, call)["at"])

    def _calls(self, calls: Mapping[int, int]) -> str:
        assert self._board is not None
        said = []
        for j, call in sorted(calls.items()):
            words = _loaded(self._board.text(j, call))
            at = "the first call" if call & _FIRST else f"call {call & 0xFFFFFFFF}"
            step, line = words.get("step", "?"), words.get("at", "?")
            said.append(f"       rank {self._board.ranks[j]}: {at} of {step}, at {line}")
        return "\n".join(said)


class _Watching:
    """The context manager of every call."""

    __slots__ = ("_args", "_of")

    def __init__(self, of: Divergence, *args: Any) -> None:
        self._of, self._args = of, args

    def __enter__(self) -> None:
        try:
            self._of.enter(*self._args)
        except BaseException as error:
            self._of.leave(error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._of.leave(error)


# The boards of this process, by their ranks; those of a destroyed process group go with it.
_BOARDS: dict[tuple[int, tuple[int, ...]], tuple[Any, Board | Bulletin | None]] = {}


def _board_of(layout: Layout) -> Board | Bulletin | None:
    """The board of the ranks of this rank's program; all ranks call together the first time.

    None for a single rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    count = layout.num_replicas if layout.num_replicas > 1 and not layout.server else 1
    size = dist.get_world_size() // count
    first = dist.get_rank() // size * size
    ranks = tuple(range(first, first + size))
    world: Any = dist.group.WORLD
    key = (id(world), ranks)
    if key not in _BOARDS or _BOARDS[key][0] is not world:
        _BOARDS[key] = world, _made(ranks)
    return _BOARDS[key][1]


def _made(ranks: tuple[int, ...]) -> Board | Bulletin | None:
    def exchange(text: str) -> list[str]:
        said = exchange_texts(text, Group.world())
        return [said[rank] for rank in ranks]

    rank = dist.get_rank()
    mine = json.dumps([memory_host(rank), os.getpid()])
    said = [json.loads(x) for x in exchange_texts(mine, Group.world())]
    size = len(ranks)
    groups = [said[i : i + size] for i in range(0, len(said), size)]
    if size == 1:
        return None
    if any(len({host for host, _ in group}) > 1 for group in groups):
        return _between_hosts(ranks)
    pids = [said[rank][1] for rank in ranks]
    try:
        return Board(ranks, ranks.index(rank), pids, exchange)
    except SharedMemoryError:  # `Groups` warns with the reason
        return _between_hosts(ranks)


def _between_hosts(ranks: tuple[int, ...]) -> Bulletin:
    """Every rank makes the groups of all ranks, in one order."""
    size, made = len(ranks), None
    for first in range(0, dist.get_world_size(), size):
        some = tuple(range(first, first + size))
        group = dist.new_group(list(some), timeout=collective_timeout(), backend="gloo")
        made = group if some == ranks else made
    assert isinstance(made, dist.ProcessGroup)
    return Bulletin(ranks, ranks.index(dist.get_rank()), made)


def _num_fixed(data: bytes) -> int:
    """The number of bytes of an entry that must be equal on all ranks; samples follow."""
    num_values, num_numbers = _HEAD.unpack_from(data)[3:]
    return _HEAD.size + 8 * (num_values + num_numbers)


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.dtype, kind_of(x)
    if is_free_number(x):
        return FreeInt if type(x) is FreeInt else float
    if isinstance(x, float):
        return repr(x)
    return type(x), unread_kind(x) if is_unread(x) else x


def _said(x: Any) -> str:
    if isinstance(x, Tensor):
        sharded = f" in {'x'.join(map(str, x.placements))}" if isinstance(x, DTensor) else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{sharded}"
    if is_unread(x):
        return f"a {unread_kind(x).__name__} that no code reads"
    if is_free_number(x):
        return "a float" if isinstance(x, float) else "an integer in formulas"
    return repr(x)[:100]


def _without(leaves: Sequence[int], data: bytes) -> bytes:
    """The data of a call with zeros for the values of some leaves."""
    made = bytearray(data)
    for k in leaves:
        struct.pack_into("<Q", made, _HEAD.size + 8 * k, 0)
    return bytes(made)


def _as_float(x: Any) -> float:
    try:
        return float(x)
    except (TypeError, ValueError):
        return float(zlib.crc32(repr(x).encode()))


_LINES: dict[tuple[CodeType, int], str] = {}


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            key = frame.f_code, frame.f_lineno
            if key not in _LINES:
                _LINES[key] = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return _LINES[key]
        frame = frame.f_back
    return ""


def _loaded(text: str) -> dict[str, Any]:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _has_reached(board: Board | Bulletin, j: int, call: int) -> bool:
    """Whether the rank at position j has reached a call; first calls of steps have no order."""
    return board.has(j, call) if call & _FIRST else board.reached(j, call)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _number(x: float) -> str:
    """A number as text, which is no hash: with a point."""
    text = f"{x:.9g}"
    return f"{text}.0" if text.isdigit() else text


def _drew(step: int, shown: str) -> Said:
    return (
        f"the ranks have drawn different random numbers at step {step}: {shown}",
        "numbers that a step draws by Python's random or NumPy are those of one device",
        "the same seed on every rank (random.seed, np.random.seed); what one rank alone draws, or more often "
        "than others, from a generator of its own",
    )
