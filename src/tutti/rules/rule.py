"""Factor rules: the named factors of each dim of an op's operands and results.

A rule is text, `"m k, n k -> m n"`: one entry per tensor, one word per dim.

| word | meaning |
| --- | --- |
| `m` | the dim runs along factor m |
| `(h d)` | the dim is a product of factors, major to minor |
| `1` | a dim that no factor runs along |
| `k!` | a factor that must stay whole |
| `...` | any number of leading dims, the same in every tensor that has it |
| `?` | a tensor whose every dim stays whole |

A factor of the operands that a result lacks is reduced: when it is split, that result is *partial*.
`linear` lists groups of operands in which the op is jointly linear: a pending sum may pass through when
exactly one group has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx

Factors = tuple[str, ...]
Term = tuple[Factors, ...]


@dataclass(frozen=True, eq=False)
class Rule:
    """The allowed splits of one call of an op. A rule equals only itself, so it may be a key.

    `operands` and `results` give for each tensor, for each dim, its factors, major to minor. `reduce`
    is the pending reduction over a split factor that a result lacks; results in `apart` (a random seed) are
    the same for every split, and never pending. `structural` ops only move elements,
    so any kind of pending reduction passes. `parts` maps a factor to the code of the op for a split of
    that factor, where the plain op on local tensors would be wrong. `shape_argument` is the position of
    the argument that holds the shape of the result. `follows` pairs factors that should have equal
    splits.
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    reduce: str = "sum"
    structural: bool = False
    parts: dict[str, Callable[..., Any]] = field(default_factory=dict)
    shape_argument: int | None = None
    follows: tuple[tuple[str, str], ...] = ()
    apart: frozenset[int] = frozenset()

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of appearance."""
        seen = dict.fromkeys(f for t in self.operands + self.results for dim in t for f in dim)
        return tuple(seen)

    def reduced(self, result: int) -> frozenset[str]:
        """Factors of the operands that `result` lacks."""
        return self._reduced[result]

    @cached_property
    def _reduced(self) -> tuple[frozenset[str], ...]:
        given = frozenset(f for t in self.operands for dim in t for f in dim)
        return tuple(
            frozenset() if i in self.apart else given.difference(f for dim in t for f in dim)
            for i, t in enumerate(self.results)
        )

    @cached_property
    def contracts(self) -> bool:
        """Whether a result lacks a factor of the operands."""
        return any(self.reduced(i) for i in range(len(self.results)))

    def keeps_rows(self, num_rows: int) -> bool:
        """Whether one factor of this size runs along dim 0 of each tensor, nowhere else, and may be split
        as it is: the op treats each row by itself."""
        terms = [*self.operands, *self.results]
        leads = {term[0] if term else () for term in terms}
        lead = leads.pop()
        if leads or len(lead) != 1:
            return False
        (factor,) = lead
        return (
            not any(factor in dim for term in terms for dim in term[1:])
            and factor not in self.whole
            and factor not in self.parts
            and self.sizes[factor] == num_rows
        )

    def __str__(self) -> str:
        def term(t: Term) -> str:
            return " ".join(_word(dim, self.whole) for dim in t)

        left = ", ".join(map(term, self.operands))
        return f"{left} -> {', '.join(map(term, self.results))}"


def _word(dim: Factors, whole: frozenset[str]) -> str:
    names = [f + "!" * (f in whole) for f in dim]
    return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a call, in argument order, those in lists too; repeats stay."""
    found: list[fx.Node] = []
    _add_tensors(node.args, found)
    if node.kwargs:
        _add_tensors(node.kwargs.values(), found)
    return found


def _add_tensors(values: Iterable[Any], found: list[fx.Node]) -> None:
    for x in values:
        if isinstance(x, fx.Node):
            if isinstance(x.meta["val"], Tensor):
                found.append(x)
        elif isinstance(x, list | tuple):
            _add_tensors(x, found)


def results_of(node: fx.Node) -> list[Tensor | None]:
    """The fake results of a call; None for a result that is not a tensor."""
    val = node.meta["val"]
    values = val if isinstance(val, list | tuple) else [val]
    return [v if isinstance(v, Tensor) else None for v in values]


def shape(x: Any) -> tuple[int, ...]:
    """The global shape of a node."""
    return tuple(int(s) for s in x.meta["val"].shape)


def whole_dims(dims: Iterable[int], x: Sequence[int]) -> frozenset[str]:
    """The factors `d0`, `d1`, ... of these dims of a tensor of shape `x`; none for a single number."""
    return frozenset(f"d{d % len(x)}" for d in dims) if x else frozenset()


