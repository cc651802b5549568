"""The residences of the models of a run, by model.

All steps on one model share its residence.
"""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any

from torch import Tensor, nn

from tutti.capture.state.lift import optimizers_of, state_of
from tutti.errors import LayoutError
from tutti.layout import Layout
from tutti.state.renewed import now_of
from tutti.state.replacing import put_in_place, replace_in_optimizer
from tutti.state.residence import Residence
from tutti.state.shards import StateShard, origin_of

_RESIDENCES: weakref.WeakKeyDictionary[nn.Module, Residence] = weakref.WeakKeyDictionary()


def residence_of(model: nn.Module, layout: Layout) -> Residence:
    """The residence of `model`: made at its first `distribute`, the same for all later ones.

    Tensors that another model has, too, as a part has those of its model, keep their place.
    """
    home, layout = _RESIDENCES.get(model), layout.of_one
    if home is None:
        home = _RESIDENCES[model] = _beside_others(model, layout)
    if not _alike(home.layout, layout):
        raise _laid_out_as("this model", home.layout, layout)
    return home


def _beside_others(model: nn.Module, layout: Layout) -> Residence:
    """A new residence of `model`, with what those of other models know of its tensors."""
    made, own = Residence(layout), _names(model)
    for other, home in list(_RESIDENCES.items()):
        theirs = _names(other)
        common = {theirs[i][0]: name for i, (name, _) in own.items() if i in theirs}
        if not common:
            continue
        if home.block is not None:
            raise home.block.refused()
        if _alike(home.layout, layout):
            made.join(home, common)
        elif any(isinstance(x, StateShard) for i, (_, x) in own.items() if i in theirs):
            raise _laid_out_as("a part of this model", home.layout, layout)
    return made


def _names(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Parameters and buffers by id, each with its name."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {id(x): (name, x) for name, x in named}


def _alike(one: Layout, other: Layout) -> bool:
    # the precision of a step does not affect the residence of its state
    return one.without("precision") == other.without("precision")


def _laid_out_as(what: str, known: Layout, wanted: Layout) -> LayoutError:
    return LayoutError(
        f'{what} is laid out as "{known}" already, not "{wanted}"',
        why="all steps on one model share its shards",
        fix="give the same layout to each distribute(), or a fresh model",
    )


def known_residence(model: nn.Module) -> Residence | None:
    """The residence of `model`, if there was a call of a step on it or a request for its state."""
    return _RESIDENCES.get(model)


def residences_of(module: nn.Module) -> list[tuple[nn.Module | None, Residence]]:
    """The residences that keep state of `module`, each with its model.

    `module` may be the model, a part of it, or a module with models in it. A copy of a model or of a part,
    made of shards, has the residence of its original, and no model here.
    """
    own = {id(m) for m in module.modules()}
    found: list[tuple[nn.Module | None, Residence]] = [
        (model, home)
        for model, home in list(_RESIDENCES.items())
        if id(model) in own or any(m is module for m in model.modules())
    ]
    known = {id(home) for _, home in found}
    for x in chain(module.parameters(), module.buffers()):
        origin = origin_of(x) if isinstance(x, StateShard) else None
        home = origin.home() if origin is not None else None
        if home is not None and id(home) not in known:
            known.add(id(home))
            found.append((None, home))
    return found


def refuse_open(model: nn.Module) -> None:
    """Raise `TuttiError` inside a block in which the weights of `model` are whole."""
    home = _RESIDENCES.get(model)
    if home is not None and home.block is not None:
        raise home.block.refused()


def refresh(model: nn.Module) -> None:
    """Pull the weights of a model on servers, of which `model` may be a part; does nothing for any other."""
    for _, home in residences_of(model):
        if home.fetch is not None:
            home.fetch()


def adopt(model: nn.Module, optimizer: Any) -> None:
    """Put the model's current parameters into `optimizer`, if another step has replaced the old ones."""
    home = _RESIDENCES.get(model)
    if home is None:
        return
    held = (p for one in optimizers_of(optimizer) for g in one.param_groups for p in g["params"])
    known = {id(p): home.renewed[id(p)] for p in held if id(p) in home.renewed}
    replace_in_optimizer(
        optimizer, {i: new for i, (old, new) in known.items() if old() is not None}
    )
    given = [s.tensor for s in state_of(model, optimizer)]
    put_in_place(model, optimizer, {id(x): now_of(x) for x in given if now_of(x) is not x})
