"""A run whose server has no room for its records: the report of the run says so."""

from __future__ import annotations

import functools
import resource
from pathlib import Path

import pytest

from served_runs import played, process_of, wait_for


def _fill(directory: Path, who: str) -> None:
    """After two steps the server's files may not grow any more."""
    wait_for(directory, who, 2)
    (journal,) = (directory / "records" / "server0").glob("journal-*")
    server = process_of(directory, "server0")
    hard = resource.prlimit(server, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(server, resource.RLIMIT_FSIZE, (journal.stat().st_size + 10, hard))


@pytest.mark.parametrize("sync", ["step", "async"])
def test_a_run_without_room_for_records_says_so(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUTTI_RECORDS", str(tmp_path / "records"))
    layout = f"replica=2 server=1 sync={sync}"
    code, said = played(tmp_path, layout, functools.partial(_fill, who="worker0"), steps=2000)
    told, records = capfd.readouterr().err, tmp_path / "records" / "server0"
    assert code != 0
    lack = "the records of this server cannot be kept: a file would exceed the largest"
    assert f"ShortError: server 0 refuses this worker: {lack}" in told
    assert f"({records})" in told and f"{lack}" in said
    assert "Exception ignored" not in said  # nobody asks again at the end of its process
