"""`Checkpoints`: everything comes back, in any layout, or is refused by name."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import runs
import tutti
from captured_once import captured_once
from ranks import Ranks
from resuming.small_run import SmallRun, losses_of
from tutti.environment import ROLE
from tutti.errors import CheckpointError, TuttiError
from tutti.resuming.due import Due

STEPS, SAVED = 12, 8
EVERY = {"every": SAVED}


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    """All runs of this process share it."""
    with captured_once("small run"):
        yield


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """Makes runs in one folder, on one device, and closes them."""
    made = []

    def make(**options: Any) -> SmallRun:
        made.append(SmallRun(tmp_path / "run", **options))
        return made[-1]

    yield make
    for run in made:
        run.checkpoints.close()


def test_a_restored_run_has_the_losses_of_an_undisturbed_one_on_one_device(tmp_path: Path) -> None:
    expected = losses_of(str(tmp_path / "a"), "", STEPS, EVERY)
    assert losses_of(str(tmp_path / "b"), "", SAVED, EVERY) == expected[:SAVED]
    torch.manual_seed(1)  # batches go on from the saved generator
    assert losses_of(str(tmp_path / "b"), "", STEPS, EVERY) == expected[SAVED:]


@pytest.mark.parametrize("layout", ["data=2 zero=3", "pipe=2 micro=2"])
def test_a_restored_run_has_the_losses_of_an_undisturbed_one(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    """To the bit in the layout of the save, to rounding in another one."""
    other = "tensor=2"
    expected = ranks.run(losses_of, str(tmp_path / "a"), layout, STEPS, EVERY, n=2)[0]
    for name in "bc":
        found = ranks.run(losses_of, str(tmp_path / name), layout, SAVED, EVERY, n=2)
        assert found == [expected[:SAVED]] * 2
    assert (
        ranks.run(losses_of, str(tmp_path / "b"), layout, STEPS, EVERY, n=2)
        == [expected[SAVED:]] * 2
    )
    for found in ranks.run(losses_of, str(tmp_path / "c"), other, STEPS, EVERY, n=2):
        np.testing.assert_allclose(found, expected[SAVED:], rtol=1e-6)


def test_numbers_of_the_optimizer_come_back(alone: Any) -> None:
    run = alone()
    run.until(3)
    group = run.optimizer.param_groups[0]
    expected = {k: x for k, x in group.items() if k != "params"}
    run.checkpoints.save()
    again = alone()
    assert again.optimizer.param_groups[0]["lr"] != expected["lr"]
    assert again.checkpoints.restore() == 3
    found = {k: x for k, x in again.optimizer.param_groups[0].items() if k != "params"}
    assert found == expected and again.schedule.get_last_lr() == [expected["lr"]]


def test_restore_of_no_checkpoint_changes_nothing(alone: Any) -> None:
    run = alone()
    assert run.checkpoints.restore() is None
    assert run.checkpoints.steps() == [] and run.checkpoints.latest is None


def test_several_steps_are_one_checkpoint(tmp_path: Path) -> None:
    def made() -> tuple[tutti.Checkpoints, list[tutti.Step], torch.Generator]:
        torch.manual_seed(0)
        steps = []
        for _ in range(2):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            steps.append(tutti.distribute(train_step, model, optimizer))
        generator = torch.Generator().manual_seed(3)
        made = tutti.Checkpoints(tmp_path, writer=steps[0], critic=steps[1], generator=generator)
        return made, steps, generator

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def play(steps: list[tutti.Step], generator: torch.Generator) -> list[float]:
        x = torch.randn(4, 2, generator=generator)
        return [step(x).item() for step in steps]

    run, steps, generator = made()
    play(steps, generator)
    run.save()
    expected = play(steps, generator)
    again, steps, generator = made()
    assert again.restore() == 1
    assert play(steps, generator) == expected
    assert (tmp_path / "step-00000001" / "part-critic" / "tutti.json").exists()
    assert steps[1].load(tmp_path / "step-00000001" / "part-critic") == {}
    run.close()


def test_a_step_loads_the_checkpoint_of_a_run(alone: Any) -> None:
    run = alone()
    run.until(2)
    path = run.checkpoints.save()
    other = alone()
    other.step.load(path)
    assert other.step.num_steps == 2
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def with_shards(folder: str, layout: str, last: int) -> list[Any]:
    """A run with an average of its sharded weights as a part; the average, whole, after step `last`."""
    average: dict[str, Any] = {}
    run = SmallRun(folder, layout, average_of_weights=average)
    with run.checkpoints as checkpoints:
        run.step(torch.ones(12, 8), torch.ones(12, 4))  # lays out the weights
        if not checkpoints.restore():
            run.until(last)
            average.update({n: x.detach().clone() for n, x in run.model.named_parameters()})
            checkpoints.save()
    kinds = {isinstance(x, DTensor) for x in average.values()}
    return [kinds, {n: runs.whole(x).numpy() for n, x in average.items()}]


def test_shards_in_the_state_of_a_part(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    (kinds, expected), _ = ranks.run(with_shards, path, "data=2 zero=3", 3, n=2)
    assert kinds == {True}
    for kinds, found in (
        with_shards(path, "", 3),
        *ranks.run(with_shards, path, "tensor=2", 3, n=2),
    ):
        assert kinds == {False}  # the new dict had no shards at the restore
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)


def with_other_random_states(folder: str) -> list[bool]:
    """Whether torch's and Python's generators are as after the save, on a restored rank."""
    run = SmallRun(folder, "data=2")
    with run.checkpoints as checkpoints:
        run.one()
        random.seed(dist.get_rank())  # a rank's own; torch's is common to all
        checkpoints.save()
        expected = torch.get_rng_state()
        torch.manual_seed(7)
        random.seed(8)
        before = random.getstate()
        checkpoints.restore()
    return [torch.equal(torch.get_rng_state(), expected), random.getstate() == before]


def test_random_states_come_back_if_all_ranks_have_the_same(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(with_other_random_states, str(tmp_path / "run"), n=2)
    assert found == [[True, True]] * 2


def restored(folder: str) -> tuple[int | None, list[str]]:
    """The step that all ranks restore, and this rank's warnings."""
    run = SmallRun(folder, "data=2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.checkpoints.restore()
    return found, [str(one.message) for one in caught if "left out" in str(one.message)]


def test_ranks_agree_on_the_newest_whole_one(ranks: Ranks, alone: Any) -> None:
    run = alone(every=2)
    run.until(4)
    damage(run.checkpoints._folder / "step-00000004", "a bit")
    (first, said), (second, nothing) = ranks.run(restored, str(run.checkpoints._folder), n=2)
    assert first == second == 2 and len(said) == 1 and not nothing


# Retention


def folders(run: SmallRun) -> list[int]:
    names = [p.name for p in run.checkpoints._folder.iterdir() if p.name != "lock"]
    return sorted(int(name.removeprefix("step-")) for name in names)


def test_the_newest_stay(alone: Any) -> None:
    run = alone(every=2, keep=2)
    run.until(9)
    assert folders(run) == run.checkpoints.steps() == [6, 8]
    assert run.checkpoints.latest is not None and run.checkpoints.latest.name == "step-00000008"


@pytest.mark.parametrize(("keep_best", "best"), [("score", 4), ("-score", 6)])
def test_the_best_stays(alone: Any, keep_best: str, best: int) -> None:
    run = alone(every=2, keep=1, keep_best=keep_best)
    scores = {2: 0.5, 4: 0.1, 6: 0.9, 8: 0.5, 10: math.nan}
    for count in range(1, 11):
        run.step(torch.randn(12, 8), torch.randn(12, 4))
        run.checkpoints.tick(**({"score": scores[count]} if count in scores else {}))
    assert folders(run) == [best, 10]


@pytest.mark.parametrize(
    ("losses", "staying"),
    [
        ([0.5, 0.4, math.nan, math.nan, math.nan], [2, 4, 5]),
        ([0.5, 0.4, math.nan, math.nan, 0.3], [4, 5]),
        ([math.nan] * 5, [4, 5]),
    ],
    ids=["lost", "found again", "always"],
)
def test_the_last_one_without_nan_stays(
    alone: Any, losses: list[float], staying: list[int]
) -> None:
    """Else all that stay would hold the weights of a run that is lost."""
    run = alone(every=1, keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses:
            run.step(torch.randn(12, 8), torch.randn(12, 4))
            run.checkpoints.tick(loss=loss)
    assert folders(run) == staying
    said = [str(one.message) for one in caught if "has loss=nan" in str(one.message)]
    assert len(said) == 1 and f"step {1 + [*map(math.isnan, losses)].index(True)} " in said[0]


def test_what_others_have_made_stays(alone: Any) -> None:
    run = alone(every=1, keep=1)
    run.until(1)
    folder = run.checkpoints._folder
    for name in ("notes", "step-1", "step-00000000"):
        (folder / name).mkdir()
    run.step.save(folder / "step-00000001.mine")
    run.until(4)
    names = {p.name for p in folder.iterdir()}
    assert {"notes", "step-1", "step-00000000", "step-00000001.mine", "step-00000004"} <= names
    assert run.checkpoints.steps() == [4]


def test_leftovers_of_killed_saves_are_removed(alone: Any) -> None:
    run = alone()
    folder = run.checkpoints._folder
    for name in (".step-00000007.new", ".step-00000003.old", ".step-notes"):
        (folder / name / "state").mkdir(parents=True)
    run.until(1)
    run.checkpoints.save()
    assert {p.name for p in folder.iterdir()} == {"lock", ".step-notes", "step-00000001"}


# Refusals


class Stateless:
    """No state."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "10 parsecs"}, "every='10 parsecs'"),
        ({"keep": 0}, "keep=0"),
        ({"keep_best": 3}, "keep_best=3 is of type int"),
        ({"keep_best": ""}, 'keep_best="" names no metric'),
        ({"keep_best": "-"}, 'keep_best="-" names no metric'),
        ({"asynchronous": "yes"}, "asynchronous='yes' is of type str"),
        ({"loader": Stateless()}, 'the part "loader" has no state'),
    ],
)
def test_arguments_are_checked(alone: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TuttiError, match=said):
        alone(**options)


@pytest.mark.parametrize("folder", [None, 3, b"runs", ""])
def test_a_folder_that_is_no_path(folder: Any) -> None:
    with pytest.raises(TuttiError, match="folder=") as caught:
        SmallRun(folder)
    assert caught.value.fix


def test_a_metric_of_the_best_that_tick_never_gets_is_told(alone: Any) -> None:
    run = alone(every=1, keep=2, keep_best="acuracy")
    for _ in range(4):
        run.step(torch.randn(12, 8), torch.randn(12, 4))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            run.checkpoints.tick(accuracy=0.5)
        told = [str(one.message) for one in heard if "keep_best" in str(one.message)]
        assert bool(told) is (run.step.num_steps == 2)
        assert all('keep_best="acuracy"' in text and "got accuracy" in text for text in told)


def test_the_folder_of_a_run_is_no_checkpoint(alone: Any, tmp_path: Path) -> None:
    run = alone(every=1)
    run.until(2)
    with pytest.raises(CheckpointError, match="the folder of a run") as caught:
        run.step.load(tmp_path / "run")
    assert str(tmp_path / "run" / "step-00000002") in caught.value.fix


def test_parts_that_a_step_saves_are_refused(alone: Any) -> None:
    run = alone()
    for extra in (run.model, run.optimizer):
        with pytest.raises(TuttiError, match='the part "more" would be saved twice'):
            tutti.Checkpoints("folder", step=run.step, more=extra)
    evaluate = tutti.distribute(lambda model, x: model(x), run.model)
    with pytest.raises(TuttiError, match='the part "more" would be saved twice'):
        tutti.Checkpoints("folder", step=run.step, more=evaluate)
    with pytest.raises(TuttiError, match="needs the step"):
        tutti.Checkpoints("folder", schedule=run.schedule)


def test_a_state_that_cannot_be_saved_is_refused_by_its_keys_before_any_write(alone: Any) -> None:
    run = alone(more={"a": [1, print]})
    run.until(1)
    with pytest.raises(CheckpointError, match=r"more\['a'\]\[1\] cannot be saved"):
        run.checkpoints.save()
    assert folders(run) == []


def test_other_parts_are_refused_by_name(alone: Any) -> None:
    run = alone(one={"a": 1}, two={"a": 2})
    run.until(1)
    run.checkpoints.save()
    other = alone(two={"a": 0}, three={"a": 3})
    with pytest.raises(CheckpointError) as caught:
        other.checkpoints.restore()
    assert 'it has "one", which this run lacks; it lacks "three"' in caught.value.why
    assert "strict=False" in caught.value.fix and other.step.num_steps == 0
    assert other.checkpoints.restore(strict=False) == 1
    assert other.checkpoints._parts.others["two"] == {"a": 2}
    assert other.checkpoints._parts.others["three"] == {"a": 3}


def test_another_model_is_refused(alone: Any, tmp_path: Path) -> None:
    run = alone()
    run.until(1)
    run.checkpoints.save()
    model = nn.Linear(3, 3)
    step = tutti.distribute(lambda model, x: model(x), model)
    other = tutti.Checkpoints(tmp_path / "run", step=step)
    with pytest.raises(CheckpointError, match="another model") as caught:
        other.restore(strict=False)
    assert "strict=False leaves out parts of the run, and no tensors" in caught.value.why
    assert "same model" in caught.value.fix


def test_a_folder_with_later_steps_is_refused(alone: Any) -> None:
    run = alone(every=2)
    run.until(4)
    anew = alone(every=2)
    with pytest.raises(CheckpointError, match="holds step 4 of another run"):
        anew.until(1)
    assert folders(run) == [2, 4]
    again = alone(every=2)
    again.checkpoints.restore()
    again.until(6)
    assert folders(run) == [2, 4, 6]


def test_a_second_run_in_the_folder_is_refused_with_the_first(alone: Any, tmp_path: Path) -> None:
    run, told = alone(every=1), tmp_path / "told"
    run.until(1)
    pid = os.fork()
    if not pid:
        try:
            alone(every=1).until(1)
        except CheckpointError as error:
            told.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert "another run saves into" in told.read_text()
    assert f"process {os.getpid()} on" in told.read_text() and folders(run) == [1]


def test_a_worker_that_takes_over_saves_after_the_newest_step(
    alone: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker 0 was ahead: its step has the later state. Afterwards the folder is free for worker 0 again."""
    first = alone(every=8)
    first.until(8)
    first.checkpoints.close()
    first.checkpoints._saver._lock = None
    monkeypatch.setenv(ROLE.name, "worker 1")
    second = alone(every=4)
    second.until(8)
    assert second.checkpoints.steps() == [8] and "holds step 8" in capsys.readouterr().err
    second.until(12)
    assert second.checkpoints.steps() == [8, 12] and not capsys.readouterr().err
    assert second.checkpoints._saver._lock is None


def test_rhythms() -> None:
    due = Due(10)
    due.begin(3)
    assert [k for k in range(4, 31) if due.by_steps(k)] == [10, 20, 30]
    assert [k for k in (35, 41, 49, 62) if due.by_steps(k)] == [41, 62]
    assert not due.by_time() and not Due(None).by_steps(10)
    with pytest.raises(TuttiError, match="neither a number of steps nor a time"):
        Due("1e-9")
    due = Due("0.00001 min")
    time.sleep(0.002)
    assert due.by_time() and not due.by_steps(100)
    assert not Due("2 h").by_time()


def test_a_metric_that_is_no_number_is_refused(alone: Any) -> None:
    run = alone()
    for bad in ({"loss": "1"}, {"loss": torch.ones(2)}, {"step": 1}, {"loss": None}):
        with pytest.raises(TuttiError, match=f'the metric "{next(iter(bad))}" cannot be kept'):
            run.checkpoints.tick(**bad)


# Damage


def damage(path: Path, how: str) -> None:
    """Damage a checkpoint."""
    (data,) = path.glob("state-*/*.distcp")
    if how == "a bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "truncated":
        data.write_bytes(data.read_bytes()[:-10])
    elif how == "no manifest":
        (path / "tutti.json").unlink()
    elif how == "the record":
        text = (path / "tutti.json").read_text()
        (path / "tutti.json").write_text(text.replace('"metrics"', '"metricz"'))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a bit", "checksum"),
        ("truncated", "truncated"),
        ("no manifest", "no checkpoint|tutti.json"),
        ("the record", "checksum"),
    ],
)
def test_a_damaged_checkpoint_is_left_out(alone: Any, how: str, reason: str) -> None:
    run = alone(every=2)
    expected = run.until(7)
    damage(run.checkpoints._folder / "step-00000006", how)
    again = alone(every=2)
    with pytest.warns(UserWarning, match=f"step-00000006 is left out: .*({reason})") as caught:
        assert again.checkpoints.restore() == 4
    assert len(caught) == 1
    assert again.until(7) == expected[4:]  # and step 6 is saved anew
    assert run.checkpoints.steps() == [2, 4, 6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert alone().checkpoints.restore() == 6


def test_damaged_checkpoints_alone_are_an_error(alone: Any) -> None:
    run = alone(every=2)
    run.until(4)
    for step in (2, 4):
        damage(run.checkpoints._folder / f"step-0000000{step}", "truncated")
    with (
        pytest.warns(UserWarning),
        pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"),
    ):
        alone().checkpoints.restore()


@pytest.mark.parametrize("how", ["copied", "renamed"])
def test_a_checkpoint_under_the_name_of_another_step_is_left_out(alone: Any, how: str) -> None:
    run = alone(every=2)
    expected = run.until(7)
    right, wrong = (run.checkpoints._folder / f"step-{k:08}" for k in (6, 30))
    shutil.copytree(right, wrong) if how == "copied" else right.rename(wrong)
    again = alone(every=2)
    said = "step-00000030 is left out: .* it holds step 6, .* remove it, or name it step-00000006"
    with pytest.warns(UserWarning, match=said) as caught:
        restored = again.checkpoints.restore()
    assert restored == (6 if how == "copied" else 4) and len(caught) == 1
    assert again.until(7) == expected[restored:]
    assert run.checkpoints.steps() == [2, 4, 6] or run.checkpoints.steps() == [4, 6]
    assert wrong.exists()  # it may be the only one of its step


def test_later_steps_of_another_run_are_named(alone: Any) -> None:
    again = alone(every=2, keep=None)
    run = alone(every=2, keep=None)
    run.until(4)
    run.checkpoints.close()
    again.checkpoints.restore()
    del run
    for other in (6, 8):
        folder = again.checkpoints._folder
        made = SmallRun(folder.with_name("made"), every=other, keep=None)
        made.until(other)
        made.checkpoints.close()
        (folder.with_name("made") / f"step-{other:08}").rename(folder / f"step-{other:08}")
        shutil.rmtree(folder.with_name("made"))
    with pytest.raises(CheckpointError, match="holds step 8 of another run") as caught:
        again.one()
    assert "remove step-00000006, step-00000008, or choose another folder" in str(caught.value)


def test_a_link_to_nothing_is_refused(alone: Any, tmp_path: Path) -> None:
    run = alone(every=1)
    run.checkpoints._folder.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="is a link to nothing") as caught:
        run.checkpoints.restore()
    assert "there is no nowhere" in str(caught.value)
    with pytest.raises(CheckpointError, match="is a link to nothing"):
        run.one()
    with pytest.raises(CheckpointError, match="is a link to nothing"):
        run.step.save(run.checkpoints._folder)


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_what_is_no_folder_under_a_name_of_a_step_makes_room(
    alone: Any, tmp_path: Path, kind: str
) -> None:
    run = alone(every=2)
    run.until(1)
    place = run.checkpoints._folder / "step-00000002"
    (tmp_path / "elsewhere").mkdir()
    place.write_text("") if kind == "file" else place.symlink_to(
        tmp_path / ("elsewhere" if kind == "link" else "nowhere")
    )
    run.until(2)
    assert {p.name for p in run.checkpoints._folder.iterdir()} == {"lock", "step-00000002"}
    assert run.checkpoints.steps() == [2] and (tmp_path / "elsewhere").exists()


def test_a_full_disk_costs_a_save_and_nothing_else(alone: Any, tmp_path: Path) -> None:
    expected = losses_of(str(tmp_path / "other"), "", 6, {})
    run = alone(every=2)
    losses = run.until(3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000004"):
            run.one()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folders(run) == run.checkpoints.steps() == [2] and run.step.num_steps == 4
    assert losses + [expected[3]] + run.until(6) == expected
    assert folders(run) == [2, 6]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (MemoryError(), "more memory for this process"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "more memory for this process"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "with room for the checkpoint"),
        (OSError(errno.EFBIG, "File too large", "x"), "ulimit -f"),
    ],
)
def test_the_fix_is_about_what_a_save_lacks(
    alone: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, fix: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    run = alone(every=2)
    run.until(1)
    monkeypatch.setattr("tutti.checkpoint.folder.sync_folder", fail)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
        run.one()
    assert fix in caught.value.fix


def test_a_folder_that_cannot_be_made_is_an_error() -> None:
    run = SmallRun("/proc/no/run")
    with pytest.raises(CheckpointError, match="cannot save into /proc/no/run"):
        run.one()
    assert run.step.num_steps == 1
