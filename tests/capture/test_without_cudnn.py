"""Recurrent layers and cells in ops that can be split, against PyTorch's own; norms without cuDNN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tutti.capture.second_trace.functional import _Replay
from tutti.capture.second_trace.random_ops import OurRandomness, rewinding
from tutti.capture.substitutes import time_steps, without_cudnn
from tutti.capture.substitutes.other_forms import in_other_forms
from tutti.errors import CaptureError
from tutti.torch_private.recurrent import ENTRIES

pytestmark = pytest.mark.usefixtures("in_float64")

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
LENGTHS = torch.tensor([5, 3, 3, 1])


def made(name: str, **options: Any) -> nn.Module:
    if name.startswith("rnn_"):
        options["nonlinearity"] = name.removeprefix("rnn_")
    return LAYERS[name](6, 8, num_layers=3, **options)


def both(one: nn.Module, name: str, *given: Any) -> tuple[list[Any], list[Any]]:
    """Results and gradients of PyTorch's layer, and of the time steps."""
    found: list[list[Any]] = []
    for instead in (getattr(ENTRIES, name), without_cudnn.INSTEAD[name]):
        with pytest.MonkeyPatch.context() as patch, OurRandomness(0, 0) as ours, rewinding(ours):
            patch.setattr(ENTRIES, name, instead, raising=False)
            result = one(*given)
        outputs = result[0] if isinstance(result[0], Tensor) else result[0].data
        last = result[1] if isinstance(result[1], tuple) else (result[1],)
        sum((x * x.detach().cos()).sum() for x in (outputs, *last)).backward()
        found.append([outputs, *last, *(p.grad.clone() for p in one.parameters())])  # type: ignore[union-attr]
        one.zero_grad()
    return found[0], found[1]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_padded_layers(name: str, bidirectional: bool, batch_first: bool, bias: bool) -> None:
    one = made(name, bidirectional=bidirectional, batch_first=batch_first, bias=bias, dropout=0.3)
    for have, want in zip(*both(one, name, torch.randn(5, 4, 6)), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_layers(name: str, bidirectional: bool) -> None:
    one = made(name, bidirectional=bidirectional, dropout=0.3)
    given = pack_padded_sequence(torch.randn(5, 4, 6), LENGTHS)
    for have, want in zip(*both(one, name, given), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_projections_and_a_given_state(bidirectional: bool) -> None:
    one = made("lstm", proj_size=2, bidirectional=bidirectional)
    num = 3 * (1 + bidirectional)
    state = torch.randn(num, 4, 2), torch.randn(num, 4, 8)
    for have, want in zip(*both(one, "lstm", torch.randn(5, 4, 6), state), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells(kind: Any, bias: bool) -> None:
    cell = kind(5, 6, bias=bias)
    x, hidden, kept = (torch.randn(3, n) for n in (5, 6, 6))
    weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)[: 2 + 2 * bias]
    if kind is nn.GRUCell:
        torch.testing.assert_close(time_steps.gru_cell(x, hidden, *weights), cell(x, hidden))
    else:
        state = (hidden, kept)
        torch.testing.assert_close(time_steps.lstm_cell(x, state, *weights), cell(x, state))


def test_on_a_cpu_pytorchs_own_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> None:
        raise AssertionError("time steps on a CPU")

    monkeypatch.setitem(time_steps.CELLS, "gru", unexpected)
    one, x = nn.GRU(5, 6), torch.randn(4, 3, 5)
    with in_other_forms():
        inside = one(x)[0]
    assert torch.equal(inside, one(x)[0])


def test_norms_ask_for_no_cudnn() -> None:
    seen: list[Any] = []
    plain: Any = without_cudnn._plain(lambda *args, **named: seen.append((args, named)))
    plain(1, 2, True)
    plain(1, cudnn_enabled=True)
    assert seen == [((1, 2, False), {}), ((1,), {"cudnn_enabled": False})]
    x, norm = torch.randn(4, 3, 2), nn.BatchNorm1d(3)
    with in_other_forms():
        torch.testing.assert_close(norm(x), F.batch_norm(x, None, None, training=True))


def test_the_entries_are_put_back() -> None:
    before = dict(vars(ENTRIES))
    with in_other_forms():
        assert vars(ENTRIES) != before
    assert vars(ENTRIES) == before


def test_weights_are_not_joined_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would look at addresses, which they have not."""
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda _layer: pytest.fail("joined"))
    one = nn.LSTM.__new__(nn.LSTM)
    with in_other_forms():
        one.flatten_parameters()


def test_an_op_that_hides_what_it_writes_is_refused() -> None:
    op, graph = torch.ops.aten.cudnn_batch_norm.default, fx.Graph()
    node = graph.call_function(op)
    node.meta["source"] = "no_such_script.py:7"
    replay = _Replay.__new__(_Replay)
    replay.node = node
    with pytest.raises(CaptureError, match="cudnn_batch_norm") as caught:
        replay.call_function(op, (), {})
    assert caught.value.at == "no_such_script.py:7"
