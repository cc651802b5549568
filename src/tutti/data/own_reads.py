"""The answers that this process's own workers give, or it gives itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

from tutti.data.sample_errors import ReadFailure, lost_worker
from tutti.data.worker_deaths import told_of_deaths
from tutti.data.worker_limits import lacking

# A process whose connection broke has ended, or does so now.
_DEATH_SECONDS = 2.0


class Unread(Protocol):
    """The reason why there is no batch."""

    def throw(self) -> None:
        """Raise the error."""
        ...


class OtherFailure:
    """An error of PyTorch's `DataLoader`, or of a worker outside of any sample."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def throw(self) -> None:
        """Raise the error itself."""
        raise self.error


class OwnReads:
    """The answers of a `DataLoader`'s iterator, one for each request.

    A failure lets go of the iterator, so that its workers end now: one that a traceback holds ends each of
    them 5 seconds after the collector has found it.

    Args:
        source: the iterator.
        reader: its dataset.
    """

    def __init__(self, source: Iterator[dict[str, Any]], reader: Any) -> None:
        self._source: Iterator[dict[str, Any]] | None = source
        self._reader = reader
        self._failed: dict[str, Any] = {}
        self.lost = False  # a worker

    def next(self) -> dict[str, Any] | None:
        """The next answer, with an `Unread` where there is no batch; None at the end."""
        if self._source is None:
            return self._failed
        try:
            with told_of_deaths():
                answer = next(self._source, None)
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            self.fail(_death_behind(error))
            return self._failed
        except Exception as error:
            self.fail(error)
            return self._failed
        if answer is not None and "failure" in answer:
            self._source, self._failed = None, answer
        return answer

    def fail(self, error: Exception) -> None:
        """An error that PyTorch has raised: the next answer is its failure."""
        found = lost_worker(error, self._reader.whereabouts, self._reader.name)
        failure: Unread = OtherFailure(error)
        if found is not None:
            failure, self.lost = ReadFailure(found, RuntimeError(found.why)), True
        elif (short := lacking(error)) is not None:
            failure = ReadFailure(short, error)
        self._source, self._failed = None, {"failure": failure}


def _death_behind(error: Exception) -> Exception:
    """The death of a worker, from which a batch could not be fetched any more; the error if there is none."""
    try:
        with told_of_deaths():
            time.sleep(_DEATH_SECONDS)  # PyTorch's handler of SIGCHLD raises in it
    except RuntimeError as death:
        return death
    return error
