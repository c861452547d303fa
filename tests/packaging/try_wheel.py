"""Installs the newest wheel of a folder in a fresh environment, without a compiler, and runs the demo there.

Usage: python try_wheel.py WHEELS ENVIRONMENT TORCH
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


def main(wheels: str, environment: str, torch: str) -> None:
    """Raises CalledProcessError where a step fails."""
    wheel = max(Path(wheels).glob("*.whl"), key=lambda file: file.stat().st_mtime).resolve()
    venv.create(environment, with_pip=True, clear=True)
    python = Path(environment).resolve() / "bin" / "python"
    # Nothing but the environment's own programs: no compiler can be found.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    nothing = {**kept, "PATH": str(python.parent)}

    def run(*arguments: str) -> None:
        subprocess.run([python, "-I", *arguments], check=True, env=nothing, cwd=environment)

    run("-m", "pip", "install", "--no-compile", torch, f"{wheel}[pyg,demo]")
    run("-m", "pip", "check")
    run("-m", "edgeless", "info")
    run("-m", "edgeless", "demo", "--nodes", "2000", "--edges", "40000", "--epochs", "3")


if __name__ == "__main__":
    main(*sys.argv[1:])
