"""`find_place`: the compute shardings of parameters over `tensor` and `expert` that nobody has given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from tutti.capture.captured import Captured
from tutti.graph.ops.boundary import shard_as_op
from tutti.hardware.cluster import Cluster
from tutti.layout import Layout, Sharding
from tutti.planner.placement.axis_search import Search, search_axis
from tutti.planner.placement.candidate_cost import Costing, PlacedCost
from tutti.planner.placement.counted_programs import CountedPrograms
from tutti.planner.placement.decisions import Splits, needs_wide_layers, place_of
from tutti.planner.placement.dim_groups import dim_groups
from tutti.planner.placement.patterns import patterns_of, template
from tutti.planner.placement.placement_words import nothing_words, token_words, words_of
from tutti.planner.placement.reduced import ReducedStep, reduced
from tutti.planner.placement.token_search import with_tokens_split
from tutti.planner.placement.yardstick import Yardstick
from tutti.propagate.batch_dim import Dims
from tutti.propagate.plan import Place

# The axes whose splits a search finds, in the order in which it decides.
AXES_FOUND = ("expert", "tensor")


@dataclass(frozen=True)
class Placement:
    """Compute shardings that a search has found.

    Args:
        place: entries as of `tutti.distribute(place=...)`, without those given.
        words: what they split, and the collectives that this takes.
        seconds: of a step of one rank, predicted, without overlap and without bubbles of a pipeline.
        whole_seconds: the same with every weight whole.
        sent_nbytes: bytes that a rank sends over the axes found.
        memory_nbytes: state, gradients and activations of a rank, of all pipeline stages.
        num_counted: programs that were partitioned to count costs.
    """

    place: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    seconds: float = 0.0
    whole_seconds: float = 0.0
    sent_nbytes: float = 0.0
    memory_nbytes: float = 0.0
    num_counted: int = 0


def free_axes(captured: Captured, layout: Layout, given: Place) -> tuple[str, ...]:
    """The axes of a layout that split weights and that neither `given` nor a `shard_as` names."""
    hints = [str(n.args[1]) for n in captured.graph.nodes if n.target is shard_as_op]
    named = " ".join([*given.values(), *hints]).replace("+", " ").replace(",", " ").split()
    return tuple(a for a in AXES_FOUND if layout.axes.get(a, 1) > 1 and a not in named)


def found_seeds(
    captured: Captured,
    layout: Layout,
    given: Place,
    *,
    known: Mapping[str, Sharding] | None = None,
    dims: Dims | None = None,
    on_processors: bool | None = None,
    ready: Place | None = None,
    memory_nbytes: float | None = None,
    programs: CountedPrograms | None = None,
) -> dict[str, Any]:
    """The arguments `found` and `words` of `plan` for a run: what nobody has given, by `find_place`.

    With servers there are none: workers have the weights whole unless `place` says otherwise. Processors
    (`on_processors`; by default as the step was captured) keep tokens whole: each collective is a meeting of
    ranks, and costs more than the norms that it would split. `ready` is what a plan has found before;
    `memory_nbytes` bounds the search; `programs` are those of layouts with the same axes of weights.
    """
    if layout.server:
        return {}
    if ready is not None:
        return {"found": ready, "words": [f"{n}: {text}, by the plan" for n, text in ready.items()]}
    if on_processors is None:
        on_processors = not _is_on_gpu(captured)
    made = find_place(
        captured,
        layout,
        given=given,
        known=known,
        dims=dims,
        memory_nbytes=memory_nbytes,
        splits_tokens=not on_processors,
        programs=programs,
    )
    return {"found": made.place, "words": made.words}


def find_place(
    captured: Captured,
    layout: Layout,
    *,
    given: Place | None = None,
    known: Mapping[str, Sharding] | None = None,
    dims: Dims | None = None,
    axes: tuple[str, ...] | None = None,
    cluster: Cluster | None = None,
    memory_nbytes: float | None = None,
    splits_tokens: bool = True,
    programs: CountedPrograms | None = None,
) -> Placement:
    """The compute shardings of least predicted time, for parameters without one.

    The result depends on the graph, the layout and the arguments alone: it is the same on every rank. It
    needs no process group and reads no values.

    Args:
        captured: a step as captured, before `plan`; stays unchanged.
        layout: of the run.
        given: the user's `place`; its parameters keep their shardings.
        known: compute shardings of an earlier step on the same model; they stay, too.
        dims: the dims of samples, if told.
        axes: those to search, of `expert` and `tensor`; by default those that `given` does not name.
        cluster: weighs bytes and arithmetic; by default rates of an H100 host, without latencies.
        memory_nbytes: of a device, for state, gradients and activations; the search exceeds it only if
            every placement does, and then as little as possible.
        splits_tokens: `tensor` may split tokens between the blocks.
        programs: of `programs_of` with the same arguments, for a layout with the same axes of weights; by
            default of this search alone.

    Raises:
        PlanError: the cluster's device has no peak of a matmul's dtype.
        ShardingError: `given` does not fit the parameters.
    """
    given, known = given or {}, known or {}
    if axes is None:
        axes = free_axes(captured, layout, given)
    axes = tuple(a for a in axes if layout.axes.get(a, 1) > 1)
    names = [n for n, kind in captured.kinds.items() if kind == "parameter"]
    fixed = {n for n in names if n in known or any(fnmatchcase(n, p) for p in given)}
    if not axes or len(fixed) == len(names):
        return Placement()
    if programs is None:
        rest: Any = {"given": given, "known": known, "dims": dims, "cluster": cluster}
        programs = programs_of(captured, layout, axes=axes, **rest)
    costing = Costing(captured, programs, layout, Yardstick.of(layout, cluster))
    splits: Splits = {}
    found: list[Search] = []
    bound = math.inf if memory_nbytes is None else memory_nbytes
    for axis in axes:
        found.append(search_axis(costing, axis, splits, fixed, bound_nbytes=bound))
        splits = found[-1].splits
    tokens: dict[str, str] = {}
    # `seq` splits the tokens already.
    seq = layout.axes.get("seq", 1)
    if splits_tokens and found[-1].axis == "tensor" and seq == 1:
        found[-1], tokens = with_tokens_split(costing, found[-1], bound_nbytes=bound)
    return _placement(captured, costing, found, tokens)


def _is_on_gpu(captured: Captured) -> bool:
    vals = (node.meta["val"] for node in captured.placeholders.values())
    return any(isinstance(val, Tensor) and val.device.type == "cuda" for val in vals)


def programs_of(
    captured: Captured,
    layout: Layout,
    *,
    given: Place | None = None,
    known: Mapping[str, Sharding] | None = None,
    dims: Dims | None = None,
    axes: tuple[str, ...] | None = None,
    cluster: Cluster | None = None,
) -> CountedPrograms:
    """The programs that `find_place` counts, for several searches; the arguments are its own.

    Of the layout the axes of the weights count, `expert` and `tensor`, and no other word.
    """
    given, known = given or {}, known or {}
    if axes is None:
        axes = free_axes(captured, layout, given)
    step = reduced(captured, keeps_all=bool(given) or bool(known))
    ways = max((layout.axes.get(a, 1) for a in axes), default=1)
    if needs_wide_layers(dim_groups(step, ways)):  # neighbors need different shardings
        step = reduced(captured, wide=True)
    return _counted(step, layout, given, known, dims, cluster)


def cost_of(
    captured: Captured,
    layout: Layout,
    place: Place,
    *,
    dims: Dims | None = None,
    cluster: Cluster | None = None,
) -> PlacedCost:
    """The predicted cost of a placement by hand, by the measure of `find_place`.

    Args:
        captured: a step as captured; stays unchanged.
        layout: of the run.
        place: as for `tutti.distribute`; parameters without an entry follow the rest.
        dims: the dims of samples, if told; cluster: as for `find_place`.

    Raises:
        ShardingError: `place` does not fit the parameters.
    """
    programs = _counted(reduced(captured, keeps_all=True), layout, place, {}, dims, cluster)
    return Costing(captured, programs, layout, Yardstick.of(layout, cluster)).of({})


def _counted(
    step: ReducedStep,
    layout: Layout,
    given: Place,
    known: Mapping[str, Sharding],
    dims: Dims | None,
    cluster: Cluster | None,
) -> CountedPrograms:
    own = Layout(axes={a: layout.axes[a] for a in AXES_FOUND if layout.axes.get(a, 1) > 1})
    inputs = set(step.captured.inputs)
    dims = None if dims is None else {n: d for n, d in dims.items() if n in inputs}
    kernel = Yardstick.of(layout, cluster).kernel
    return CountedPrograms(step, own, kernel, given=given, known=known, dims=dims)


def _placement(
    captured: Captured,
    costing: Costing,
    found: list[Search],
    tokens: dict[str, str],
) -> Placement:
    step = costing.step
    own = place_of(found[-1].splits, costing.num_dims)
    none, last = found[0].found.none, costing.of(own | tokens)
    every = {m: text for name, text in own.items() for m in step.members[name]}
    names = [n for n, kind in captured.kinds.items() if kind == "parameter"]
    words = [w for one in found for w in words_of(one, costing) or [nothing_words(one, costing)]]
    words += token_words(tokens, costing.of(own), last) if tokens else []
    return Placement(
        place=patterns_of(every, names) | _of_modules(captured, tokens),
        words=tuple(words),
        seconds=last.seconds,
        whole_seconds=none.seconds,
        sent_nbytes=last.sent_nbytes,
        memory_nbytes=last.memory_nbytes,
        num_counted=costing.programs.num_counted,
    )


def _of_modules(captured: Captured, tokens: Mapping[str, str]) -> dict[str, str]:
    """The entries for modules of the whole step: those of the reduced one stand for equal layers."""
    texts = {template(name): text for name, text in tokens.items()}
    outputs = [m for n in captured.graph.nodes for m in n.meta.get("output_of", ())]
    modules = list(dict.fromkeys(outputs))
    every = {m: texts[template(m)] for m in modules if template(m) in texts}
    return patterns_of(every, modules)
