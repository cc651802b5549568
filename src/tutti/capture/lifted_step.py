"""The step as a function of its state, its hyper-parameters and its batch, traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.capture.batch import argument_with, called, name_of
from tutti.capture.forms import flattened, form_of, returnable
from tutti.capture.handed import (
    ArgumentsAhead,
    Changes,
    Containers,
    holds_written,
)
from tutti.capture.one_process import communicating_ops, one_process
from tutti.capture.precision import computing
from tutti.capture.python.begun_trace import BegunTrace, say_lost
from tutti.capture.python.constant_selections import SELECTIONS
from tutti.capture.python.conversions import conversions_read
from tutti.capture.python.drawn_numbers import Drawn, Draws
from tutti.capture.python.effects import Effect
from tutti.capture.python.fake_checks import constants_are_not_fake
from tutti.capture.python.findings import Number
from tutti.capture.python.held_values import TableEntry
from tutti.capture.python.host_random import host_values_watched
from tutti.capture.python.host_values import values_unknown
from tutti.capture.python.inputs import fake, fakes, symbol
from tutti.capture.python.kinds import kinds_of_fakes
from tutti.capture.python.left_values import (
    LeftTrace,
    LeftValue,
    ModuleTables,
    are_alike,
    have_same_results,
    refuse_kept,
    refuse_lost,
)
from tutti.capture.python.not_kept import NotKept
from tutti.capture.python.optimizer_min_max import min_max_in_graph
from tutti.capture.python.outside import lift_outside, read_by
from tutti.capture.python.python_state import PythonState
from tutti.capture.python.read_once import read_once_watched
from tutti.capture.python.read_values import (
    Reads,
    Symbols,
    held,
    symbols_stay,
)
from tutti.capture.python.sizes import FreeSizes
from tutti.capture.python.symbols import SYMBOLS, on_symbols
from tutti.capture.refusals import explained
from tutti.capture.regions import watching
from tutti.capture.second_trace.functional import functional_graph
from tutti.capture.state.compiled import nothing_compiled
from tutti.capture.state.first_options import options_watched
from tutti.capture.state.found_gradients import Found, found_gradients
from tutti.capture.state.free_numbers import is_free_number
from tutti.capture.state.gradient_hooks import hooked
from tutti.capture.state.gradients import Gradients, watched_gradients
from tutti.capture.state.kept_gradients import THERE, found_by, places_of
from tutti.capture.state.left_modes import Modes, begin_trained, left_trained
from tutti.capture.state.lift import (
    StateTensor,
    hypers_of,
    optimizers_of,
    swapped,
)
from tutti.capture.state.models import wrappers_open
from tutti.capture.state.new_slots import no_new_slots
from tutti.capture.state.rebound import assignments_noted, data_written, take_over
from tutti.capture.state.shared_names import refuse_shared_names
from tutti.capture.state.tensor_attributes import TensorAttributes
from tutti.capture.substitutes.other_forms import OTHER_FORMS, in_other_forms
from tutti.capture.substitutes.sparse import dense_gradients
from tutti.capture.unread import LeafRead, refuse_reads
from tutti.errors import CaptureError
from tutti.torch_private.fake_tensors import FakeTensorMode
from tutti.torch_private.pytrees import TreeSpec, tree_unflatten
from tutti.torch_private.symbolic import expression_of
from tutti.torch_private.tracing import trace
from tutti.user_lines import quoted

aten = torch.ops.aten


class LiftedStep:
    """The step as a function of its state, hyper-parameters and batch, on fake tensors."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        optimizer: Any,
        state: list[StateTensor],
        leaves: list[Any],
        spec: TreeSpec,
        mode: FakeTensorMode,
        precision: str,
        python: PythonState,
        renewed: Mapping[int, Tensor],
        free: FreeSizes | None = None,
    ) -> None:
        self.precision, self.python, self.renewed = precision, python, renewed
        self.train_step, self.model, self.optimizer = train_step, model, optimizer
        self.state, self.leaves, self.spec, self.mode = state, leaves, spec, mode
        self.hypers = hypers_of(optimizer)
        refuse_shared_names(state, self.hypers)
        self.number_leaves = [i for i, x in enumerate(leaves) if is_free_number(x)]
        self.tensor_leaves = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        found = python.findings
        self.draws = Draws(found.draws, found.constant_draws, python.tables)
        self.drawn = Drawn()
        self.names = (
            [s.name for s in state]
            + [h.name for h in self.hypers]
            + [n.name for n in python.numbers]
            + [f"number.{k}" for k in range(len(self.number_leaves))]
            + [*self.draws.values]
            + [f"batch.{k}" for k in range(len(self.tensor_leaves))]
        )
        self.inputs = (
            [fake(s.tensor, mode) for s in state]
            + [symbol(h.name, h.value, mode) for h in self.hypers]
            + [symbol(n.name, n.value, mode) for n in python.numbers]
            + [symbol(f"number.{k}", +leaves[i], mode) for k, i in enumerate(self.number_leaves)]
            + [symbol(name, x, mode) for name, x in self.draws.values.items()]
            + fakes([leaves[i] for i in self.tensor_leaves], mode, free)
        )
        self.free_symbols = frozenset(free.symbols.values()) if free else frozenset[Any]()
        self.returned: TreeSpec | None = None
        self.before: list[LeftValue] = []  # by another trace
        self.left: list[LeftValue] = []  # in buffers that were None
        self.lost: list[LeftValue] = []
        self.with_tensors: list[tuple[Effect, LeftValue]] = []
        self.resized: list[tuple[str, int, int]] = []
        self.rewritten: list[tuple[str, int, int]] = []
        self.plain: list[LeftValue] = []
        self.added: list[LeftValue] = []
        self.not_kept: list[NotKept] = []
        self.sharing: list[str] = []  # state that has a weight's memory after the step
        self.effects: list[Effect] = []
        self.changed: set[str] = set()
        self.num_returned = 0
        self.outside: dict[str, TableEntry] = {}
        # The parameters with whose gradients the trace starts: of an earlier call, and of this one.
        self.begun = self.ahead = frozenset[str]()
        self.grads: Gradients
        self.note_gradients = False
        self.trained: dict[str, bool] = {}
        self.other_modes = False
        self.found: Found = {}
        self.changes = Changes()
        self.reads = Reads()
        self.places = places_of(model, state)
        self.gradients = found_by(self.places)

    @property
    def symbols(self) -> Symbols:
        """The numbers of the trace."""
        assert isinstance(self.mode.shape_env, Symbols)
        return self.mode.shape_env

    @property
    def free_integers(self) -> dict[str, int]:
        """By input name, the positions of integers among the leaves of the batch that are inputs."""
        named = {f"number.{k}": i for k, i in enumerate(self.number_leaves)}
        return {name: i for name, i in named.items() if isinstance(self.leaves[i], int)}

    @property
    def suspects(self) -> Sequence[Number]:
        """After a failed trace, the numbers to make constants first: those of which Python has asked a hash,
        or all."""
        given = dict(zip(self.names, self.inputs, strict=True))
        hashed = self.symbols.hashed
        numbers = self.python.numbers
        return [n for n in numbers if expression_of(given[n.name]) in hashed] or numbers

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each input by name."""
        kinds = {s.name: s.kind for s in self.state} | {h.name: "hyper" for h in self.hypers}
        kinds |= dict.fromkeys(
            (*(n.name for n in self.python.numbers), *self.draws.values), "number"
        )
        return {n: kinds.get(n, n.partition(".")[0]) for n in self.names}

    def traced(self) -> fx.GraphModule:
        self.tables = ModuleTables(self.model)
        try:
            traced = self.trace()
            while wanted := self.grads.wanted:
                self.begun |= wanted
                self.tables.put_back()
                traced = self.trace()
            return self._for_later_calls(traced) if self.grads.expected else traced
        finally:
            self.tables.put_back()

    def _for_later_calls(self, traced: fx.GraphModule) -> fx.GraphModule:
        """A trace that starts with gradients of this call, too; `traced` if this call needs another one.

        Raises `CaptureError` for a step that depends on their values.
        """
        known, guards, now = dict(vars(self)), list(self.symbols.guards), self._call(traced)
        answers, later = self.grads.answers, traced
        while self.grads.wanted or self.grads.expected:
            self.begun |= self.grads.wanted
            self.ahead |= self.grads.expected - self.begun
            self.tables.put_back()
            later = self.trace()
        if not any((name, THERE) in answers for name in self.ahead):
            return later
        if are_alike(now, self._call(later)):
            return later
        functional = functional_graph(later, self.inputs, self.mode)
        written = [n for n in functional.graph.nodes if n.target is aten.copy_.default]
        self.grads.refuse_used([functional.graph.output_node(), *written])
        vars(self).update(known)
        self.symbols.guards[:] = guards
        return traced

    def settle(self, traced: fx.GraphModule) -> None:
        """Drop the effects that no call reads; refuse values that the next call reads and cannot have."""
        if lost := [*self.lost, *self.added]:
            first, later = self._call(traced), self._later_trace(lost)
            if later is None:  # the first trace has not failed
                raise lost[0].refused()
            for name, *_ in later.resized:
                self.python.findings.append_to(name)
            refuse_lost(lost, first, later, self.python.findings.used)
            for one in self.lost:
                if one.is_function or not self.python.holds_value_of_module(one.entry):
                    say_lost(one)
                elif one.has_tensors and not one.is_item:
                    self.not_kept.append(NotKept.of(one))
        self._refuse_lengths()
        unread, findings = self._unread(traced), self.python.findings
        values = {id(effect): one for effect, one in self.with_tensors}
        dropped = {i for i in unread if not values[i].has_numbers_alone}
        self._leave_out(traced, dropped)
        self.effects = [replace(e, inspected=id(e) in unread) for e in self.effects]
        for effect, one in self.with_tensors:
            if id(effect) in dropped:
                self.not_kept.append(NotKept.of(one))
        findings.unread |= {values[i].entry.name for i in unread}
        findings.unread |= {x.entry.name for x in self.not_kept}
        findings.unread -= {e.entries[0].name for e in self.effects if not e.inspected}
        # a number that was there before is an input
        findings.unread -= {entry.name for n in self.python.numbers for entry in n.entries}

    def _refuse_lengths(self) -> None:
        """Raise `CaptureError` for a list that the next call makes longer or shorter, too."""
        if not self.rewritten:
            return
        later = self._later_trace(self.plain)
        again = {name for name, *_ in (self if later is None else later).rewritten}
        for one in self.rewritten:
            if one[0] in again:
                raise self.python.findings.refused_length(*one)

    def _unread(self, traced: fx.GraphModule) -> set[int]:
        """The ids of effects with a condition on which neither this call nor the next one depends."""
        state, read = self.inputs[: len(self.state)], read_by(traced)
        still = [
            (effect, one)
            for effect, one in self.with_tensors
            if one.has_any(state)
            or (effect.condition is not None and not any(id(x) in read for x in effect.condition))
        ]
        given = [one.apart_from(self.inputs, self.mode) for _, one in still]
        later = self._later_trace([*given, *self.left]) if still or self.left else None
        if later is None:
            if self.left:
                raise self.left[0].refused()
            return set()
        refuse_kept(self.left, later)
        unread: dict[int, LeftValue] = {}
        for (effect, one), other in zip(still, given, strict=True):
            if not other.is_read(later.traced):
                unread |= {id(effect): other} if effect.condition is not None else {}
            elif one.has_any(state):
                raise one.refused_alias()
        if unread and len(unread) < len(still):
            later = self._later_trace([*unread.values()])
        # Another trace may ask whether a value is there, without a tensor of it.
        return {*unread} if later is not None and are_alike(self._call(traced), later) else set()

    def _call(self, traced: fx.GraphModule) -> LeftTrace:
        effects = tuple((e.name, e.num_leaves) for e in self.effects)
        assert self.returned is not None
        texts = [x for *_, x in self.changes.written if isinstance(x, str)]
        forms = [form_of(self.returned), *(form_of(e.spec) for e in self.effects), texts]
        lengths = tuple(self.resized), forms, tuple(self.rewritten)
        return LeftTrace(traced, self.num_returned, effects, *lengths)

    def numbers_of_texts(self, traced: fx.GraphModule) -> set[str]:
        """The names of input numbers on whose texts the results depend; a label in a log does not count."""
        written = self.symbols.written
        if not written:
            return set()
        first = self._call(traced)
        later = self._later_trace([], other_texts=True)
        if later is not None and have_same_results(first, later):
            return set()
        given = zip(self.names, self.inputs, strict=True)
        numbers = {n: expression_of(x) for n, x in given if isinstance(x, SYMBOLS)}
        return {n for n, x in numbers.items() if x.free_symbols & written}

    def refuse_texts(self, names: set[str]) -> None:
        """Raise `LeafRead` or `CaptureError` for such a number that is not among the step's own."""
        if own := names & self.free_integers.keys():
            raise LeafRead(self.free_integers[min(own)])
        if names:
            raise CaptureError(
                "the step makes a text of a float, and its results depend on the text",
                at=quoted(self.symbols.written_at),
                why="the step is captured once: each call would have the text of this one",
                fix="make the text outside of the step, and hand it over as an argument",
            )

    def _later_trace(
        self, left: Sequence[LeftValue], *, other_texts: bool = False
    ) -> LeftTrace | None:
        """A trace that starts with the values `left`; None if it fails. This object stays as it is.

        With `other_texts` numbers in texts have other values.
        """
        known, guards = dict(vars(self)), list(self.symbols.guards)
        self.before, self.symbols.other_texts = list(left), other_texts
        try:
            return self._call(self.trace())
        except (Exception, SystemExit):
            return None
        finally:
            self.tables.put_back()
            vars(self).update(known)
            self.symbols.guards[:] = guards
            self.symbols.other_texts = False

    def trace(self) -> fx.GraphModule:
        with (
            self.python.restored(),
            kinds_of_fakes(self.python.scopes),
            conversions_read(self.python.scopes),
            self.mode,
            watching(self.model) as watch,
            explained(),
            host_values_watched(self.python.tables, self.draws),
            in_other_forms(),
            on_symbols(),
            values_unknown(),
            constants_are_not_fake(),
            symbols_stay(self.symbols),
        ):
            table = {**communicating_ops(), **OTHER_FORMS, **SELECTIONS}
            self.symbols.begin(LiftedStep.trace.__code__, lambda: watch.num_nodes)
            traced = trace(self._run, self.inputs, table)
        self.reads, self.drawn = held(traced, self.symbols), self.draws.drawn
        return traced

    def _run(self, *flat: Any) -> list[Any]:
        state = dict(zip([id(s.tensor) for s in self.state], flat, strict=False))
        names = [h.name for h in self.hypers] + [n.name for n in self.python.numbers]
        symbols = dict(zip(names, flat[len(self.state) :], strict=False))
        leaves = list(self.leaves)
        rest = [*flat[len(self.state) + len(names) :]]
        first = len(self.number_leaves)
        self.draws.begin([rest.pop(first) for _ in self.draws.values])
        for i, x in zip([*self.number_leaves, *self.tensor_leaves], rest, strict=True):
            leaves[i] = x
        batch = tree_unflatten(leaves, self.spec)
        containers = Containers(batch)
        begin_trained(self.state, flat)
        modes = Modes()
        with (
            modes.watched(),
            swapped(self.model, self.optimizer, state, symbols) as places,
            no_new_slots(self.model, self.optimizer),
            data_written() as shared,
            assignments_noted() as assigned,
            hooked(self.state, flat),
            watched_gradients(
                self.state, flat, self.gradients, self.begun, self.ahead, self.optimizer
            ) as self.grads,
        ):
            args = (self.model,) if self.optimizer is None else (self.model, self.optimizer)
            tensors = [s.tensor for s in self.state]
            renewed = state | self._renewed(flat)
            begun = BegunTrace(self.python, symbols, renewed, self.mode, self.before, tensors)
            attributes = TensorAttributes(self.state, flat)
            with (
                attributes.on_fakes(),
                min_max_in_graph(self.optimizer),
                computing(self.precision, self.model),
                found_gradients(self.model, wanted=self.note_gradients) as self.found,
                dense_gradients(optimizers_of(self.optimizer)),
                nothing_compiled(),
                wrappers_open(),
                one_process(),
                read_once_watched(self.python.tables),
                options_watched(self.optimizer) as self.options,
            ):
                try:
                    result = called(self.train_step, args, batch)
                finally:
                    containers.put_back()
                attributes.take_back({id(table.find()) for table in self.python.tables})
                self.changes = containers.changes(flat[: len(self.state)])
            self.grads.end()
            self.trained = left_trained(self.state, flat)
            self.other_modes = modes.are_others
            put = {id(x): s for s, x in zip(self.state, flat, strict=False)}
            self.sharing = take_over(places, put, shared, assigned)
            self.tables.refuse_others()
            self.left = self.tables.left(begun.stand_ins)
            self.effects, self.changed = begun.effects(), begun.changed
            self.python.hold(tensors)
            self.with_tensors, self.lost = begun.with_tensors, begun.lost
            self.resized, self.added = begun.resized, begun.added
            self.rewritten, self.plain = begun.rewritten, begun.plain
            self.stand_ins = begun.stand_ins
        out, self.returned = flattened(returnable(result))
        self.num_returned = len(out)
        out += begun.leaves
        refuse_reads(self.leaves, kept=begun.leaves)
        out += self.found.values()
        return list(map(_result, out))

    def _renewed(self, flat: Sequence[Any]) -> dict[int, Any]:
        """By id, the tensors in the trace for former state tensors, which users may still hold."""
        now = {id(s.tensor): x for s, x in zip(self.state, flat, strict=False)}
        return {old: now[id(new)] for old, new in self.renewed.items() if id(new) in now}

    def lift_outside(self, traced: fx.GraphModule) -> None:
        """Make state of the tensors outside that the step reads."""
        given = (traced, self.python.tensors(), self.stand_ins, len(self.state), self.mode)
        state, fakes, self.outside = lift_outside(*given)
        self.python.findings.unread -= {*self.outside}
        at = len(self.state)
        self.names[at:at], self.inputs[at:at] = [s.name for s in state], fakes
        self.state = [*self.state, *state]

    def _leave_out(self, traced: fx.GraphModule, unread: set[int]) -> None:
        """Drop these effects, given by id."""
        output = traced.graph.output_node()
        leaves, at = list(output.args[0]), self.num_returned  # type: ignore[arg-type]
        kept: list[Effect] = []
        for effect in self.effects:
            if id(effect) in unread:
                del leaves[at : at + effect.num_leaves]
            else:
                kept.append(effect)
                at += effect.num_leaves
        self.effects, output.args = kept, (leaves,)

    def hand_over_written(self, number: int) -> None:
        """Raise `ArgumentsAhead` if a tensor of the batch, by its number, is state of an object."""
        place, argument = argument_with(tree_unflatten(self.leaves, self.spec), number)
        if holds_written(argument, self.leaves[self.tensor_leaves[number]]):
            raise ArgumentsAhead([place])

    def name_in_call(self, number: int) -> str:
        """The name of a tensor of the batch, by its number, as the step's signature has it."""
        num_args = 1 if self.optimizer is None else 2
        batch = tree_unflatten(self.leaves, self.spec)
        return name_of(self.train_step, num_args, batch, number)

    def refuse_constants(self, functional: fx.GraphModule, state: list[StateTensor]) -> None:
        """Refuse a parameter reached past the model, which would silently be a constant of the graph."""
        own = {s.tensor.untyped_storage().data_ptr(): s.name for s in state if _has_data(s.tensor)}
        for node in functional.graph.nodes:
            if node.op != "get_attr":
                continue
            value = getattr(functional, node.target)
            if _has_data(value) and value.untyped_storage().data_ptr() in own and value.numel():
                name = own[value.untyped_storage().data_ptr()]
                raise CaptureError(
                    f'the step uses the state "{name}" other than through the model it is given',
                    why="it would be frozen at today's value",
                    fix="reach it through the model argument of the step",
                )


def _result(x: Any) -> Any:
    """A result of the trace; a condition keeps its value, under a guard."""
    if isinstance(x, Tensor):
        return x.detach()
    return bool(x) if isinstance(x, torch.SymBool) else x


def _has_data(x: Any) -> bool:
    from torch.distributed.tensor import DTensor

    if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.device.type == "meta":
        return False
    return type(x) in (Tensor, nn.Parameter) and x.numel() > 0
