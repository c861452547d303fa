"""The setting of a measurement, so that the file with its figures suffices to repeat the run."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import torch

import edgeless

from .devices import PACKAGES, describe_device


def setting_of(args: argparse.Namespace, device: torch.device) -> dict:
    """Date, machine, versions and command line of a run, without the folders of this machine.

    Args:
        args: the arguments of the command; ``args.argv`` are the words after ``python -m edgeless``.
    """
    options = {name: value for name, value in vars(args).items() if value is not None and name != "argv"}
    return {
        "date": datetime.date.today().isoformat(),
        "command": command_line(args.argv),
        "device": describe_device(device),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
        "edgeless": edgeless.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package, _ in PACKAGES.values()},
        "options": {name: _without_folder(value) for name, value in options.items()},
    }


def command_line(argv: Sequence[str]) -> str:
    """The command as a reader would type it: DIR in place of a folder, the bare name in place of a file's path."""
    shown = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if Path(value).is_dir() and os.sep in value:
            value = "DIR"
        elif os.sep in value:
            value = Path(value).name
        shown.append(f"{option}{equals}{value}")
    return f"python -m edgeless {shlex.join(shown)}"


def cpu_name() -> str:
    """The processor's model name if the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> Optional[str]:
    """The commit of the checkout that edgeless is imported from, with ``-dirty`` after it where files were changed.

    None where edgeless is installed from a wheel, or there is no git.
    """
    file = Path(edgeless.__file__).resolve()
    try:
        for command in (["ls-files", "--error-unmatch", file.name], ["describe", "--always", "--dirty", "--exclude=*"]):
            found = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_folder(value) -> str:
    return value.name if isinstance(value, Path) else str(value)
