"""Recurrent layers and cells of PyTorch as ops that can be split: one time step after another.

`layer` takes the arguments of PyTorch's own functions (`torch.lstm`, `torch.gru`, ...): padded sequences,
[time, batch, features], or packed ones, [all steps, features] with the batch size of each step. Its random
numbers are those of PyTorch's code for a CPU: dropout of the result of each layer but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Hidden state [batch, hidden], and for an LSTM the cell state.
State = tuple[Tensor, ...]
# The next state, from a linear map of the input, the state, and the rest of the weights.
Cell = Callable[[Tensor, State, Sequence[Any]], State]


def _lstm(mapped: Tensor, state: State, weights: Sequence[Any]) -> State:
    (hidden, cell), (w, b, *projection) = state, weights
    enter, forget, value, leave = (mapped + F.linear(hidden, w, b)).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * value.tanh()
    hidden = leave.sigmoid() * cell.tanh()
    return (F.linear(hidden, *projection) if projection else hidden), cell


def _gru(mapped: Tensor, state: State, weights: Sequence[Any]) -> State:
    (hidden,), (w, b) = state, weights
    reset, update, value = mapped.chunk(3, -1)
    kept = F.linear(hidden, w, b).chunk(3, -1)
    new = (value + (reset + kept[0]).sigmoid() * kept[2]).tanh()
    return (new + (update + kept[1]).sigmoid() * (hidden - new),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(mapped: Tensor, state: State, weights: Sequence[Any]) -> State:
        return (activation(mapped + F.linear(state[0], *weights)),)

    return cell


CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}


def layer(name: str, data: Tensor, *args: Any) -> Any:
    """The results of PyTorch's function `name`: outputs, then the last state."""
    packed = not isinstance(args[2], bool)
    sizes, args = (args[0].tolist(), args[1:]) if packed else (None, args)
    given, weights, biased, num_layers, dropout, train, both_ways = args[:7]
    batch_first = not packed and args[7]
    states: list[Tensor] = list(given) if name == "lstm" else [given]
    steps = list(data.split(sizes)) if packed else list(data.unbind(int(batch_first)))
    per_cell = 2 + 2 * biased + (name == "lstm" and states[0].shape[2] != states[1].shape[2])
    directions = (False, True) if both_ways else (False,)
    last: list[State] = []
    for k in range(num_layers):
        if k and dropout and train:
            steps = _dropped(steps, dropout)
        found: list[list[Tensor]] = []
        for backward in directions:
            at = len(last)
            own = _in_pairs(weights[at * per_cell : (at + 1) * per_cell], biased)
            outputs, end = _walked(
                CELLS[name], steps, tuple(s[at] for s in states), own, backward=backward
            )
            found.append(outputs)
            last.append(end)
        steps = [torch.cat(both, -1) if both_ways else both[0] for both in zip(*found, strict=True)]
    result = torch.cat(steps) if packed else torch.stack(steps, int(batch_first))
    return result, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _in_pairs(weights: Sequence[Tensor], biased: bool) -> tuple[Any, ...]:
    """Weight and bias of the input, weight and bias of the state, and an LSTM's projection, if any."""
    if biased:
        return weights[0], weights[2], weights[1], *weights[3:]
    return weights[0], None, weights[1], None, *weights[2:]


def _dropped(steps: list[Tensor], dropout: float) -> list[Tensor]:
    """Dropout of all steps at once, as PyTorch draws it."""
    if len({x.shape for x in steps}) == 1:
        padded = F.dropout(torch.stack(steps), dropout)
        return list(padded.unbind())
    return list(F.dropout(torch.cat(steps), dropout).split([len(x) for x in steps]))


def _walked(
    cell: Cell, steps: list[Tensor], state: State, weights: tuple[Any, ...], *, backward: bool
) -> tuple[list[Tensor], State]:
    """The hidden state after each step, in the order of `steps`, and the state at the end.

    Later steps of packed sequences have fewer rows: those that have ended are the last ones.
    """
    order = range(len(steps))[::-1] if backward else range(len(steps))
    outputs: list[Any] = [None] * len(steps)
    now = tuple(s[: len(steps[order[0]])] for s in state)
    ended: list[State] = []
    for k in order:
        rows, have = len(steps[k]), len(now[0])
        if rows < have:
            ended.insert(0, tuple(s[rows:] for s in now))
            now = tuple(s[:rows] for s in now)
        elif rows > have:
            now = tuple(
                torch.cat([s, first[have:rows]]) for s, first in zip(now, state, strict=True)
            )
        now = cell(F.linear(steps[k], *weights[:2]), now, weights[2:])
        outputs[k] = now[0]
    whole = [torch.cat(parts) for parts in zip(now, *ended, strict=True)] if ended else now
    return outputs, tuple(whole)


def lstm_cell(x: Tensor, state: Sequence[Tensor], *weights: Tensor | None) -> State:
    """The next hidden state and cell state, each [batch, hidden]."""
    own = _four(weights)
    return _lstm(F.linear(x, own[0], own[2]), tuple(state), (own[1], own[3]))


def gru_cell(x: Tensor, hidden: Tensor, *weights: Tensor | None) -> Tensor:
    """The next hidden state, [batch, hidden]."""
    own = _four(weights)
    return _gru(F.linear(x, own[0], own[2]), (hidden,), (own[1], own[3]))[0]


def _four(weights: Sequence[Tensor | None]) -> Any:
    """Weights of input and hidden state, and their biases, None without any."""
    return (*weights, None, None)[:4]
