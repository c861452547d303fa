"""The location of the user's caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Optional

__all__ = ["default_folder"]


def default_folder() -> Optional[Path]:
    """Returns the folder ``edgeless`` in the user's cache folder; it need not exist.

    None if the user has no home directory, as in a container that runs under a user id unknown to the system.
    """
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or _at_home("AppData", "Local")
    elif sys.platform == "darwin":
        folder = _at_home("Library", "Caches")
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or _at_home(".cache")
    return Path(folder) / "edgeless" if folder else None


def _at_home(*folders: str) -> Optional[str]:
    home = os.path.expanduser("~")
    return None if home == "~" else os.path.join(home, *folders)
