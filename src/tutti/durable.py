"""Names in a folder that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

from tutti.remote_paths import is_remote


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; a remote one keeps them itself."""
    if is_remote(folder):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