def parse_rule(
    text: str,
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int] | None],
    *,
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Rule:
    """Bind rule `text` to shapes. Raises `ValueError` where they do not fit."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f'no "->" in rule "{text}"')
    whole: set[str] = set()
    lefts, rights = _terms(left, whole), _terms(right, whole)
    if len(lefts) != len(operands) or len(rights) != len(results):
        raise ValueError(
            f'rule "{text}" is for {len(lefts)} operands and {len(rights)} results, '
            f"not {len(operands)} and {len(results)}"
        )
    known = dict(sizes or {})
    pairs = [*zip(lefts, operands, strict=True), *zip(rights, results, strict=True)]
    lead = max((len(s) - len(t) + 1 for t, s in pairs if s is not None and "..." in t), default=0)
    _broadcast_lead(pairs, lead, known)
    spelled = [() if s is None else _fit(t, s, lead, known, whole, text) for t, s in pairs]
    n = len(lefts)
    return Rule(tuple(spelled[:n]), tuple(spelled[n:]), known, frozenset(whole), **options)


def spelled(text: str, **options: Any) -> Callable[[fx.Node], Rule]:
    """The same text for every call of an op; `options` are those of `Rule`."""

    def rule(node: fx.Node) -> Rule:
        operands = [shape(x) for x in operands_of(node)]
        results = [None if r is None else tuple(r.shape) for r in results_of(node)]
        return parse_rule(text, operands, results, **options)

    return rule


def _broadcast_lead(pairs: Iterable[Any], lead: int, known: dict[str, int]) -> None:
    """Find the sizes of the dims of `...`, which broadcast: a tensor may have 1 where another has more."""
    for term, dims in pairs:
        if dims is None or "..." not in term:
            continue
        at, here = term.index("..."), len(dims) - len(term) + 1
        for i, size in enumerate(dims[at : at + here]):
            name = f"_{lead - here + i}"
            known[name] = size if known.get(name, 1) == 1 else known[name]


def _terms(text: str, whole: set[str]) -> list[list[Any]]:
    terms = []
    for term in text.split(","):
        words: list[Any] = []
        for word in re.findall(r"\([^)]*\)|\S+", term):
            if word in ("...", "?"):
                words.append(word)
                continue
            names = []
            for name in word.strip("()").split():
                if name.endswith("!"):
                    name = name[:-1]
                    whole.add(name)
                if name != "1":
                    names.append(name)
            words.append(tuple(names))
        terms.append(words)
    return terms


def _fit(
    words: list[Any],
    dims: Sequence[int],
    lead: int,
    known: dict[str, int],
    whole: set[str],
    text: str,
) -> Term:
    if words == ["?"]:
        return ((),) * len(dims)
    term: list[Factors] = []
    for word in words:
        if word == "...":
            here = len(dims) - len(words) + 1
            term += [(f"_{lead - here + i}",) for i in range(here)]
        else:
            term.append(word)
    if len(term) != len(dims):
        raise ValueError(f'rule "{text}": a tensor of shape {tuple(dims)} has not {len(term)} dims')
    out: list[Factors] = []
    for factors, size in zip(term, dims, strict=True):
        unknown = [f for f in factors if f not in known]
        rest = math.prod(known[f] for f in factors if f in known)
        if len(unknown) == 1:
            known[unknown[0]] = size // rest
        if len(unknown) > 1:
            raise ValueError(f'rule "{text}": the sizes of {unknown} are not known')
        if math.prod(known[f] for f in factors) != size:
            if size == 1:
                out.append(())  # a broadcast dim
                continue
            raise ValueError(f'rule "{text}" does not fit a dim of size {size} ({factors})')
        out.append(factors)
    return tuple(out)


def groups(*members: Iterable[int]) -> tuple[frozenset[int], ...]:
    """Groups of operands for `Rule.linear`."""
    return tuple(frozenset(m) for m in members)


def broadcast_rule(
    operands: Sequence[Sequence[int]], result: Sequence[int], num_results: int = 1, **options: Any
) -> Rule:
    """Element by element, dims aligned at the right; dims of size 1 broadcast."""
    rank = len(result)
    sizes = {f"d{i}": n for i, n in enumerate(result)}

    def term(dims: Sequence[int]) -> Term:
        first = rank - len(dims)
        return tuple(
            (f"d{first + i}",) if n == result[first + i] and n != 1 else ()
            for i, n in enumerate(dims)
        )

    out = tuple((f"d{i}",) if n != 1 else () for i, n in enumerate(result))
    used = {f for t in (out,) for dim in t for f in dim}
    return Rule(
        tuple(term(d) for d in operands),
        (out,) * num_results,
        {k: v for k, v in sizes.items() if k in used},
        **options,
    )
