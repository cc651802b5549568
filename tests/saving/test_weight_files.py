"""Weights in the layout of Hugging Face: read by slices, written in several files, in both directions."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tutti
from captured_once import captured_once
from ranks import Ranks
from tutti.errors import CheckpointError
from tutti.saving import model_file, weight_files
from tutti.saving.weight_files import INDEX_FILE, StoredTensor, stored_in
from tutti.state.deferred import is_deferred

CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    ),
}  # fmt: skip
KINDS: dict[str, Any] = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
TOKENS = torch.arange(8 * 16).view(8, 16) * 7 % 64


def train_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Tensor:
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def built(name: str, *, seed: int = 0, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return KINDS[name](CONFIGS[name])


def made(name: str, layout: str, *, seed: int = 0, device: str = "cpu") -> tutti.Step:
    model = built(name, seed=seed, device=device)
    return tutti.distribute(train_step, model, torch.optim.AdamW(model.parameters(), 1e-3), layout)


def one_step(step: tutti.Step, name: str, device: str = "cpu") -> float:
    """A loss; steps of one name and device share a capture."""
    with captured_once((__name__, name, device)):
        return float(step(TOKENS))


def theirs(name: str, folder: Path, *, seed: int = 1) -> nn.Module:
    """A model that Hugging Face has written in several files."""
    model = built(name, seed=seed)
    model.save_pretrained(folder, max_shard_size="20KB")  # pyright: ignore[reportCallIssue]
    assert (folder / INDEX_FILE).exists()
    return model


def write_and_step(name: str, layout: str, path: str) -> float:
    """Save in several files under a layout; the loss of the next step."""
    step = made(name, layout)
    one_step(step, name)
    with mock.patch.object(model_file, "FILE_NBYTES", 20_000):
        step.save(path)
        step.save(path)
    return one_step(step, name)


@pytest.mark.parametrize(
    ("name", "layout", "n"),
    [
        ("gpt2", "data=2 zero=3", 2),
        ("llama", "pipe=2 micro=2", 2),
        ("llama", "replica=2 sync=average(every=1)", 2),
    ],
)
def test_hugging_face_reads_ours(
    ranks: Ranks, tmp_path: Path, name: str, layout: str, n: int
) -> None:
    """A pipeline's ranks each keep the buffers of rotary embeddings; replicas save those of one."""
    path = tmp_path / INDEX_FILE
    losses = ranks.run(write_and_step, name, layout, str(path), n=n)
    CONFIGS[name].save_pretrained(tmp_path)
    model = KINDS[name].from_pretrained(tmp_path)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss.item()
    found = sum(losses) / n if "replica" in layout else losses[0]
    assert found == pytest.approx(loss, rel=1e-5)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    index = json.loads(path.read_text())
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for f in files for x in load_file(tmp_path / f).values()
    )


def read_and_step(name: str, layout: str, path: str, device: str) -> tuple[list[float], bool]:
    """The losses from weights in files, and whether a model on the meta device stayed there until a call."""
    step = made(name, layout, seed=5, device=device)
    step.load(path)
    waits = is_deferred(step.model)
    return [one_step(step, name, device) for _ in range(2)], waits


