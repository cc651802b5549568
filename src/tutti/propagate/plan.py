"""The wanted sharding of every value: seeds from the layout and the user, spread through the graph."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

from torch import Tensor, fx

from tutti.capture.captured import Captured, copied
from tutti.errors import ShardingError
from tutti.graph.edits.edit import Editor, erase_dead
from tutti.graph.ops.boundary import shard_as_op
from tutti.layout import AXES, Layout, Mesh, Segment, Sharding, split_order
from tutti.propagate.batch_dim import (
    BATCH_AXES,
    MOST_WHOLE,
    Dims,
    Unsplit,
    batch_axes,
    candidates,
    has_sequence,
    micro_of,
    split_of,
    warn_of_micro,
    warn_of_uneven,
    warn_of_whole,
    whole_share,
    why_unsplit,
)
from tutti.propagate.boundaries import COMPUTE, Boundary, insert_boundaries
from tutti.propagate.chunks_of_batch import rows_of_chunks
from tutti.propagate.expert_moves import ExpertMoves, insert_moves, movable
from tutti.propagate.factors import axes_of
from tutti.propagate.idle_axes import idle_axes, warn_of_idle
from tutti.propagate.order_of_matmuls import weights_first
from tutti.propagate.order_of_sums import products_first
from tutti.propagate.round_trips import without_round_trips
from tutti.propagate.samples_in_update import keep_samples_split
from tutti.propagate.spread import STRONG, Spread, tensors_of
from tutti.propagate.storage_sharding import (
    PARAMETERS_FROM,
    SLOTS_FROM,
    further_axes,
    slot_like,
    storable,
    with_zero,
)
from tutti.rules import is_tensor_call
from tutti.rules.book import Book
from tutti.rules.decompositions import DECOMPOSITIONS

# Axes that split the weights themselves; the others split only data.
MODEL_AXES = frozenset({"tensor", "expert"})
Place = Mapping[str, str]


@dataclass
class ShardingPlan:
    """A captured graph with the wanted sharding of every value and the storage sharding of all state.

    `compute` and `storage` are by state name; `reasons` says why a tensor is not split further. `held` are
    values whose sharding the user asked for, `patterns` the entry of `place` by weight, `words` describe what
    a search has found for the others. `samples` are the shardings over which the step computes the tensors of
    the batch, `shards` those of the ones that arrive in shards; the others arrive whole. `batch_axes` may
    split the samples. `slots` maps values that move between experts to the experts of their slots.
    """

    captured: Captured
    layout: Layout
    spread: Spread
    boundaries: dict[fx.Node, Boundary]
    compute: dict[str, Sharding] = field(default_factory=dict)
    storage: dict[str, Sharding] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    held: set[fx.Node] = field(default_factory=set)
    patterns: dict[str, str] = field(default_factory=dict)
    unsplit: list[Unsplit] = field(default_factory=list)
    samples: dict[str, Sharding] = field(default_factory=dict)
    shards: Mapping[str, Sharding] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = BATCH_AXES
    slots: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the values' shardings."""
        return self.layout.program_mesh

    @property
    def idle(self) -> list[str]:
        """The axes that split no parameter, no tensor of the batch and no value that the gradients need;
        stored state and its update, which `zero` splits, do not count."""
        wanted = self.spread.wanted.items()
        values = (x for n, x in wanted if n.meta.get("region") in _PASSES and n.op != "placeholder")
        return idle_axes(self.layout, chain(self.compute.values(), self.samples.values(), values))


_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class _Seeds:
    """The shardings of weights from outside: of `place`, of a search, of earlier steps; words about them."""

    place: Place
    found: Place
    known: Mapping[str, Sharding]
    words: tuple[str, ...]
    book: Book


