"""Prints the Python that environments are made with: `python3`, or the system's own if its build is faster.

pyenv builds interpreters without profile-guided optimization by default. Loops take half as long again there,
and the tests a tenth longer. The system's own has to be Python 3.11 or newer with `venv` and the headers.
"""

import subprocess
import sys
import sysconfig

_SYSTEM = "/usr/bin/python3"
_USABLE = """
import ensurepip, pathlib, sys, sysconfig, venv
assert sys.version_info >= (3, 11)
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
"""


def is_optimized() -> bool:
    """Whether this interpreter is; distributions pass the flags of their builds in another way."""
    flags = str(sysconfig.get_config_var("CONFIG_ARGS"))
    return "--enable-optimizations" in flags or sys.base_prefix == "/usr"


def is_usable(python: str) -> bool:
    """Whether an interpreter can make the environment."""
    try:
        return not subprocess.run([python, "-c", _USABLE], capture_output=True).returncode  # noqa: S603  # fixed words
    except OSError:
        return False


if __name__ == "__main__":
    print("python3" if is_optimized() or not is_usable(_SYSTEM) else _SYSTEM)
