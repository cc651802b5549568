"""A user's script, a file or a module: its run as `__main__`, and what is told of its end.

tutti run train.py --lr 0.1           python train.py --lr 0.1
tutti run -m project.train --lr 0.1   python -m project.train --lr 0.1
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tutti.errors import TuttiError

_MODULE = "-m"
_TUTTI = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Script:
    """The path of a file, or the dotted name of a module."""

    name: str
    is_module: bool = False

    @staticmethod
    def of(words: Sequence[str]) -> tuple[Script, list[str]]:
        """A script and its arguments, of `words` and what follows them."""
        if words[0] == _MODULE:
            return Script(words[1], is_module=True), list(words[2:])
        return Script(words[0]), list(words[1:])

    @property
    def words(self) -> list[str]:
        """How a command line names it."""
        return [_MODULE, self.name] if self.is_module else [self.name]

    @property
    def folder(self) -> str:
        """The first folder of `sys.path`."""
        return os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)

    def __str__(self) -> str:
        return self.name

    def run(self, arguments: Sequence[str]) -> None:
        """Run it as `python` does, `folder` being first in `sys.path`.

        Raises:
            TuttiError: there is no such module.
            BaseException: what the script raises.
        """
        sys.argv = [self.words[0], *arguments]
        if not self.is_module:
            runpy.run_path(self.name, run_name="__main__")
            return
        if not (_is_module(self.name) or _is_module(f"{self.name}.__main__")):
            raise TuttiError(
                f"there is no module {self.name} to run",
                why=f"it is looked for in {self.folder} and where Python finds packages",
                fix="its name as in python -m, in the folder that holds its package",
            )
        runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def _is_module(name: str) -> bool:
    """Whether `python -m` can run it: a package alone cannot be run."""
    try:
        found = find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False  # it, or a package that it lies in
        raise
    return found is not None and found.submodule_search_locations is None


def exit_code(end: SystemExit) -> int:
    """The exit code of `sys.exit(...)`, whose text is printed, if it is one."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def error_text(error: BaseException) -> str:
    """A traceback from the script on, without the frames that run it; of a `TuttiError` the message alone."""
    if isinstance(error, TuttiError):
        return f"{type(error).__name__}: {error}"
    shown = _from_script(error)
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip()


def _from_script(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of the user's; none for the script's own syntax error."""
    inner = error.__traceback__
    while inner is not None and _is_ours(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    if inner is None and isinstance(error, SyntaxError):
        return None
    return inner or error.__traceback__


def _is_ours(path: str) -> bool:
    """Whether code belongs to tutti, to torch or to what runs a script."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    roots = [_TUTTI, *([os.path.dirname(torch)] if torch else [])]
    return path == runpy.__file__ or path.startswith(("<frozen ", *(f"{x}{os.sep}" for x in roots)))
