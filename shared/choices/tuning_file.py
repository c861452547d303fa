"""The user's tuning file: the engine measured to be fastest, by op, graph and device.

It is JSON with one decision per line, so that people can read and edit it. A broken file costs its decisions and one
warning, but no call fails. The file is first read when a decision is looked up.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, Optional

from ..files.cache_folder import default_folder
from ..files.file_lock import locked
from ..files.json_files import read_json, shown
from ..files.whole_files import whole_file

__all__ = ["FORMAT", "KEY", "VERSION", "TuningFile", "default_file"]

FORMAT, VERSION = "edgeless-tuning", 1
MOST = 1000  # decisions kept; the oldest are dropped
# The fields of a decision: its key, and the measurement.
KEY = {
    "fingerprint": str, "num_src": int, "num_dst": int, "num_edges": int,
    "device": str, "edgeless": str, "torch": str, "cuda": str,
    "op": str, "side": str, "dtype": str, "width": int, "weighted": bool,
}  # fmt: skip
FOUND = {"engine": str, "ms": dict, "build_ms": (int, float, type(None)), "date": str}

Entry = dict[str, Any]


def default_file() -> Optional[Path]:
    """``EDGELESS_TUNING_FILE``, or ``tuning.json`` in the folder of caches; None where there is no such folder."""
    if (given := named_file()) is not None:
        return given
    folder = default_folder()
    return folder and folder / "tuning.json"


def named_file() -> Optional[Path]:
    """``EDGELESS_TUNING_FILE``, where the user has set it."""
    given = os.environ.get("EDGELESS_TUNING_FILE")
    return Path(given) if given else None


def key_of(entry: Entry) -> tuple:
    """The key of a decision."""
    return tuple(entry[name] for name in KEY)


class TuningFile:
    """Decisions by key. Read once, so that another process cannot change this one's choices.

    Args:
        path: need not exist. None: there is no place for a file, and so no decision.
        engines: the engine names that are valid in a decision.
    """

    def __init__(self, path: Optional[Path], engines: tuple[str, ...]):
        self.path = path
        self._engines = engines
        self._entries: Optional[dict[tuple, Entry]] = None

    def __str__(self) -> str:
        """The path, for messages."""
        return "a file of decisions" if self.path is None else str(self.path)

    def exists(self) -> bool:
        """Returns whether the file exists and is visible to this user."""
        return self.path is not None and os.path.exists(self.path)

    def entries(self) -> dict[tuple, Entry]:
        """All decisions, oldest first; empty, after a warning, if the file is unusable."""
        if self._entries is None:
            try:
                self._entries = self.read()
            except (OSError, ValueError) as error:
                self._entries = {}
                warnings.warn(f"edgeless: no decision is taken from {self}: {error}", stacklevel=2)
        return self._entries

    def read(self) -> dict[tuple, Entry]:
        """The decisions now in the file; empty where there is no file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or from a newer edgeless.
        """
        try:
            held = None if self.path is None else read_json(self.path)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"it {error}") from None
        if held is None:
            return {}
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise ValueError(f"it must have the format {FORMAT!r}")
        version = held.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"it has version {version}, and this edgeless reads up to {VERSION}")
        entries = held.get("decisions")
        if not isinstance(entries, list):
            raise ValueError(f"decisions must be a list, got {type(entries).__name__}")
        for number, entry in enumerate(entries):
            self._check(number, entry)
        return {key_of(entry): entry for entry in entries}

    def _check(self, number: int, entry: Any) -> None:
        for name, kind in {**KEY, **FOUND}.items():
            value = entry.get(name) if isinstance(entry, dict) else None
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"decision {number} must have a {name} of its kind, got {shown(value)}")
        if not all(isinstance(ms, (int, float)) for ms in entry["ms"].values()):
            raise ValueError(f"decision {number} must have numbers for ms, got {shown(entry['ms'])}")
        if entry["engine"] not in self._engines:
            raise ValueError(
                f"decision {number} must name one of {', '.join(self._engines)}, got {shown(entry['engine'])}"
            )

    def add(self, entries: list[Entry]) -> None:
        """Adds decisions to the file's current ones, atomically. An unusable file is left as it is.

        A file lock serialises processes that add at the same time, so that no decisions are lost.

        Raises:
            OSError, ValueError: as :meth:`read`, or the file cannot be written.
        """
        if self.path is None:
            raise FileNotFoundError("this user has no home for it; EDGELESS_TUNING_FILE may name a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path), whole_file(self.path) as half:
            held = self.read()
            for entry in entries:
                held.pop(key_of(entry), None)
                held[key_of(entry)] = entry
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in list(held.values())[-MOST:])
            text = f'{{"format": "{FORMAT}", "version": {VERSION}, "decisions": [\n{lines}\n]}}\n'
            half.write_text(text, encoding="utf-8")
        self._entries = {**self.entries(), **{key_of(entry): entry for entry in entries}}
