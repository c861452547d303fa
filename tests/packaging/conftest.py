"""A checkout of the project, and a way to run things in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout (or the unpacked sdist) that these tests stand in."""
    return ROOT


@pytest.fixture
def python(tmp_path):
    """Runs Python with the given arguments away from the checkout; returns the finished process."""

    def run(*arguments, cwd=tmp_path, **environment):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True,
            text=True,
        )

    return run
