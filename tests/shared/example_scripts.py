"""Runs a script of examples/ as a user would."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 240  # alone none of them takes twenty


def run(name: str, folder: Path, processes: int = 1) -> str:
    """What the script prints, run in ``folder``, under torchrun if by several.

    AssertionError with its errors, and with the stacks of all processes where it does not end.
    """
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, *start, str(EXAMPLES / name)]
    # Into files: a pipe stays open while any grandchild lives.
    with open(folder / "out", "w") as out, open(folder / "errors", "w") as errors:
        started = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=errors)
        try:
            code = started.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
            for process in (*psutil.Process(started.pid).children(recursive=True), started):
                with contextlib.suppress(psutil.NoSuchProcess):  # ended with another
                    process.send_signal(signal.SIGABRT)  # it says where it stands
                    process.wait()
    assert code == 0, f"{name}: exit code {code}\n{(folder / 'errors').read_text()}"
    printed = (folder / "out").read_text()
    assert printed, f"{name} prints what it does"
    return printed