@pytest.mark.parametrize(
    ("name", "layout", "device"),
    [
        *(("gpt2", "data=2 zero=3", device) for device in ("cpu", "meta")),
        ("llama", "pipe=2 micro=2", "meta"),
        ("llama", "tensor=2", "meta"),
    ],
)
def test_we_read_theirs(ranks: Ranks, tmp_path: Path, name: str, layout: str, device: str) -> None:
    model = theirs(name, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = [float(train_step(model, optimizer, TOKENS)) for _ in range(2)]
    for found, waits in ranks.run(read_and_step, name, layout, str(tmp_path), device, n=2):
        assert found == pytest.approx(losses, rel=1e-4)
        assert waits == (device == "meta")


class Adapted(nn.Module):
    """A frozen layer and a low-rank addition (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def score(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).sum()


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def adapted_losses(base: nn.Sequential, layout: str | None) -> list[float]:
    model = nn.Sequential(*(Adapted(one) for one in base))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x = torch.linspace(-1, 1, 24).view(4, 6)
    play: Any = functools.partial(adapted_step, model, optimizer)
    if layout is not None:
        play = tutti.distribute(adapted_step, model, optimizer, layout)
    return [float(play(x)) for _ in range(3)]


def loaded_then_adapted(path: str, layout: str) -> list[float]:
    with torch.device("meta"):
        base = layers(0)
    tutti.distribute(score, base, None, layout).load(path)
    return adapted_losses(base, layout)


@pytest.mark.parametrize("layout", ["", "data=2 zero=3"])
def test_loaded_values_follow_their_tensors_into_another_model(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    """A model on the meta device is loaded, and adapted before any call of its own step."""
    path = str(tmp_path / "model.safetensors")
    tutti.distribute(score, layers(3), None, "").save(path)
    wanted = adapted_losses(layers(3), None)
    n = 2 if layout else 1
    for found in ranks.run(loaded_then_adapted, path, layout, n=n):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_on_one_device(tmp_path: Path, device: str) -> None:
    model = theirs("gpt2", tmp_path)
    for path in (tmp_path, tmp_path / INDEX_FILE):
        step = made("gpt2", "", device=device)
        step.load(path)
        if device == "meta":
            one_step(step, "gpt2", device)
            continue
        both = zip(step.model.parameters(), model.parameters(), strict=True)
        assert all(x.equal(y) for x, y in both)


def test_another_dtype_is_cast(tmp_path: Path) -> None:
    model = built("llama", seed=1).bfloat16()
    model.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    step = made("llama", "")
    step.load(tmp_path)
    weight: Any = step.model.get_parameter("lm_head.weight")
    assert weight.dtype == torch.float32
    assert weight.equal(model.get_parameter("lm_head.weight").float())


def chosen(chooses: random.Random, size: int) -> Tensor | None:
    """Some indices of a dim, in order, or None for all of them."""
    count = chooses.randint(-1, size)
    found = sorted(chooses.sample(range(size), max(count, 0)))
    return torch.tensor(found, dtype=torch.int64) if count >= 0 else None


def test_parts_by_brute_force(tmp_path: Path) -> None:
    chooses = random.Random(0)
    for shape in ((), (0, 3), (1,), (7,), (12, 5), (6, 4, 3)):
        x = torch.randn(shape)
        save_file({"x": x}, tmp_path / "x.safetensors")
        stored = StoredTensor(tmp_path / "x.safetensors", "x", shape)
        assert stored.whole().equal(x)
        for nbytes in (1, 40, 2**20):
            with mock.patch.object(weight_files, "PIECE_NBYTES", nbytes):
                for _ in range(8):
                    index = [chosen(chooses, n) for n in shape]
                    wanted = x
                    for dim, at in enumerate(index):
                        wanted = wanted if at is None else wanted.index_select(dim, at)
                    assert stored.part(index).equal(wanted)


def broken(folder: Path) -> dict[str, Callable[[], object]]:
    """Ways to break the files of a model, by the words of the error."""
    index = folder / INDEX_FILE
    known = json.loads(index.read_text())
    first = next(iter(known["weight_map"]))
    file = folder / known["weight_map"][first]

    def renamed(name: str) -> None:
        index.write_text(json.dumps(known | {"weight_map": known["weight_map"] | {first: name}}))

    def flipped() -> None:
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(data)

    return {
        "damaged": flipped,
        "No such file": file.unlink,
        "names the file": lambda: renamed("../elsewhere.safetensors"),
        "no such tensor": lambda: renamed(next(p.name for p in folder.glob("*.safetensors") if p != file)),
        "another model": lambda: shutil.copy(file, folder / "model.safetensors") and index.unlink(),
        "cannot read": lambda: index.write_text("[]"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    ["damaged", "No such file", "names the file", "no such tensor", "another model", "cannot read"],
)
def test_broken_files_are_refused(tmp_path: Path, words: str) -> None:
    step = made("gpt2", "")
    with mock.patch.object(model_file, "FILE_NBYTES", 20_000):
        step.save(tmp_path / INDEX_FILE)
    before = [x.clone() for x in step.model.parameters()]
    broken(tmp_path)[words]()
    with pytest.raises(CheckpointError, match=words):
        step.load(tmp_path)
    assert all(x.equal(y) for x, y in zip(step.model.parameters(), before, strict=True))


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    step = made("gpt2", "")
    with mock.patch.object(model_file, "FILE_NBYTES", 20_000):
        step.save(tmp_path / INDEX_FILE)
        before = sorted(p.name for p in tmp_path.iterdir())
        one_step(step, "gpt2")
        with (
            mock.patch.object(model_file, "_write_index", side_effect=OSError(28, "No space left")),
            pytest.raises(CheckpointError, match="No space left"),
        ):
            step.save(tmp_path / INDEX_FILE)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    step.load(tmp_path)
    assert {one.file.name for one in stored_in(tmp_path / INDEX_FILE).values()} <= set(before)


def test_a_folder_with_a_checkpoint_is_one(tmp_path: Path) -> None:
    step = made("gpt2", "")
    step.save(tmp_path / "run", extra={"note": 3})
    step.save(tmp_path / "run" / "model.safetensors")
    assert step.load(tmp_path / "run") == {"note": 3}
