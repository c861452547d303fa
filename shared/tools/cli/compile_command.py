"""The ``compile`` command: a pack of CUDA kernels, made on a machine with or without a GPU.

Plans name the kernels of aggregations; a log names all that a program needed. To record one and read the pack:

    EDGELESS_KERNEL_LOG=kernels.log python train.py
    python -m edgeless compile --kernels kernels.log --arch sm_80 sm_90 --out kernels.pack
    EDGELESS_KERNEL_PACKS=kernels.pack python train.py
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
    read_log,
)
from edgeless.kernels.pack import pack_into
from edgeless.plan.steps import DEVICES

from ..bench.work import DTYPES
from .devices import UsageError
from .files import check_writable, writing
from .plan_command import PLANNED_SUITES, graphs_of, ops_of, steps_of, suite_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("op", nargs="*", help="gatv2_H8_D128, gat_H4_D32, gt_H4_D128, ...")
    parser.add_argument("--suite", choices=PLANNED_SUITES, help="every cell of a suite of ops of the bench command")
    parser.add_argument("--graph", nargs="+", help="as for the plan command (default: arxiv)")
    parser.add_argument("--nodes", type=int, help="in place of --graph, with --edges")
    parser.add_argument("--edges", type=int)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: fp32")
    parser.add_argument(
        "--kernels", nargs="+", type=Path, metavar="FILE",
        help="in place of an op: every kernel of a log, which a program writes if EDGELESS_KERNEL_LOG names the file",
    )  # fmt: skip
    parser.add_argument("--arch", nargs="+", help="sm_80, sm_90, ... (default with --kernels: as in the log)")
    parser.add_argument("--out", type=Path, required=True, help="the pack; EDGELESS_KERNEL_PACKS names it to a process")


def run(args: argparse.Namespace) -> int:
    """Compiles the kernels of a log, or of every case without and with dropout, and writes the pack."""
    check_writable("--out", args.out)
    wanted = _of_logs(args) if args.kernels else _of_plans(args)
    images = {}
    try:
        packs = default_packs()
    except (OSError, ValueError) as error:
        raise UsageError(f"EDGELESS_KERNEL_PACKS: {error}") from error
    try:
        for architecture, kernels in wanted.items():
            found = compiled_together(kernels, architecture, packs=packs)
            images.update((identity_of(k, architecture), image) for k, image in zip(kernels, found, strict=True))
        compiler = "NVRTC {}.{}".format(*installed_nvrtc().version)
    except (CompileError, NvrtcError) as error:
        raise UsageError(str(error)) from error
    with writing("--out", args.out) as file:
        pack_into(file, images)
    names = ", ".join(map(installed_nvrtc().target, wanted))
    count = len({kernel for kernels in wanted.values() for kernel in kernels})
    size = sum(len(image.code) for image in images.values())
    print(f"{args.out}: {count} kernels for {names}, {size / 1e6:.1f} MB before compression, by {compiler}")
    return 0


def _of_logs(args: argparse.Namespace) -> dict[int, list[Kernel]]:
    """The kernels that logs name, by architecture: for those of the log or for those of ``--arch``."""
    given = {"op": args.op, "--suite": args.suite, "--graph": args.graph, "--nodes": args.nodes, "--edges": args.edges}
    for name, value in {**given, "--dtype": args.dtype}.items():
        if value not in (None, []):
            raise UsageError(f"--kernels names the kernels, so {name} has no meaning beside it")
    found: dict[int, set[Kernel]] = {}
    for file in args.kernels:
        try:
            logged = read_log(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"--kernels {file}: {getattr(error, 'strerror', None) or error}") from error
        for kernel, architectures in logged.items():
            for architecture in map(_architecture, args.arch) if args.arch else architectures:
                found.setdefault(architecture, set()).add(kernel)
    if not found:
        raise UsageError(f"--kernels {' '.join(map(str, args.kernels))}: there is no kernel in it")
    return {architecture: _sorted(found[architecture]) for architecture in sorted(found)}


def _of_plans(args: argparse.Namespace) -> dict[int, list[Kernel]]:
    if not args.arch:
        raise UsageError("--arch is needed, as in: --arch sm_90; a log of --kernels has its own")
    architectures = list(map(_architecture, args.arch))
    kernels = _kernels(args)
    if not kernels:
        raise UsageError("the plans of these ops name no kernel; EDGELESS_KERNEL_LOG records those of a program")
    return dict.fromkeys(architectures, kernels)


def _architecture(name: str) -> int:
    found = re.fullmatch(r"sm_(\d{2,3})", name, re.ASCII)
    if found is None:
        raise UsageError(f"--arch must be names such as sm_90, got {name!r}")
    return int(found[1])


def _kernels(args: argparse.Namespace) -> list[Kernel]:
    """The kernels that the plans of the cases name, for every device that plans know."""
    suite = suite_of(args.suite)
    ops = ops_of("compile", args, suite)
    found = {
        Kernel(header, expression)
        for _, sizes in graphs_of(args, suite)
        for op in ops
        for dtype in args.dtype or suite.get("dtype") or ["fp32"]
        for device in DEVICES.values()
        for dropout in (False, True)
        for step in steps_of(op, DTYPES[dtype], sizes, device, dropout)
        for header, expression in step.kernels
    }
    return _sorted(found)


def _sorted(kernels: set[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda kernel: (kernel.expression, kernel.header))
