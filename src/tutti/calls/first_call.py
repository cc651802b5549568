"""A call that makes slots of an optimizer: runs eagerly, on whole tensors on each rank.

A first step of another form makes them, or a later step (`capture.state.new_slots`). With the whole batch and
whole weights it is the step of one device under any layout; random ops draw the numbers of its captured form.
Capture begins at the next call, from the slots that this one leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from tutti.calls.eager import eagerly
from tutti.calls.python_values import PythonValues
from tutti.capture.forms import flattened, returnable
from tutti.capture.handed import arguments_of, rebuilt
from tutti.capture.python.findings import Findings
from tutti.capture.python.held_values import MISSING, TableEntry, named
from tutti.capture.python.python_state import PythonState
from tutti.capture.state.first_form import SlotsAhead, awaiting, note_step
from tutti.capture.state.kept_gradients import give_kept, note_eager_call
from tutti.capture.state.left_modes import hooks_kept
from tutti.capture.state.lift import Undo, called_optimizers, optimizers_of, state_of
from tutti.comm.collectives.agree import check_order
from tutti.comm.collectives.exchange import broadcast_first
from tutti.errors import CaptureError
from tutti.job import Job
from tutti.layout import Layout
from tutti.state.deferred import is_deferred
from tutti.state.residence import Residence, run_device, settle, whole_of
from tutti.state.residences import adopt, known_residence, refuse_open
from tutti.state.shards import StateShard
from tutti.state.whole import Whole
from tutti.torch_private.autograd_engine import version_of
from tutti.torch_private.pytrees import tree_leaves, tree_map_only


def refuse_where_apart(optimizer: Any, layout: Layout) -> None:
    """Raise `CaptureError` if replicas or servers would need a first step of another form."""
    one = awaiting(optimizer) if layout.num_replicas > 1 else None
    if one is not None:
        _refuse_apart(f"{type(one).__name__} takes a first step of another form", layout)


def _refuse_apart(what: str, layout: Layout) -> NoReturn:
    where = "servers have its slots" if layout.server else "each replica has its own rows"
    raise CaptureError(
        what,
        why=f"such a step runs eagerly, with whole weights and the whole batch, and {where}",
        fix="take it before: train_step(model, optimizer, *batch), then tutti.distribute(...); or a "
        "layout without replicas",
    )


def refuse_in_shards(model: nn.Module, optimizer: Any) -> None:
    """Raise `CaptureError` if only a first step on whole weights could make the slots to load."""
    if _in_shards(model):
        one = awaiting(optimizer) or optimizers_of(optimizer)[0]
        raise CaptureError(
            f"{type(one).__name__} has no slots yet, and the weights lie in shards",
            why="its first step has another form than the later ones, and makes the slots",
            fix="load before any step on the model is called; or call the step once with any batch first",
        )


def _in_shards(model: nn.Module) -> bool:
    return any(isinstance(s.tensor, StateShard) for s in state_of(model, None))


class FirstCall:
    """One eager call of a step, for the slots `ahead`. All ranks make it together."""

    def __init__(self, job: Job, python: PythonValues, ahead: SlotsAhead) -> None:
        self._job, self._python, self._ahead = job, python, ahead
        self._home = known_residence(job.model)
        self._gradients_lost = False

    def take(self, batch: tuple[Any, ...], num_steps: int) -> list[Any]:
        """The returned leaves, and their form, after `num_steps` steps."""
        job, python = self._job, self._python
        self._refuse()
        adopt(job.model, job.optimizer)
        before, cut = _versions(python), _in_shards(job.model)
        with self._whole():
            self._agree()
            give_kept(job.model)
            result = eagerly(
                *job.trained,
                tuple(map(_whole_argument, batch)),
                seed=job.seed,
                step=num_steps,
                precision=job.layout.precision,
            )
            if cut:
                self._gradients_lost = any(p.grad is not None for p in job.model.parameters())
            note_step(job.optimizer)
        after = _versions(python)
        python.changed |= {name for name, one in after.items() if before.get(name) != one}
        leaves, spec = flattened(returnable(result))
        return [[x.detach() if isinstance(x, Tensor) else x for x in leaves], spec]

    def not_over(self) -> None:
        """The next call takes first steps, too; raises if it would miss gradients of this one."""
        if self._gradients_lost:
            one = optimizers_of(self._job.optimizer)[0]
            raise CaptureError(
                f"{type(one).__name__} steps for the first time with gradients of several calls",
                why="weights lie in shards already, and the gradients of this call were of whole ones",
                fix="call this step before any other on its model",
            )

    def over(self) -> None:
        """The next call is captured: its program knows of the remaining gradients."""
        note_eager_call(self._job.model)
        for p in self._job.model.parameters():
            p.grad = None

    def _refuse(self) -> None:
        job = self._job
        refuse_open(job.model)
        if job.layout.num_replicas > 1:
            _refuse_apart(self._ahead.what, job.layout)
        if not is_deferred(job.model):
            return
        if job.layout.num_ranks > 1:
            raise CaptureError(
                f"{self._ahead.what}, and the model has no values yet",
                why="such a step runs eagerly, with whole weights on each rank",
                fix="build the model on a real device",
            )
        settle(job.model, None, Residence(Layout()), run_device(job.model), job.seed)
        adopt(job.model, job.optimizer)

    def _whole(self) -> contextlib.AbstractContextManager[Any]:
        """Context with whole weights, which another step may have sharded."""
        if self._home is None:
            return contextlib.nullcontext()
        self._home.note_optimizers(self._job.optimizer)
        return Whole(self._job.model, slots=True)

    def _agree(self) -> None:
        """Broadcast rank 0's values."""
        if self._job.layout.num_ranks == 1:
            return
        state = state_of(self._job.model, self._job.optimizer)
        check_order([f"state {s.name}: {list(s.tensor.shape)} {s.tensor.dtype}" for s in state])
        device = run_device(self._job.model)
        for s in state:
            own = s.tensor.detach()
            sent = own.to(device).contiguous()
            broadcast_first(sent)
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)


@contextlib.contextmanager
def first_call_undone(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: tuple[Any, ...],
    seed: int,
    precision: str,
) -> Iterator[None]:
    """Context in which copies have taken a first step of another form; undoes its side effects at the end."""
    if awaiting(optimizer) is None:
        yield
        return
    given = train_step, model, called_optimizers(optimizer), Findings(), arguments_of(batch)
    python, undo = PythonState(*given), Undo()
    with python.restored(), hooks_kept(model):
        try:
            with undo:
                given = train_step, model, optimizer, rebuilt(batch)
                eagerly(*given, seed=seed, step=0, precision=precision)
            note_step(optimizer)
            yield
        finally:
            undo.undo()


def _whole_argument(x: Any) -> Any:
    """An argument without shards: itself where it has none, since the step may change it."""
    if all(whole_of(y) is y for y in tree_leaves(x) if isinstance(y, Tensor)):
        return x
    return tree_map_only(Tensor, whole_of, x)


def _versions(python: PythonValues) -> dict[str, Any]:
    """By name of an entry, a version of its value that reveals changes."""
    python.walk()
    state = python.state
    found: dict[str, Any] = {}
    for name, entry, value in named(state.tables):
        if value is not MISSING and not _is_activation(state, entry, value):
            found.setdefault(name, _version(value))
    return found


def _is_activation(state: Any, entry: TableEntry, value: Any) -> bool:
    return isinstance(value, Tensor) and state.holds_value_of_module(entry)


def _version(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return value if isinstance(value, bool | int | float) else id(value)
