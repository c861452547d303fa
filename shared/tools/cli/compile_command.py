"""The ``compile`` command: a pack of the CUDA kernels that plans name, made on a machine with or without a GPU.

Ops still launch kernels that nvcc compiled; ``edgeless.kernels`` reads the pack.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from edgeless.kernels import (
    CompileError,
    Kernel,
    NvrtcError,
    compiled_together,
    default_packs,
    identity_of,
    installed_nvrtc,
)
from edgeless.kernels.pack import pack_into
from edgeless.plan import DEVICES

from ..bench.command import SUITES
from ..bench.work import DTYPES
from .devices import UsageError
from .files import check_writable, writing
from .plan_command import graphs_of, ops_of, steps_of, suite_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("op", nargs="*", help="gatv2_H8_D128, gat_H4_D32, gt_H4_D128, ...")
    parser.add_argument("--suite", choices=SUITES, help="every cell of a suite of the bench command")
    parser.add_argument("--graph", nargs="+", help="as for the plan command (default: arxiv)")
    parser.add_argument("--nodes", type=int, help="in place of --graph, with --edges")
    parser.add_argument("--edges", type=int)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: fp32")
    parser.add_argument("--arch", nargs="+", required=True, help="sm_80, sm_90, ...")
    parser.add_argument("--out", type=Path, required=True, help="the pack; EDGELESS_KERNEL_PACKS names it to a process")


def run(args: argparse.Namespace) -> int:
    """Compiles the kernels of every case, without options and with them, and writes the pack."""
    check_writable("--out", args.out)
    architectures = [_architecture(name) for name in args.arch]
    kernels = _kernels(args)
    if not kernels:
        raise UsageError("the plans of these ops name no kernel that is compiled where it runs: only attention's do")
    images = {}
    try:
        packs = default_packs()
    except (OSError, ValueError) as error:
        raise UsageError(f"EDGELESS_KERNEL_PACKS: {error}") from error
    try:
        for architecture in architectures:
            found = compiled_together(kernels, architecture, packs=packs)
            images.update((identity_of(k, architecture), image) for k, image in zip(kernels, found, strict=True))
        compiler = "NVRTC {}.{}".format(*installed_nvrtc().version)
    except (CompileError, NvrtcError) as error:
        raise UsageError(str(error)) from error
    with writing("--out", args.out) as file:
        pack_into(file, images)
    names = ", ".join(map(installed_nvrtc().target, architectures))
    size = sum(len(image.code) for image in images.values())
    print(f"{args.out}: {len(kernels)} kernels for {names}, {size / 1e6:.1f} MB before compression, by {compiler}")
    return 0


def _architecture(name: str) -> int:
    found = re.fullmatch(r"sm_(\d{2,3})", name, re.ASCII)
    if found is None:
        raise UsageError(f"--arch must be names such as sm_90, got {name!r}")
    return int(found[1])


def _kernels(args: argparse.Namespace) -> list[Kernel]:
    """What the plans of the cases name, for every device that plans know."""
    suite = suite_of(args.suite)
    ops = ops_of("compile", args, suite)
    found = {
        Kernel(step.header, step.expression)
        for _, sizes in graphs_of(args, suite)
        for op in ops
        for dtype in args.dtype or suite.get("dtype") or ["fp32"]
        for device in DEVICES.values()
        for options in (False, True)
        for step in steps_of(op, DTYPES[dtype], sizes, device, options)
        if step.expression
    }
    return sorted(found, key=lambda kernel: kernel.expression)
