"""Writes usual_kernels.log, the list of the kernels that the pack of a wheel holds (``tox -e pack``).

Plans name the kernels of attention: those of the suite h200, and of GAT, GATv2 and graph transformers in the shapes
below. The others are taken from logs of the GPU tests: those for float32 and bfloat16 rows. Run, on a machine with a
GPU, and again after changes of kernels' names or parameters:

    EDGELESS_KERNEL_LOG=kernels.log pytest -m cuda tests
    python tests/packaging/usual_kernels.py kernels.log
"""

import argparse
import re
import sys
from pathlib import Path

from edgeless.kernels import Kernel, read_log
from edgeless.tools.cli import compile_command

LIST = Path(__file__).with_name("usual_kernels.log")
SHAPES = [(heads, dim) for heads in (1, 4, 8) for dim in (8, 16, 32, 64, 128)] + [(1, 256)]
OF_PLANS = re.compile(r"attention/cuda/(mma_)?(forward|by_dst|by_src)\.cuh")
SELDOM = re.compile(r"\b(double|__half)\b")


def of_plans() -> set[Kernel]:
    """The kernels of attention, forward and backward, without options and with them."""
    nothing = dict.fromkeys(("graph", "nodes", "edges", "dtype", "suite"))
    ops = [f"{name}_H{heads}_D{dim}" for name in ("gat", "gatv2", "gt") for heads, dim in SHAPES]
    cases = [{"op": [], "suite": "h200"}, {"op": ops, "dtype": ["fp32", "bf16"]}]
    return {k for case in cases for k in compile_command._kernels(argparse.Namespace(**{**nothing, **case}))}


def of_logs(files: list[str]) -> set[Kernel]:
    """The kernels of logs that are usual and that no plan names."""
    logged = {kernel for file in files for kernel in read_log(file)}
    return {k for k in logged if not OF_PLANS.fullmatch(k.header) and not SELDOM.search(k.expression)}


def main(files: list[str]) -> None:
    kernels = sorted(of_plans() | of_logs(files), key=lambda k: (k.header, k.expression))
    LIST.write_text("".join(f"{k.header}\t{k.expression}\tsm_90\n" for k in kernels))
    print(f"{LIST.name}: {len(kernels)} kernels")


if __name__ == "__main__":
    main(sys.argv[1:])