def plan(
    captured: Captured,
    layout: Layout,
    place: Place | None = None,
    *,
    known: Mapping[str, Sharding] | None = None,
    dims: Dims | None = None,
    shards: Mapping[str, Sharding] | None = None,
    found: Place | None = None,
    words: Sequence[str] = (),
    book: Book | None = None,
) -> ShardingPlan:
    """Plan the shardings of all values; rewrites `captured.graph` (boundaries, decompositions).

    `known` are compute shardings of an earlier step on the same model; they stay. `dims` gives the dim of
    samples of each tensor of the batch; the default searches for it, with a warning if that splits little.
    `shards` are the shardings of tensors of the batch that arrive in shards. `found` are entries like those
    of `place` that a search has found, and `words` describe them: the user's come first, and an op that
    cannot take one of them gathers the weight. `book` keeps the rules of calls for further plans of one step.

    Raises `ShardingError` for a batch or a `place` that does not divide, and for patterns that match
    nothing.
    """
    if any(axis in layout.program_mesh for axis in (*BATCH_AXES, "seq")):
        without_round_trips(captured.graph)
    ways = candidates(captured) if dims is None else [dims]
    spare = copied(captured) if len(ways) > 1 else captured
    seeds = _Seeds(place or {}, found or {}, known or {}, tuple(words), book or Book())
    made = _planned(captured, layout, seeds, ways[0])
    if len(ways) > 1 and "data" in layout.program_mesh:
        if layout.in_time:  # a split in time, too, must follow the first tensor's samples
            ways = ways[:1]
        made = _fullest(made, spare, ways, lambda one, dims: _planned(one, layout, seeds, dims))
    made.shards = shards or {}
    warn_of_uneven(made.unsplit)
    warn_of_micro(layout.micro, made.layout.micro)
    warn_of_idle(layout, made.idle, made.words)
    return made


def _fullest(
    first: ShardingPlan,
    spare: Captured,
    ways: list[Dims],
    planned: Callable[[Captured, Dims], ShardingPlan],
) -> ShardingPlan:
    """`first`, or a plan by other samples, if that leaves less of the step whole on every rank of `data`."""
    found, chosen, least = first, ways[0], _whole_share(first)
    for dims in ways[1:] if least > MOST_WHOLE else []:
        made = planned(copied(spare), dims)
        if _whole_share(made) < 0.9 * least:
            found, chosen, least = made, dims, _whole_share(made)
    if least > MOST_WHOLE and not found.unsplit:
        warn_of_whole(least, found.captured, chosen, found.mesh.size("data"))
    return found


def _whole_share(made: ShardingPlan) -> float:
    return whole_share(made.captured.graph, made.spread.of, frozenset(COMPUTE))


def _planned(
    captured: Captured,
    layout: Layout,
    seeds: _Seeds,
    dims: Dims,
) -> ShardingPlan:
    shapes = {
        n: captured.placeholder(n).meta["val"].shape for n, d in dims.items() if d is not None
    }
    asked = layout.micro
    sizes = [int(shapes[n][d]) for n, d in dims.items() if d is not None]
    layout = micro_of(layout, [*sizes, *rows_of_chunks(captured, dims)])
    mesh = layout.program_mesh
    if any(axis in mesh for axis in MODEL_AXES):
        given = captured.placeholders
        parameters = {given[n] for n, kind in captured.kinds.items() if kind == "parameter"}
        weights_first(captured.graph, parameters)
        products_first(captured.graph)
    products = movable(captured, mesh, lambda name: _given_to(name, captured, mesh, seeds))
    axes = batch_axes(mesh, with_experts=bool(products))
    moves = insert_moves(captured, mesh, products, _axes_of_samples(captured, dims, layout, axes))
    boundaries = insert_boundaries(captured)
    spread = Spread(mesh, book=seeds.book)
    made = ShardingPlan(captured, layout, spread, boundaries, batch_axes=axes)
    _alias_weights(made)
    made.words = seeds.words
    _seed_known(made, seeds.known)
    _seed_place(made, seeds.place)
    _seed_found(made, seeds.found)
    _seed_batch(made, dims, asked)
    _seed_moves(made, moves)
    made.spread.run(captured.graph)
    _seed_hints(made)
    made.spread.run(captured.graph)
    while _decompose(made):
        made.spread.run(captured.graph)
    if keep_samples_split(made.spread, captured, boundaries, axes, mesh):
        made.spread.run(captured.graph)
    _settle_state(made)
    made.spread.run(captured.graph)
    if _want_gradients(made):
        made.spread.run(captured.graph)
    while _decompose(made):
        made.spread.run(captured.graph)
    return made


