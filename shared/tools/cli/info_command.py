"""The ``info`` command: versions, what this build has, what each framework offers."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import sys
from typing import Optional

import torch

import edgeless
from edgeless import _C
from edgeless.backends import LAYERS
from edgeless.tools.cli.devices import PACKAGES, installed

OPTIONAL = ("torch_sparse", "torch_scatter", "scipy", "pymetis", "scikit-network", "rich", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes no options."""


def run(args: argparse.Namespace) -> int:
    """Prints one line per answer."""
    found = rows()
    width = max(len(name) for name, _ in found)
    for name, text in found:
        print(f"{name:{width}}  {text}")
    return 0


def rows() -> list[tuple[str, str]]:
    """(what, answer) pairs. A framework that is missing or broken is an answer, not an error."""
    found = [
        ("edgeless", edgeless.__version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
        ("CPU kernels", f"built in; chosen on this machine: {_C.cpu_capability()}"),
        ("CUDA kernels", cuda_build()),
        ("GPU", gpus()),
    ]
    found += [(title, framework(short)) for short, (_, title) in PACKAGES.items()]
    found += [(name, version(name) or "not installed") for name in OPTIONAL]
    return found


def version(package: str) -> Optional[str]:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_build() -> str:
    """What this build has for GPUs and, when nothing, what it would take."""
    if not _C.with_cuda:
        if torch.version.cuda is None:
            return f"not built (torch {torch.__version__} is a build without CUDA)"
        return "not built (install edgeless again where nvcc is; EDGELESS_CUDA=1 says why it cannot be)"
    archs = ", ".join(f"sm_{int(arch) // 10}" for arch in _C.cuda_archs.split(","))
    return f"built in for {archs}, CUDA {torch.version.cuda}"


def gpus() -> str:
    """Names of the GPUs that torch sees."""
    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(
        f"{name} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})" for i, name in enumerate(names)
    )


def framework(short: str) -> str:
    """The framework's version and the layers that edgeless has for it."""
    package, _ = PACKAGES[short]
    if not installed(short):
        return f"not installed (pip install 'edgeless[{short}]')"
    try:
        nn = importlib.import_module(f"edgeless.{short}.nn")
        layers = sorted({layer.__name__ for layer in LAYERS.values() if layer.__module__.startswith(nn.__name__)})
        found = getattr(sys.modules.get(package), "__version__", None) or version(package)
        return f"{found}; edgeless.{short}.nn has {', '.join(layers)}"
    except Exception as error:  # whatever a broken framework raises belongs in the table
        return f"{version(package)}, but edgeless.{short} cannot be imported: {error}"
