"""Runs a script of examples/ as a user would."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, folder: Path, processes: int = 1) -> str:
    """What the script prints, run in ``folder``, under torchrun if by several; AssertionError with its errors."""
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {"OMP_NUM_THREADS": "2", **os.environ}
    done = subprocess.run(
        [sys.executable, *start, str(EXAMPLES / name)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, f"{name} prints what it does"
    return done.stdout
