"""Runs a script of examples/ as a user would."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import psutil
from processes import forking

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 240  # run alone, each takes less than 20 s


def run(name: str, folder: Path, processes: int = 1) -> str:
    """Runs the script in ``folder``, under torchrun for several processes, and returns what it prints.

    Raises AssertionError with its errors and, if it does not end, with the stacks of all processes.
    """
    pid, wait = _start(name, folder) if processes == 1 else _start_several(name, folder, processes)
    code = wait(SECONDS)
    if code is None:
        code = f"none after {SECONDS} s"
        for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):  # it ended with another process
                process.send_signal(signal.SIGABRT)  # faulthandler prints its stacks
                process.wait(SECONDS)
    assert code == 0, f"{name}: exit code {code}\n{(folder / 'errors').read_text()}"
    printed = (folder / "out").read_text()
    assert printed, f"{name} prints what it does"
    return printed


def run_page(page: str, given: Optional[dict[str, Any]] = None) -> int:
    """Runs the Python blocks of a page of docs/ one after the other in one module; returns their number.

    Args:
        given: what the page takes as there, by name. What it puts on a GPU stays on the CPU.
    """
    text = (EXAMPLES.parent / "docs" / page).read_text().replace('"cuda"', '"cpu"')
    module = dict(given or {})
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [(match.start(1), match[1]) for match in found]
    for start, block in blocks:
        lines = "\n" * text.count("\n", 0, start)  # so that an error names the line of the page
        exec(compile(lines + block, page, "exec"), module)
    return len(blocks)


def _start(name, folder):
    """Starts a process in which the script's imports are loaded already."""
    process = multiprocessing.get_context(forking()).Process(target=_script, args=(name, folder))
    process.start()

    def wait(seconds):
        process.join(seconds)
        return process.exitcode

    return process.pid, wait


def _script(name, folder):
    os.chdir(folder)
    for kept, descriptor in (("out", 1), ("errors", 2)):
        os.dup2(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    faulthandler.enable()
    sys.argv = [str(EXAMPLES / name)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _start_several(name, folder, processes):
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONFAULTHANDLER": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # Into files: a pipe stays open while any grandchild lives.
    with open(folder / "out", "w") as out, open(folder / "errors", "w") as errors:
        command = [sys.executable, *start, str(EXAMPLES / name)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=errors)

    def wait(seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)

    return process.pid, wait
