"""The user's file of decisions: which engine was measured to be the fastest, for which op on which graph and device.

It is JSON with one decision in a line, for people to read and to edit. Whatever is wrong with it costs its decisions
and one warning, never an answer.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Optional

__all__ = ["FORMAT", "KEY", "VERSION", "TuningFile", "default_file"]

FORMAT, VERSION = "edgeless-tuning", 1
MOST = 1000  # decisions that are kept, the newest
# What a decision is for, and what was found.
KEY = {
    "fingerprint": str, "num_src": int, "num_dst": int, "num_edges": int,
    "device": str, "edgeless": str, "torch": str, "cuda": str,
    "op": str, "side": str, "dtype": str, "width": int, "weighted": bool,
}  # fmt: skip
FOUND = {"engine": str, "ms": dict, "build_ms": (int, float, type(None)), "date": str}

Entry = dict[str, Any]


def default_file() -> Path:
    """``EDGELESS_TUNING_FILE``, or ``edgeless/tuning.json`` in the user's folder of caches."""
    given = os.environ.get("EDGELESS_TUNING_FILE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "edgeless" / "tuning.json"


def key_of(entry: Entry) -> tuple:
    """What a decision is for."""
    return tuple(entry[name] for name in KEY)


class TuningFile:
    """Decisions by what they are for. Read once, so that no other process changes the mind of this one.

    Args:
        path: need not exist.
        engines: the names that a decision may have.
    """

    def __init__(self, path: Path, engines: tuple[str, ...]):
        self.path = path
        self._engines = engines
        self._entries: Optional[dict[tuple, Entry]] = None

    def entries(self) -> dict[tuple, Entry]:
        """All decisions, oldest first; none, after a warning, of a file that cannot be used."""
        if self._entries is None:
            try:
                self._entries = self.read()
            except (OSError, ValueError) as error:
                self._entries = {}
                warnings.warn(f"edgeless: no decision is taken from {self.path}: {error}", stacklevel=2)
        return self._entries

    def read(self) -> dict[tuple, Entry]:
        """What the file holds now, nothing where there is none.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged, or of a newer edgeless.
        """
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return {}
        try:
            held = json.loads(text)
        except ValueError as error:
            raise ValueError(f"it must be JSON, but {error}") from None
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
                raise ValueError(f"decision {number} must have a {name} of its kind, got {value!r}")
        if not all(isinstance(ms, (int, float)) for ms in entry["ms"].values()):
            raise ValueError(f"decision {number} must have numbers for ms, got {entry['ms']!r}")
        if entry["engine"] not in self._engines:
            raise ValueError(f"decision {number} must name one of {', '.join(self._engines)}, got {entry['engine']!r}")

    def add(self, entries: list[Entry]) -> None:
        """Adds decisions to what the file holds by now, in one step. A file that cannot be used is left as it is.

        Raises:
            OSError, ValueError: as :meth:`read`, or it cannot be written.
        """
        held = self.read()
        for entry in entries:
            held.pop(key_of(entry), None)
            held[key_of(entry)] = entry
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in list(held.values())[-MOST:])
        text = f'{{"format": "{FORMAT}", "version": {VERSION}, "decisions": [\n{lines}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            half.write_text(text)
            os.replace(half, self.path)
        finally:
            half.unlink(missing_ok=True)
        self._entries = {**self.entries(), **{key_of(entry): entry for entry in entries}}