def _given_to(name: str, captured: Captured, mesh: Mesh, seeds: _Seeds) -> Sharding | None:
    """The compute sharding of a parameter from an earlier step, from `place` or from a search."""
    if name in seeds.known:
        return seeds.known[name]
    shape = tuple(captured.placeholder(name).meta["val"].shape)
    others = next(s.others for s in captured.state if s.name == name)
    for entries, what in ((seeds.place, 'place["{0}"] for {1}'), (seeds.found, "{1}, found")):
        for pattern, text in entries.items():
            if _matches(name, others, pattern):
                return placed(text, shape, mesh, what.format(pattern, name))
    return None


def _axes_of_samples(
    captured: Captured, dims: Dims, layout: Layout, axes: Sequence[str]
) -> tuple[str, ...]:
    """The axes that split the samples of the first tensor of the batch."""
    for name, dim in dims.items():
        if dim is not None:
            val = captured.placeholder(name).meta["val"]
            return split_of(name, val, dim, layout.program_mesh, layout, axes)[0]
    return ()


def _seed_moves(made: ShardingPlan, moves: ExpertMoves) -> None:
    """The shardings of rows on the ranks of their experts."""
    for node, sharding in moves.seeds.items():
        closed = node in moves.held
        made.spread.seed(node, sharding, "rows go to their experts", closed=closed)
    made.held |= moves.held.keys()
    made.slots |= moves.held


def _alias_weights(made: ShardingPlan) -> None:
    """Give all marks of one weight one sharding, open to the axes that split weights only."""
    first: dict[str, fx.Node] = {}
    for mark, kind in made.boundaries.items():
        if kind.parameter:
            lead = first.setdefault(kind.parameter, mark)
            if lead is not mark:
                made.spread.alias[mark] = lead
            made.spread.accepts[lead] = MODEL_AXES


def _seed_known(made: ShardingPlan, known: Mapping[str, Sharding]) -> None:
    marks = {k.parameter: m for m, k in made.boundaries.items() if k.parameter}
    for name, sharding in known.items():
        made.compute[name] = sharding
        if name in marks:
            made.spread.seed(
                marks[name], sharding, "an earlier step on this model", closed=True, rank=STRONG
            )


def _seed_place(made: ShardingPlan, place: Place) -> None:
    parameters = [n for n, k in made.captured.kinds.items() if k == "parameter"]
    others = {s.name: s.others for s in made.captured.state}
    marks = {k.parameter: m for m, k in made.boundaries.items() if k.parameter}
    for pattern, text in place.items():
        names = [n for n in parameters if _matches(n, others[n], pattern)]
        outputs = [] if names else _outputs(made, pattern)
        for node in outputs:
            _seed_output(made, node, pattern, text, "place")
        if not names and not outputs:
            near = difflib.get_close_matches(pattern.replace("*", ""), parameters, n=3, cutoff=0.3)
            raise ShardingError(
                f'place: no parameter and no module\'s output matches "{pattern}"',
                why=f"the model has {len(parameters)} parameters: {', '.join(parameters[:4])}, ...",
                fix="the nearest names are " + ", ".join(near or parameters[:3]),
            )
        for name in names:
            if name in made.patterns and not fnmatchcase(name, pattern):
                _refuse_other(made, name, others[name], pattern, text)
            if name in made.compute:
                continue
            shape = tuple(made.captured.placeholder(name).meta["val"].shape)
            sharding = placed(text, shape, made.mesh, f'place["{pattern}"] for {name}')
            made.compute[name], made.patterns[name] = sharding, pattern
            if name in marks:
                made.spread.seed(
                    marks[name], sharding, f'place "{pattern}"', closed=True, rank=STRONG
                )


def _matches(name: str, others: Sequence[str], pattern: str) -> bool:
    """Whether a name of a parameter matches."""
    return any(fnmatchcase(n, pattern) for n in (name, *others))


def _refuse_other(
    made: ShardingPlan, name: str, others: Sequence[str], pattern: str, text: str
) -> None:
    """Refuse another sharding of a tied parameter by another of its names."""
    have = made.compute[name]
    if placed(text, have.shape, made.mesh, f'place["{pattern}"] for {name}') == have:
        return
    tied = next(n for n in others if fnmatchcase(n, pattern))
    first = made.patterns[name]
    raise ShardingError(
        f'place gives one tensor two shardings: "{tied}" is tied to "{name}"',
        at=f'place["{pattern}"] and place["{first}"]',
        fix="one entry, by either name",
    )


