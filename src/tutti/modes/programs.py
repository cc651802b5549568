"""The programs of one step: finds or compiles the program of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutti.calls.accelerate_schedulers import refuse_schedulers_of_processes
from tutti.calls.changing_leaves import ChangingLeaves, Trial, are_replaced, are_tried
from tutti.calls.guards import MOST_WAYS, no_way
from tutti.calls.numbers import Numbers
from tutti.calls.signature import Signatures
from tutti.calls.surroundings import is_cast, without_autocast
from tutti.capture.handed import ArgumentsAhead
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.read_places import Place
from tutti.capture.state.first_form import SlotsAhead
from tutti.capture.state.lift import state_of
from tutti.capture.state.tensor_attributes import refuse_in_batch
from tutti.capture.unread import LeafRead
from tutti.execution.collector import rarely_collected
from tutti.execution.cuda_graph import op_by_op
from tutti.execution.measure import peak_nbytes
from tutti.graph.edits.quick import quickly_written
from tutti.modes.compiled_program import Compiled
from tutti.modes.known_programs import KnownPrograms
from tutti.modes.mode import Mode
from tutti.state.residence import run_device
from tutti.torch_private.pytrees import tree_flatten, tree_unflatten
from tutti.user_lines import OnlyUsersFrames

# A program, and the numbers of a call.
Found = tuple[Compiled[Any], Mapping[str, float]]
Call = tuple[list[Any], Any, tuple[Any, ...]]  # the leaves of its batch, their form, and the batch


class Programs:
    """The programs that `mode` has compiled for one step, by the signature of calls.

    The arguments of a call are the `leaves` of its batch, their `form`, and the `batch` itself.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode, self._running = mode, mode.running
        job = mode.running.job
        asked = mode.running.python.findings.gradients
        self._signatures = Signatures(job.model, mode.running.optimizers, asked)
        self._numbers = Numbers(job.optimizer)
        self.known = KnownPrograms(mode.signature)
        self._changing = ChangingLeaves()
        self._num_made = 0
        self.ahead: SlotsAhead | None = None

    def call(self, batch: tuple[Any, ...]) -> tuple[Call, Found | None]:
        """A call with `batch`, its program and numbers; None for an eager call, for the reason in `ahead`.

        The arguments that the step gets as they are have become values of it.
        """
        python = self._running.python
        python.draws.begin()
        while True:
            given = python.handed(batch)
            call = (*_flattened(given), given)
            try:
                return call, self._find(*call)
            except ArgumentsAhead as error:
                python.places |= error.places
            except SlotsAhead as error:
                self.ahead = error
                return call, None

    def found(self, leaves: list[Any], form: Any, batch: tuple[Any, ...]) -> Found | None:
        """The program of a call like an eager one, and its numbers; None if it is eager, too."""
        draws = self._running.python.draws
        draws.begin()
        try:
            return self._find(leaves, form, batch)
        except SlotsAhead as error:
            self.ahead = error
            return None
        finally:
            draws.put_back()  # the next call draws

    def played(
        self,
        compiled: Compiled[Any],
        given: Mapping[str, float],
        tensors: list[Tensor],
        *,
        checked: bool,
        measures: bool,
    ) -> list[Any]:
        """`compiled.play`; `measures` its peak memory, without that of captures and of rounds."""
        if not measures and not is_cast():
            return compiled.play(given, tensors, checked=checked)
        if not measures:
            with without_autocast():
                return compiled.play(given, tensors, checked=checked)
        with op_by_op(), without_autocast():
            compiled.measured, returned = peak_nbytes(
                lambda: compiled.play(given, tensors, checked=checked),
                run_device(self._running.job.model),
            )
        return returned

    def on_its_way(
        self,
        compiled: Compiled[Any],
        given: Mapping[str, float],
        call: Call,
        returned: list[Any],
        *,
        checked: bool,
        measures: bool,
    ) -> tuple[Compiled[Any], list[Any]]:
        """The program with the branches of this `call`, and its results: if the tensor values that the step
        reads lead to other branches, another program runs, and the first run does not count."""
        tensors = [x for x in call[0] if isinstance(x, Tensor)]
        values: Mapping[Place, float] = {}
        for k in range(MOST_WAYS):
            assert compiled.reads is not None
            values = compiled.reads.values(returned)
            if compiled.reads.holds(given, values):
                self._running.captures.hint(values)
                return compiled, returned
            assumed = compiled.reads.assumed(given, values)
            compiled, given = self._find(*call, assumed=assumed, tries=k == 0)
            returned = self.played(compiled, given, tensors, checked=checked, measures=measures)
            if compiled.reads is None:
                return compiled, returned
        raise no_way(compiled.program.captured, values)

    def _find(
        self,
        leaves: list[Any],
        form: Any,
        batch: tuple[Any, ...],
        assumed: Assumed | None = None,
        *,
        tries: bool = False,
    ) -> Found:
        """The program of this call, compiled if there is none.

        `assumed` are the tensor values that the step has read in a run with other branches. With `tries`, a
        program that reads more of them may be it: that of a loop with more turns.
        """
        leaves = self._changing.with_stand_ins(leaves, form)
        given = self._changing.replaced(leaves, form)
        found, signature = self._known(given, form, assumed, tries)
        if found is not None:
            return found
        trial = self._changing.trial(given, form, signature, self.known.signatures)
        try:
            if trial is not None:
                own, given = given, trial.leaves
                if found := self._tried(trial, own, form, batch, assumed):
                    return found
                given = self._changing.replaced(leaves, form)
                found, _ = self._known(given, form, assumed, tries)
            if found is None:
                found = self._compiled(given, form, batch, assumed)
                self._changing.note_program(given, form)
            return found
        except (ArgumentsAhead, SlotsAhead):
            raise
        except (Exception, LeafRead) as error:
            if not are_tried(given):
                raise
            failed = error
        found, _ = self._known(leaves, form, assumed, tries)
        found = found or self._compiled(leaves, form, batch, assumed)
        self._changing.fail(given, failed, form)
        return found

    def _known(
        self, leaves: list[Any], form: Any, assumed: Assumed | None, tries: bool
    ) -> tuple[Found | None, Any]:
        """The program of a call, if there is one, with its numbers; the signature of the call."""
        signature, numbers = self._called(leaves, form)
        running = self._running
        found = self.known.fitting(signature, numbers, running.python.draws, assumed, tries=tries)
        if found is not None and (drawn := found[0].drawn):
            running.divergence.given(leaves, {**found[1], **drawn.constants}, running.num_steps)
        return found, signature

    def _tried(
        self, trial: Trial, own: list[Any], form: Any, batch: Any, assumed: Assumed | None
    ) -> Found | None:
        """The program of a trial, if it is that of the earlier call, too; `own`: the leaves without trial."""
        modes = [(module, module.training) for module in self._signatures.modules]
        if trial.before is None:
            self._compiled(own, form, batch, assumed)
            trial = replace(trial, before=self.known.signatures[-1])
        found = self._compiled(trial.leaves, form, batch, assumed)
        if trial.is_free or self.known.settle(found[0], trial.before):
            self._changing.keep(trial, form)
            return found
        self._changing.fail(trial.leaves, None, form)
        for module, training in modes:
            module.training = training
        return None

    def _called(self, leaves: list[Any], form: Any) -> tuple[Any, dict[str, float]]:
        """The signature and the numbers of a call."""
        running, version = self._running, self._signatures.version
        python, numbers = running.python.now()
        signature = self._signatures.of(leaves, form, python)
        if self._signatures.version != version:  # other modules have other values
            running.python.walk()
            python, numbers = running.python.now()
            signature = self._signatures.of(leaves, form, python)
        given = self._numbers.of(leaves, numbers)
        running.divergence.given(leaves, given, running.num_steps)
        return signature, given

    def _compiled(
        self, leaves: list[Any], form: Any, batch: tuple[Any, ...], assumed: Assumed | None
    ) -> Found:
        """A new program for a call, and its numbers."""
        running = self._running
        python, numbers = running.python.now()
        signature = self._signatures.of(leaves, form, python)
        given = self._numbers.of(leaves, numbers)
        if are_replaced(leaves):
            batch = tree_unflatten(leaves, form)
        why = self.known.why_another(signature, running.python.other)
        running.divergence.anew = why
        modes = [(module, module.training) for module in self._signatures.modules]
        refuse_in_batch(leaves, running.python.state.names)
        if not running.begun and running.job.layout.num_ranks > 1:
            refuse_schedulers_of_processes(running.optimizers)
        gradients = torch.is_grad_enabled() or bool(running.optimizers)
        with (
            torch.set_grad_enabled(gradients),
            rarely_collected(),
            quickly_written(),
            OnlyUsersFrames(),
        ):
            made = self._mode.compile(batch, self._kind(leaves, form, python), given, assumed)
        made.modes = [(m, m.training) for m, before in modes if m.training != before]
        self._num_made += 1
        made.number = self._num_made
        made.why = why
        # A step that first calls `model.train()` or `eval()` has one program for either mode.
        for module, before in [(m, b) for m, b in modes if m.training != b]:
            module.training = before
        was_traced = not running.captures.is_resized  # else no Python value has changed
        numbers = self._enter(made, leaves, form, walk=was_traced)
        for module, training in made.modes:
            module.training = training
        if not made.program.captured.other_modes:
            numbers = self._enter(made, leaves, form, walk=was_traced)
        if was_traced:
            self.known.note_trace(f"{why}{made.program.captured.reads.hint}")
        self.known.keep_few(made)
        given = running.python.draws.added(self._numbers.of(leaves, numbers), made.drawn)
        assert given is not None
        running.divergence.given(leaves, {**given, **made.drawn.constants}, running.num_steps)
        return made, given

    def ended(self, compiled: Compiled[Any], num_steps: int) -> None:
        """Note a call of `compiled`, after `num_steps` others; set `requires_grad` as the step leaves it."""
        self.known.last, compiled.last_call = compiled, num_steps
        compiled.program.captured.gradients.note_call()
        if trained := compiled.program.captured.trained:
            job = self._running.job
            for s in state_of(job.model, job.optimizer):
                if s.name in trained:
                    s.tensor.requires_grad_(trained[s.name])

    def _enter(
        self, made: Compiled[Any], leaves: list[Any], form: Any, *, walk: bool
    ) -> dict[str, float]:
        """Let later calls like this one find its program; the current numbers."""
        if walk:
            self._running.python.walk()
        python, numbers = self._running.python.now()
        self._running.captures.enter(self._kind(leaves, form, python))
        self.known.enter(made, self._signatures.of(leaves, form, python))
        return numbers

    def _kind(self, leaves: list[Any], form: Any, python: int) -> Any:
        """The common key of calls that differ only in sizes and inputs."""
        return self._signatures.of(leaves, form, python, sized=False)


def _flattened(batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The leaves of a batch, and its structure; most batches are a few tensors."""
    if all(type(x) is Tensor for x in batch):
        return list(batch), len(batch)
    return tree_flatten(batch)
