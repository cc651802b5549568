"""The syntax trees of source files, each parsed once in a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """To be read only: every test of a process gets the same one."""
    return ast.parse(path.read_text(), path.name)