def _seed_found(made: ShardingPlan, found: Place) -> None:
    """As `_seed_place`, for parameters without a sharding of the user or of an earlier step."""
    marks = {k.parameter: m for m, k in made.boundaries.items() if k.parameter}
    parameters = [n for n, k in made.captured.kinds.items() if k == "parameter"]
    matched = {n: next((p for p in found if fnmatchcase(n, p)), None) for n in parameters}
    for name, pattern in matched.items():
        if pattern is None or name in made.compute:
            continue
        shape = tuple(made.captured.placeholder(name).meta["val"].shape)
        made.compute[name] = placed(found[pattern], shape, made.mesh, f"{name}, found")
        if name in marks:
            why = f'found "{pattern}"'
            made.spread.seed(marks[name], made.compute[name], why, closed=True, rank=STRONG)
    for pattern in [p for p in found if p not in matched.values()]:
        for node in _outputs(made, pattern):
            # A module may have an output of another shape elsewhere, which stays as it is.
            with contextlib.suppress(ShardingError):
                _seed_output(made, node, pattern, found[pattern], "found")


def _seed_output(made: ShardingPlan, node: fx.Node, pattern: str, text: str, why: str) -> None:
    """Seed the output of a module whose name matches."""
    what = f'{why}["{pattern}"] for the output of {_module(node, pattern)}'
    sharding = placed(text, tuple(node.meta["val"].shape), made.mesh, what)
    made.spread.seed(node, sharding, f'{why} "{pattern}"')
    made.held.add(node)


def _outputs(made: ShardingPlan, pattern: str) -> list[fx.Node]:
    """The output nodes, one per module, of modules whose names match."""
    found: dict[str, fx.Node] = {}
    for node in made.captured.graph.nodes:
        for name in node.meta.get("output_of", ()):
            if fnmatchcase(name, pattern) and isinstance(node.meta["val"], Tensor):
                found[name] = node  # the last: a module may be traced as several nodes
    return list(found.values())


def _module(node: fx.Node, pattern: str) -> str:
    return next(n for n in node.meta["output_of"] if fnmatchcase(n, pattern))


def placed(text: str, shape: tuple[int, ...], mesh: Mesh, what: str) -> Sharding:
    """A user's sharding text for a tensor of `shape`, without axes that the mesh lacks.

    Several axes of one dim take the order in which they split state, `data` last.
    """
    try:
        sharding = Sharding.parse(text, shape)
    except ShardingError as error:
        raise ShardingError(error.what, at=what, why=error.why, fix=error.fix) from None
    unknown = sharding.axes - set(AXES)
    if unknown:
        raise ShardingError(
            f'unknown axis "{min(unknown)}" in "{text}"',
            at=what,
            fix="axes are data, tensor, seq, expert",
        )
    dims = tuple(
        tuple(Segment(s.size, tuple(a for a in split_order(s.axes) if a in mesh)) for s in dim)
        for dim in sharding.dims
    )
    for d, dim in enumerate(dims):
        size, axes = dim[0].size, axes_of(dim)
        if size % mesh.size(axes):
            raise ShardingError(
                f"cannot split dim {d} (size {size}) over {'+'.join(axes)} (size {mesh.size(axes)})",
                at=what,
                why=f'the sharding "{text}" of a tensor of shape {list(shape)}',
                fix=f"a size that {mesh.size(axes)} divides, or '-' for this dim",
            )
    return Sharding(dims)


def _seed_batch(made: ShardingPlan, dims: Dims, asked: int) -> None:
    """`data` splits the samples of the batch, `seq` the second dim of likely (batch, sequence) tensors.

    `asked` is the `micro` that the user asked for.
    """
    mesh = made.mesh
    for name in (n for n, k in made.captured.kinds.items() if k == "batch"):
        node = made.captured.placeholder(name)
        val: Tensor = node.meta["val"]
        if not val.ndim:
            continue
        axes: list[tuple[str, ...]] = [()] * val.ndim
        dim = dims.get(name)
        if dim is not None:
            axes[dim], unsplit = split_of(name, val, dim, mesh, made.layout, made.batch_axes)
            if unsplit is not None:
                made.unsplit.append(unsplit)
                made.reasons[name] = why_unsplit(unsplit)
            elif made.layout.micro != asked:
                made.reasons[name] = (
                    f"micro={asked} does not divide a rank's samples, or chunks of them"
                )
        if "seq" in mesh and has_sequence(val) and dim != 1:
            if val.shape[1] % mesh.size("seq") == 0:
                axes[1] = ("seq",)
            else:
                made.reasons[name] = f"its sequence of {val.shape[1]} does not divide by seq"
        split = tuple((Segment(int(n), a),) for n, a in zip(val.shape, axes, strict=True))
        made.samples[name] = Sharding(split)
        made.spread.seed(node, made.samples[name], "the layout splits the batch", closed=True)


