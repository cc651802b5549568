"""Where ranks meet: in a file of their run's own directory, else where torchrun says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.environment import RUN_DIR
from tutti.errors import TuttiError
from tutti.launch.ranks import _rendezvous


@pytest.mark.parametrize("given", [None, ""])
def test_under_torchrun_no_file_is_left(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working directory would hold the addresses of the run before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_DIR.name, raising=False)
    if given is not None:
        monkeypatch.setenv(RUN_DIR.name, given)
    assert _rendezvous(0, 0, 2) == {"init_method": "env://"}
    assert list(tmp_path.iterdir()) == []


def test_under_tutti_run_it_is_in_the_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path))
    assert set(_rendezvous(0, 0, 2)) == {"store", "rank", "world_size"}


@pytest.mark.parametrize("name", ["gone", "file", "closed"])
def test_a_directory_that_cannot_be_used_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `FileStore` there would wait for a file that nobody can write."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setattr("os.access", lambda path, _: not str(path).endswith("closed"))
    monkeypatch.setenv(RUN_DIR.name, str(tmp_path / name))
    with pytest.raises(TuttiError, match=f"TUTTI_RUN_DIR=.*{name} is no directory .* to write in"):
        _rendezvous(0, 0, 2)
