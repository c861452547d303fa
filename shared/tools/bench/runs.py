"""Writes a run of ``python -m edgeless bench --json``, and reads the committed ones with those of ``demo --json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from edgeless.tools.cli.files import writing

DEMO = "demo"  # the suite name of runs of `python -m edgeless demo`


class Rows(list):
    """The rows that a command measures. After every case they are written to the file of ``--json``, if there is one: a
    long run that breaks off leaves what it has.
    """

    def __init__(self, file: Optional[Path], setting: dict):
        super().__init__()
        self._file, self._setting = file, setting

    def keep(self, more: list[dict]) -> None:
        """Adds the rows of a case."""
        self.extend(more)
        if self._file:
            with writing("--json", self._file) as file:
                file.write_text(json.dumps({"setting": self._setting, "results": self}, indent=1))


@dataclass
class Suite:
    """Every run of one suite; a suite may be measured in parts.

    Attributes:
        settings: the :func:`edgeless.tools.cli.setting.setting_of` of each run.
        rows: every measured cell of all runs.
    """

    settings: list[dict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)

    def graphs(self) -> list[str]:
        """The measured graphs, in the order of the runs."""
        return list(dict.fromkeys(row["graph"] for row in self.rows))

    def cases(self) -> list[tuple[str, str]]:
        """The measured (name, dtype) pairs, in the order of the runs."""
        return list(dict.fromkeys((row["case"]["name"], row["case"]["dtype"]) for row in self.rows))

    def find(self, graph: str, case: tuple[str, str], peer: str, **wanted) -> Optional[dict]:
        """The row of one cell; None if it was not measured or failed."""
        row = self._row(graph, case, peer, wanted)
        return None if row is None or row["failed"] else row

    def why_not(self, graph: str, case: tuple[str, str], peer: str, **wanted) -> Optional[str]:
        """The reason why the figure of one cell is missing, if the run recorded one."""
        row = self._row(graph, case, peer, wanted)
        return None if row is None else row["failed"]

    def _row(self, graph: str, case: tuple[str, str], peer: str, wanted: dict) -> Optional[dict]:
        for row in self.rows:
            same = (row["graph"], (row["case"]["name"], row["case"]["dtype"]), row["peer"]) == (graph, case, peer)
            if same and all(row.get(key) == value for key, value in wanted.items()):
                return row
        return None


def read(folder: Path) -> dict[str, Suite]:
    """Suite -> its runs, from every JSON file of ``folder``.

    Raises:
        ValueError: two files hold the same cell; every figure must come from one run.
    """
    suites: dict[str, Suite] = {}
    seen: dict[tuple, str] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        if "results" not in content:
            suite = suites.setdefault(DEMO, Suite())
            suite.rows.append(content)
        else:
            name = content["setting"]["options"].get("suite", file.stem)
            suite = suites.setdefault(name, Suite())
            for row in content["results"]:
                other = seen.setdefault((*_cell(row), name), file.name)
                if other != file.name:
                    raise ValueError(f"{file.name} and {other} both hold {row['graph']} {_name(row)}")
            suite.rows += content["results"]
        suite.settings.append(content["setting"])
    return suites


def _cell(row: dict) -> tuple:
    if "case" in row:
        return (*row["case"].values(), *(row.get(key) for key in ("graph", "peer", "mode", "threads")))
    names = ("graph", "model", "dtype", "way", "carrier", "average", "prefetched", "seeds", "batch_size", "peer")
    return tuple(row.get(name) for name in names)


def _name(row: dict) -> str:
    return row["case"]["name"] if "case" in row else row["model"]


def geometric_mean(ratios: list[float]) -> float:
    """The geometric mean; NaN for an empty list."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
