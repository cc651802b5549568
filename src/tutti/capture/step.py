"""Capture: one plain training step becomes one functional graph, its state lifted by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import tutti.capture.python.outside_kept  # noqa: F401  # which registers itself for trial steps
from tutti.capture.batch import read_refused, taken
from tutti.capture.captured import Captured
from tutti.capture.forms import flattened
from tutti.capture.handed import (
    ArgumentsAhead,
    arguments_of,
    kinds_in,
)
from tutti.capture.lifted_step import LiftedStep
from tutti.capture.precision import refuse_other_weights
from tutti.capture.python.appended import TraceAgain
from tutti.capture.python.assumed_values import Assumed
from tutti.capture.python.findings import Findings
from tutti.capture.python.inputs import fake_mode
from tutti.capture.python.loop_reads import EndlessLoop
from tutti.capture.python.other_ways import OtherWays
from tutti.capture.python.outside import refuse_written
from tutti.capture.python.python_state import PythonState
from tutti.capture.python.read_values import (
    ITEM,
)
from tutti.capture.python.sizes import FreeSizes
from tutti.capture.python.symbols import SYMBOLS, looked_at_by_ops, size_refused
from tutti.capture.second_trace.functional import functional_graph
from tutti.capture.spelling.canonical import canonicalize
from tutti.capture.state.first_form import make_slots
from tutti.capture.state.first_options import refuse_first_options
from tutti.capture.state.found_gradients import note_found
from tutti.capture.state.kept_gradients import KeptGradients
from tutti.capture.state.left_modes import HooksBefore
from tutti.capture.state.lift import (
    called_optimizers,
    state_of,
)
from tutti.capture.state.rebound import refuse_read
from tutti.capture.state.tensor_attributes import refuse_in_batch, refuse_kinds
from tutti.capture.substitutes.sparse import dense, refuse_sparse_constants
from tutti.capture.unexpected import named, refuse_untraced
from tutti.capture.unread import LeafRead, read_in, with_stand_ins
from tutti.capture.written_arguments import refused_write
from tutti.graph.ops.late_errors import make_late
from tutti.torch_private.tracing import without_code
from tutti.user_lines import quoted

aten = torch.ops.aten


@named()
def capture(
    train_step: Callable[..., Any],
    model: nn.Module,
    optimizer: Any,
    batch: Sequence[Any],
    *,
    precision: str = "fp32",
    findings: Findings | None = None,
    renewed: Mapping[int, Tensor] | None = None,
    note_gradients: bool = False,
    assumed: Assumed | None = None,
    free: FreeSizes | None = None,
) -> Captured:
    """Trace `train_step(model[, optimizer], *batch)` with fake tensors.

    It changes no real value, except that it creates missing slots of the optimizer.
    `precision` is the layout's compute dtype of the forward. `findings` holds the knowledge of earlier traces
    about the step's Python numbers; `renewed` maps the id of a former state tensor to its successor.
    With `note_gradients` it notes the values that optimizers read from `.grad` (`found_gradients.noted`).
    `assumed` has the values of tensors that the step reads in Python: the trace takes their branches.
    With `free` sizes the graph is not canonical yet: `resized.Resizable` makes graphs of given sizes from it.

    Raises `LayoutError` for weights that do not fit `precision`, and `CaptureError` with the user's line
    for a step that capture does not support: a value written into a text, a shape that depends on values.
    """
    findings = Findings() if findings is None else findings
    make_slots(optimizer)
    batch = dense(taken(batch))
    given_leaves, spec = flattened(batch)
    leaves = with_stand_ins(given_leaves)

    findings.kinds |= dict.fromkeys(kinds_in(batch))
    given = train_step, model, called_optimizers(optimizer), findings, arguments_of(batch)
    walked = [PythonState(*given)]
    walked[0].expect_changes()

    def python() -> PythonState:
        """The state of the values now: each trace starts with its own."""
        if walked:
            return walked.pop()
        return PythonState(*given)

    begun = assumed or Assumed()

    def prepared(assumed: Assumed = begun) -> LiftedStep:
        mode = fake_mode(assumed, findings.loops, sized=free is not None)
        state, reached = state_of(model, optimizer), python()
        refuse_kinds(state, reached.names)
        refuse_in_batch(leaves, reached.names)
        rest = (train_step, model, optimizer, state, leaves, spec, mode, precision)
        made = LiftedStep(*rest, reached, renewed or {}, free)
        made.note_gradients = note_gradients
        return made

    with without_code():  # only the graphs matter: PyTorch makes no code for them
        hooks = HooksBefore(model)
        try:
            lifted, traced = _traced(prepared, findings, hooks)
        except BaseException as error:
            hooks.put_back()
            read = read_in(leaves, error)
            if read is None:
                raise
            num_args = 1 if optimizer is None else 2
            value = leaves[read], given_leaves[read], error
            raise read_refused(train_step, num_args, tuple(batch), *value) from None
        refuse_sparse_constants(traced)
        functional = functional_graph(traced, lifted.inputs, lifted.mode)
    refuse_untraced(functional)
    refuse_first_options(lifted.options)
    captured = _collect(functional, lifted)
    lifted.grads.refuse_used([captured.graph.output_node()])
    lifted.refuse_constants(functional, lifted.state)
    weights = {
        s.name: s.tensor.dtype
        for s in lifted.state
        if s.kind == "parameter" and s.tensor.is_floating_point()
    }
    refuse_other_weights(precision, weights, frozenset(captured.updated))
    if free is None:
        canonicalize(captured.graph, captured.owner, lifted.mode)
    refuse_read(captured.placeholders, lifted.sharing)
    findings.gradients.update(captured.gradients.answers)
    return captured


def _traced(
    prepared: Callable[..., LiftedStep], findings: Findings, hooks: HooksBefore
) -> tuple[LiftedStep, fx.GraphModule]:
    """A trace in which every number that the step changes is an input.

    If a trace with a number as an input fails, it traces with the number as a constant; if a guessed branch
    fails (a loss that is not finite), it takes the other one. Each begins with the same `hooks`.
    """
    assumed: list[Assumed] = []
    ways, failed = OtherWays(), None
    while True:
        hooks.put_back()
        lifted = prepared(*assumed)
        try:
            traced = lifted.traced()
        except TraceAgain:
            continue
        except (EndlessLoop, ArgumentsAhead):
            raise
        except (Exception, SystemExit) as error:
            if (other := ways.after(error, lifted.symbols)) is not None:
                assumed = [other]
            elif findings.expect_draws(lifted.draws.found) or findings.fix(lifted.suspects):
                ways = OtherWays()
            elif findings.fix_draws(lifted.draws.inputs.values()):
                ways, failed = OtherWays(), error
            else:
                raise ways.reason(error)  # noqa: B904  # mostly this error itself
            continue
        if findings.expect_draws(lifted.drawn.numbers):
            continue
        numbers = {n.name: n for n in lifted.python.numbers}
        wanted = {*numbers, *lifted.free_integers, *lifted.draws.inputs, str(ITEM)}
        looked_at = looked_at_by_ops(traced, lifted.names, wanted, lifted.free_symbols)
        if sizes := looked_at.keys() & lifted.free_integers.keys():
            raise LeafRead(lifted.free_integers[min(sizes)])
        if str(ITEM) in looked_at:
            raise size_refused(looked_at[str(ITEM)])
        new = lifted.changed - findings.varying - findings.fixed - {h.name for h in lifted.hypers}
        draws = lifted.draws.inputs
        if looked_at:
            findings.fix_draws(draw for name, draw in draws.items() if name in looked_at)
            given = (numbers[name] for name in looked_at if name not in draws)
            findings.fixed |= {entry.name for number in given for entry in number.entries}
        elif new:
            findings.varying |= new
        elif texts := lifted.numbers_of_texts(traced):
            lifted.refuse_texts(texts - numbers.keys())
            findings.fixed |= {e.name for name in texts for e in numbers[name].entries}
        else:
            lifted.drawn.refuse_read(failed)
            with contextlib.suppress(TraceAgain):
                lifted.settle(traced)
                lifted.lift_outside(traced)
                return lifted, traced


def _collect(functional: fx.GraphModule, lifted: LiftedStep) -> Captured:
    """Final `copy_` nodes into inputs become the new state values of the output."""
    graph = functional.graph
    names = dict(zip([n for n in graph.nodes if n.op == "placeholder"], lifted.names, strict=True))
    updates: dict[str, fx.Node] = {}
    lines: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in names:
            updates[names[node.args[0]]] = node.args[1]
            lines[names[node.args[0]]] = node.args[1].meta.get("source", "")
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    kinds = lifted.kinds
    written = [n for n in updates if kinds[n] == "batch"]
    if written:
        number = int(written[0].rpartition(".")[2])
        lifted.hand_over_written(number)
        name = lifted.name_in_call(number)
        raise refused_write(name, quoted(lines[written[0]]))
    output = graph.output_node()
    returned = (
        list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
    )
    at = len(returned) - len(lifted.found) - len(lifted.reads)
    note_found(zip(lifted.found, returned[at:], strict=False))
    del returned[at : at + len(lifted.found)]
    updated = [n for n in lifted.names if n in updates]
    refuse_written(lifted.outside, updated)
    output.args = ((returned, [updates[n] for n in updated]),)
    for node, name in names.items():
        node.meta["name"], node.meta["kind"] = name, kinds[name]
    assert lifted.returned is not None
    if lifted.reads:
        make_late(graph, SYMBOLS)
    return Captured(
        graph=graph,
        owner=functional,
        inputs=lifted.names,
        kinds=kinds,
        state=lifted.state,
        updated=updated,
        returned=lifted.returned,
        mode=lifted.mode,
        guards=lifted.symbols.conditions(lifted.reads),
        numbers=lifted.python.numbers,
        effects=lifted.effects,
        num_returned=lifted.num_returned,
        outside=lifted.outside,
        reads=lifted.reads,
        trained=lifted.trained,
        other_modes=lifted.other_modes,
        not_kept=lifted.not_kept,
        changes=lifted.changes,
        gradients=KeptGradients.of(lifted.grads.ends, lifted.grads.answers, lifted.places),
        drawn=lifted.drawn,
    )
