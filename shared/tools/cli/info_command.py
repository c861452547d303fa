"""The ``info`` command: versions, kernels and their compiler, what each framework offers."""

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
from edgeless.choices.backends import LAYERS
from edgeless.kernels import NvrtcError, default_packs, default_store, headers, installed_nvrtc
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
        ("GPU", gpus()),
        ("CUDA kernels", compiler()),
        ("CUDA headers", cuda_headers()),
        ("kernel cache", kernel_cache()),
        ("kernel packs", kernel_packs()),
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


def compiler() -> str:
    """A description of the NVRTC that compiles kernels, or of what is missing."""
    try:
        nvrtc = installed_nvrtc()
    except NvrtcError as error:
        if torch.version.cuda is None:
            return f"not compiled here: torch {torch.__version__} is a build without CUDA, and there is no NVRTC"
        return f"not compiled here: {error}"
    return f"compiled at their first launch by NVRTC {'.'.join(map(str, nvrtc.version))}, {nvrtc.file}"


def cuda_headers() -> str:
    """The folder of the CUDA headers that kernels include, or a description of what is missing."""
    try:
        return str(headers.cuda_headers())
    except NvrtcError as error:
        return str(error)


def kernel_cache() -> str:
    """The folder of compiled kernels, their number and their size."""
    store = default_store()
    if store.folder is None:
        return "none, since this user has no home directory; EDGELESS_KERNEL_CACHE names another folder"
    return f"{store.folder}, {_amount(store.sizes())}"


def _amount(sizes: list[int]) -> str:
    if not sizes:
        return "empty"
    return f"{len(sizes)} kernel{'s' * (len(sizes) > 1)}, {sum(sizes) / 1e6:.1f} MB"


def kernel_packs() -> str:
    """The packs of kernels that are searched before the cache."""
    try:
        packs = default_packs()
    except (OSError, ValueError) as error:
        return f"EDGELESS_KERNEL_PACKS: {error}"
    return ", ".join(f"{pack.file} with {len(pack)}" for pack in packs) or "none"


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
    except Exception as error:  # any error of a broken framework is shown in the table
        return f"{version(package)}, but edgeless.{short} cannot be imported: {error}"
