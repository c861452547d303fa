"""A writer of tuning decisions, in a module that other processes can import."""

from pathlib import Path

from edgeless.choices.engines import ENGINES
from edgeless.choices.tuning_file import TuningFile

DECISION = {
    "fingerprint": "a", "num_src": 1, "num_dst": 1, "num_edges": 1, "device": "d", "edgeless": "0", "torch": "2",
    "cuda": "12", "op": "spmm", "side": "by_dst", "dtype": "float32", "width": 1, "weighted": False,
    "engine": "rowsplit", "ms": {"rowsplit": 1.0}, "build_ms": 1.0, "date": "2026-01-01",
}  # fmt: skip


def decide(path, first, count):
    file = TuningFile(Path(path), ENGINES)
    for width in range(first, first + count):
        file.add([{**DECISION, "width": width}])
