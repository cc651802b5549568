"""What a search has found, in words:

attention: heads over tensor (q, k, v by rows; o by columns): one all-reduce a layer in the forward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tutti.planner.placement.axis_search import Search
from tutti.planner.placement.candidate_cost import Costing, PlacedCost
from tutti.planner.placement.decisions import Decision
from tutti.planner.placement.patterns import short_patterns, template
from tutti.propagate.idle_axes import nothing_over

# The first row all of whose words are in ops of a decision titles it.
_TITLES = (
    (("attention",), "attention: heads"),
    (("softmax", "bmm"), "attention: heads"),
    (("softmax", "matmul"), "attention: heads"),
    (("embedding",), "vocabulary: words"),
    (("log_softmax",), "output: classes"),
    (("native_layer_norm",), "width: features"),
    (("rsqrt",), "width: features"),
    (("convolution",), "convolution: channels"),
)
_OTHER = "feed-forward: hidden features"
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
_REGIONS = ("forward", "backward")


def words_of(search: Search, costing: Costing) -> list[str]:
    """A line for each decision taken, and one for the large weights that stay whole."""
    return [
        f"{_title(decision, search.axis)} over {search.axis} ({_dims(decision, costing)}): "
        f"{_collectives(cost, search.found.none, _num_layers(decision, costing))}"
        for decision, cost in search.chosen
    ]


def token_words(tokens: Mapping[str, str], before: PlacedCost, after: PlacedCost) -> list[str]:
    """The line for the outputs of norms that are split by tokens."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    more = {kind: _of_kind(after, kind) - _of_kind(before, kind) for kind in kinds}
    new = " and ".join(f"{n} {_plain(k, n)}" for k, n in more.items() if n > 0)
    old = " and ".join(f"{-n} {_plain(k, n)}" for k, n in more.items() if n < 0)
    what = f"{new} instead of {old}" if new and old else new or old or "the same collectives"
    return [f"norms: tokens over tensor (outputs of {', '.join(short_patterns(tokens))}): {what}"]


def _of_kind(cost: PlacedCost, kind: str) -> int:
    return sum(n for (region, k), n in cost.counts.items() if k == kind and region in _REGIONS)


def _plain(kind: str, count: int) -> str:
    return kind.replace("_", "-") + ("s" if abs(count) > 1 else "")


def nothing_words(search: Search, costing: Costing) -> str:
    """Why no parameter is split."""
    ways = costing.layout.axes[search.axis]
    if not search.given:
        what = "number of stacked experts" if search.axis == "expert" else "dim of a parameter"
        return nothing_over(search.axis, f"no {what} divides by {ways}")
    least = min(search.found.alone, key=lambda cost: cost.seconds)
    more = least.seconds / search.found.none.seconds - 1
    each = f"(the best of {len(search.given)} by {more:.1%})"
    return nothing_over(search.axis, f"each split would take longer than it saves {each}")


def _title(decision: Decision, axis: str) -> str:
    if axis == "expert":
        return "mixture of experts: experts"
    ops = " ".join(sorted(decision.ops))
    apart = ops.replace("_log_softmax", "_log_probability")
    for words, title in _TITLES:
        if all(word in (ops if word == "log_softmax" else apart) for word in words):
            return title
    return _OTHER


def _dims(decision: Decision, costing: Costing) -> str:
    """The parameters by the dim that is split: `a, b by rows; c by columns`."""
    by_dim: dict[str, list[str]] = {}
    for name, dim in decision.dims:
        by_dim.setdefault(_dim_name(dim, costing.num_dims[name]), []).append(name)
    return "; ".join(f"{', '.join(short_patterns(names))} {how}" for how, names in by_dim.items())


def _dim_name(dim: int, num_dims: int) -> str:
    if num_dims == 1:
        return "in parts"
    return ("by rows", "by columns")[dim] if num_dims == 2 else f"along dim {dim}"


def _num_layers(decision: Decision, costing: Costing) -> int:
    """The number of layers that it decides: the most parameters of one template."""
    counts: dict[str, int] = {}
    for name, _ in decision.dims:
        layers = sum(costing.times[member] for member in costing.step.members[name])
        counts[template(name)] = counts.get(template(name), 0) + layers
    return max(counts.values())


def _collectives(cost: PlacedCost, none: PlacedCost, num_layers: int) -> str:
    parts = []
    for region in _REGIONS:
        counts = {
            k: n - none.counts.get((r, k), 0) for (r, k), n in cost.counts.items() if r == region
        }
        if any(n > 0 for n in counts.values()):
            parts.append(f"{_counted(counts, num_layers)} in the {region}")
    return ", ".join(parts) or "no collective"


def _counted(counts: Mapping[str, int], num_layers: int) -> str:
    words: Sequence[str] = [_kind(kind, n, num_layers) for kind, n in counts.items() if n > 0]
    return " and ".join(words)


def _kind(kind: str, count: int, num_layers: int) -> str:
    each, rest = divmod(count, num_layers)
    if rest or num_layers == 1:
        each, where = count, "" if num_layers == 1 else " in all"
    else:
        where = " a layer"
    name = kind.replace("_", "-") + ("s" if each > 1 else "")
    return f"{_NUMBERS.get(each, str(each))} {name}{where}"
