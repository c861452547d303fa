"""Runs a script of examples/ as a user would."""

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 120  # ten times what any of them takes


def run(name: str, folder: Path, processes: int = 1) -> str:
    """What the script prints, run in ``folder``, under torchrun if by several; AssertionError with its errors.

    Several processes that hang are started once more: two of them were seen to hang once in some hundred runs, with
    nothing known of where. The first ones' stacks are in the warning.
    """
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *start, str(EXAMPLES / name)]
    code, out, errors = _finish(command, folder)
    if code is None and processes > 1:
        warnings.warn(f"{name} hung in {processes} processes:\n{errors}", stacklevel=2)
        code, out, errors = _finish(command, folder)
    assert code == 0, errors
    assert out, f"{name} prints what it does"
    return out


def _finish(command: list[str], folder: Path):
    """(exit code, output, errors); the code is None where it did not end, and the errors end in all stacks."""
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONFAULTHANDLER": "1"}
    # Into files: a pipe stays open while any grandchild lives.
    with open(folder / "out", "w") as out, open(folder / "errors", "w") as errors:
        started = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=errors)
        try:
            code = started.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            for process in (*psutil.Process(started.pid).children(recursive=True), started):
                with contextlib.suppress(psutil.NoSuchProcess):  # ended with another
                    process.send_signal(signal.SIGABRT)  # it says where it stands
                    process.wait()
    return code, (folder / "out").read_text(), (folder / "errors").read_text()