def _seed_hints(made: ShardingPlan) -> None:
    for node in made.captured.graph.nodes:
        if node.target is shard_as_op:
            text: str = node.args[1]
            where = f'shard_as(x, "{text}") at {node.meta.get("source", "")}'
            sharding = placed(text, tuple(node.meta["val"].shape), made.mesh, where)
            made.spread.forget([node])
            made.spread.seed(node, sharding, f'shard_as "{text}"', closed=True)
            made.held.add(node)


def _settle_state(made: ShardingPlan) -> None:
    """Set storage shardings, from the now known compute shardings and from `zero`."""
    captured, mesh, zero = made.captured, made.mesh, made.layout.zero
    marks = {k.parameter: m for m, k in made.boundaries.items() if k.parameter}
    cut: dict[str, Sharding] = {}
    for state in captured.state:
        shape = tuple(int(n) for n in state.tensor.shape)
        if state.kind == "parameter":
            mark = marks.get(state.name)
            wanted = made.spread.of(mark) if mark is not None else None
            compute = made.compute.get(state.name) or wanted or Sharding.whole(shape)
            made.compute[state.name] = compute
            stored = storable(compute)
            further = with_zero(stored, mesh) if zero >= SLOTS_FROM else None
            if zero and further is None and state.tensor.numel() > 1:
                over = " or ".join(f"{a}={mesh.size(a)}" for a in further_axes(stored, mesh))
                if over:
                    made.reasons[state.name] = f"no dim of {list(shape)} divides by {over}"
            cut[state.name] = further or stored
            made.storage[state.name] = cut[state.name] if zero >= PARAMETERS_FROM else stored
        elif state.kind == "slot":
            made.storage[state.name] = slot_like(cut[state.owner], shape)
        else:
            made.storage[state.name] = Sharding.whole(shape)
    given = captured.placeholders
    for name, sharding in made.storage.items():
        if name in captured.kinds:
            made.spread.seed(given[name], sharding, f"zero={zero}", closed=True)


def _want_gradients(made: ShardingPlan) -> bool:
    """Want each gradient split like its weight at its origin; return whether there was any to split.

    Its op may have no other reason for a split: an embedding's gradient would be made whole, and then cut.
    """
    marks = [n for n in made.captured.graph.nodes if n in made.boundaries]
    found = False
    for mark in (n for n in marks if made.boundaries[n].into == "update"):
        value, wanted = mark.all_input_nodes[0], made.spread.of(mark)
        if wanted is not None and wanted.axes & MODEL_AXES and value not in made.spread.closed:
            split = wanted.only(MODEL_AXES, made.mesh)
            made.spread.seed(value, split, "the weight is split so")
            found = True
    return found


def _decompose(made: ShardingPlan) -> bool:
    """Decompose the ops that need a factor whole which is wanted split; return whether there were any."""
    editor = Editor(made.captured.graph, made.captured.mode)
    found = False
    for node in list(made.captured.graph.nodes):
        decompose = DECOMPOSITIONS.get(node.target)
        if decompose is None or not is_tensor_call(node) or not _wants_whole_split(made, node):
            continue
        new = decompose(editor.at(node), node)
        if new is None:
            continue
        made.spread.forget([node, *node.users])
        editor.replace(node, new)
        found = True
    if found:
        erase_dead(made.captured.graph)
        live = set(made.captured.graph.nodes)
        made.spread.forget([n for n in made.spread.wanted if n not in live])
    return found


def _wants_whole_split(made: ShardingPlan, node: fx.Node) -> bool:
    rule = made.spread.rule(node)
    if rule is None or not rule.whole:
        return False
    for term, x in tensors_of(node, rule):
        wanted = made.spread.of(x)
        for factors, dim in zip(term, wanted.dims if wanted else (), strict=False):
            if any(f in rule.whole for f in factors) and axes_of(dim):
                return True
    return False
