"""`tutti serve` and `tutti run --servers`: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tutti.cli.main import app

SERVED = "replica=3 server=2 sync=async"


def refused(tmp_path: Path, command: str, *words: str) -> str:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('not to be run')\n")
    result = CliRunner().invoke(app, [command, *words, str(script)])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "--layout", SERVED, "--number", "2"), "--number 0 to 1"),
        (("serve", "--layout", "data=2"), "server=1 in the layout"),
        (("serve", "--layout", SERVED, "--repair"), "--records DIR"),
        (("run", "--layout", "data=2", "--servers", "a:1"), "has no servers"),
        (("run", "--layout", SERVED, "--servers", "a:1,b:1", "-n", "3", "--first", "1"), "0 to 2"),
        (("run", "--layout", SERVED, "--servers", "a:1,b:1", "--first", "3"), "--first"),
        (("run", "--layout", SERVED, "-n", "3"), "-n 5"),
        (("serve", "--layout", SERVED), "TUTTI_SECRET is not set"),
        (("run", "--layout", SERVED, "--servers", "a:1,b:1"), "TUTTI_SECRET is not set"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUTTI_SECRET", raising=False)
    command, *rest = words
    assert says in refused(tmp_path, command, *rest)
