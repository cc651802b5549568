"""`python -m benchmarks`: every benchmark that can be run, a line each."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# Started by others, not by hand.
_PARTS = frozenset({"slow_link", "worker", "__main__"})


def commands() -> Iterator[tuple[str, str]]:
    """Each module that does something when it is run, and the first line of its docstring."""
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text()
        if path.stem not in _PARTS and '__name__ == "__main__"' in text:
            said = ast.get_docstring(ast.parse(text)) or ""
            yield path.stem, said.partition("\n")[0]


def main() -> None:
    """Print the list."""
    listed = [f"  python -m benchmarks.{name:<18} {said}" for name, said in commands()]
    argparse.ArgumentParser(
        "python -m benchmarks",
        description="Benchmarks; the first lines of each file say more:\n\n" + "\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    print("\n".join(listed))


if __name__ == "__main__":
    main()
