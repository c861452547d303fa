"""Device, threads and frameworks of a command, with errors that say what to install."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

import torch

PACKAGES = {"pyg": ("torch_geometric", "PyTorch Geometric"), "dgl": ("dgl", "DGL")}


class UsageError(Exception):
    """A command cannot do what the user wants; the message is all that is printed."""


def installed(framework: str) -> bool:
    """Returns whether "pyg" or "dgl" can be imported (without importing it)."""
    return importlib.util.find_spec(PACKAGES[framework][0]) is not None


def require(framework: str) -> None:
    """Raises UsageError when a framework is missing."""
    if not installed(framework):
        raise UsageError(
            f"{PACKAGES[framework][1]} is not installed; install it with: pip install 'edgeless[{framework}]'"
        )


def pick_device(name: str) -> torch.device:
    """ "auto" takes the GPU where torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch sees no GPU")
    if int(match[1] or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch sees {torch.cuda.device_count()}, counted from cuda:0")
    return torch.device(name)


def describe_device(device: torch.device, threads: Sequence[int] = ()) -> str:
    """The GPU's name, or the numbers of CPU threads (torch's own where none are given) and the instruction set."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from edgeless import _C

    counts = list(threads) or [torch.get_num_threads()]
    plural = "s" * (counts != [1])
    return f"CPU, {' and '.join(map(str, counts))} thread{plural}, {_C.cpu_capability()}"
