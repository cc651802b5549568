"""A table that travels by row, between steps: a use by the script brings it, and no old row is ever read."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from server.split.test_rows import SIZE, WIDTH, Tables, batch, train_step
from serving.test_edits import run_script
from serving.test_worker_side import OneServer
from tutti.environment import ROLE, SERVERS
from tutti.serving import worker_side

SCRIPT = Path(__file__).parent / "tables_script.py"


class Looking(OneServer):
    """One that shows whole tables."""

    def look(self, into: Mapping[str, Tensor]) -> None:
        for name, x in into.items():
            x.copy_(self.state[name]["weight"])
        self.asked.append({n: len(x) for n, x in into.items()})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, nn.Module]]:
    """A step that has been called once, and its model."""
    monkeypatch.setenv(ROLE.name, "worker 0")
    monkeypatch.setenv(SERVERS.name, "nowhere:1")
    monkeypatch.setattr(worker_side, "Client", Looking)
    monkeypatch.setattr(worker_side, "_JOINED", [])
    monkeypatch.setattr(worker_side.atexit, "register", lambda _: None)
    torch.manual_seed(0)
    model = Tables().double()
    Looking.asked = []
    Looking.state = {
        n: {"weight": p.detach().clone(), "step": torch.tensor(0.0)}
        | {slot: torch.zeros_like(p) for slot in ("exp_avg", "exp_avg_sq")}
        for n, p in model.named_parameters()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = tutti.distribute(train_step, model, optimizer, "replica=2 server=1 sync=async")
    step(*batch(0))
    yield step, model


def _saved(model: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)["large.weight"]


USES: dict[str, Callable[[Any], Tensor]] = {
    "forward": lambda m: m.large(torch.arange(SIZE)),
    "state_dict": lambda m: m.state_dict()["large.weight"],
    "data": lambda m: m.large.weight.data,
    "rows": lambda m: torch.stack([*m.large.weight[:3], *m.large.weight[3:]]),
    "deepcopy": lambda m: copy.deepcopy(m).large.weight,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).large.weight,
    "save": _saved,
    "numpy": lambda m: torch.from_numpy(m.large.weight.numpy(force=True)),
}


@pytest.mark.filterwarnings("error:another tensor shares")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_use_brings_the_table(use: str, inference: bool, trained: Any) -> None:
    step, model = trained
    for k in range(2):
        current = Looking.state["large.weight"]["weight"]
        with torch.inference_mode(inference):
            assert torch.equal(USES[use](model).detach(), current), k
        assert type(model.large.weight) is nn.Parameter
        step(*batch(k + 1))


def test_forms_ask_for_nothing_and_memory_has_nan(trained: Any) -> None:
    step, model = trained
    asked, weight = len(Looking.asked), model.large.weight
    assert (weight.shape, weight.dtype, len(weight)) == ((SIZE, WIDTH), torch.float64, SIZE)
    assert sum(p.numel() for p in model.parameters()) > SIZE and weight.requires_grad
    model.zero_grad()
    assert isinstance(weight, nn.Parameter) and weight in set(model.parameters())
    with warnings.catch_warnings(record=True):  # of a copy past torch's functions
        assert torch.tensor(weight).isnan().all()
    assert len(Looking.asked) == asked
    step.program_of(batch(0))
    step(*batch(0, 12))  # compiles again
    assert not model.large.weight.isnan().any()


def test_another_tensor_of_its_memory_stays_as_it_is(trained: Any) -> None:
    step, model = trained
    kept = model.large.weight.detach()
    before = kept.clone()
    with pytest.warns(UserWarning, match='another tensor shares the memory of "large.weight"'):
        step(*batch(1))
    assert torch.equal(kept, before)
    assert torch.equal(model.large.weight, Looking.state["large.weight"]["weight"])


@pytest.mark.parametrize("how", ["looks", "normalizes", "data", "whole"])
def test_numbers_are_those_of_one_device(how: str, tmp_path: Path) -> None:
    def found(layout: str) -> Any:
        done = run_script(SCRIPT, tmp_path, layout, how)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "found").read_text())

    assert found("replica=2 server=1 sync=step") == pytest.approx(found(""), rel=1e-11)
