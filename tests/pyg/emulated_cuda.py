"""Generated kernels on the CPU: their texts, compiled by the machine's compiler, with coroutines as a block's threads.

It finds wrong indices, missing barriers and exchanges that not all lanes take part in, without a GPU. It does not know
what a GPU's compiler makes of the text.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import torch

from edgeless.kernels.provider import kernel_named
from edgeless.programs import blocks, cuda_walks

OURS = Path(__file__).parent / "emulated"
CORE = Path(__file__).parents[2] / "core_cuda"
PROCESSORS = 2
Graph = namedtuple("Graph", "csr csc max_degrees_at_hand")


def _replaced(text: str) -> str:
    """A header without the instructions that it has as assembler, and without declarations that C++ does not know."""
    text = re.sub(r'asm\("ex2[^\n]*', "y = exp2f(x);", text)
    text = re.sub(r'asm\("mma.*?\);', "multiply_tf32(c, a, b, fresh);", text, flags=re.DOTALL)
    text = text.replace("#if __CUDA_ARCH__ >= 800", "#if 1")
    return text.replace("extern __shared__ uint4 dynamic[];", "uint4* const dynamic = dynamic_memory;")


class Emulator:
    """Launches kernels on tensors of the CPU.

    Args:
        folder: for what is compiled.
        last_first: whether a block's last thread runs first.
    """

    def __init__(self, folder: Path, last_first: bool = False):
        self.folder, self.last_first = folder, last_first
        self.kernels: dict[tuple[str, str], ctypes.CDLL] = {}
        self.ran: list[str] = []
        self.headers = folder / "headers"
        for path in [*CORE.glob("*.h"), *(p for d in ("common", "programs") for p in (CORE / d).glob("*.*h"))]:
            place = self.headers / path.relative_to(CORE)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(_replaced(path.read_text()))
        for part in ("attention", "spmm"):  # thresholds.h knows their kinds
            shutil.copytree(CORE / part, self.headers / part, ignore=shutil.ignore_patterns("*.cpp", "cpu", "cuda"))

    def launch(self, header, expression, grid, words, stream, shared=0) -> None:
        """In place of the launch on a GPU."""
        if (header, expression) not in self.kernels:
            self.kernels[header, expression] = self._compiled(header, expression)
        self.kernels[header, expression].run(words, grid[0], grid[1], shared)
        self.ran.append(expression)

    def _compiled(self, header: str, expression: str) -> ctypes.CDLL:
        args = re.search(r"edgeless::cuda::programs::p[0-9a-f]+", expression).group() + "::Args"
        text = f"""#include "threads.h"
{kernel_named(header, expression).source.replace("#pragma unroll", "")}
extern "C" void run(const void* args, int width, int height, int shared) {{
  std::vector<uint4> memory(shared / 16 + 1, uint4{{~0u, ~0u, ~0u, ~0u}});
  dynamic_memory = memory.data();
  gridDim = {{unsigned(width), unsigned(height), 1}};
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {{
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
      threads::run_block([&] {{ {expression}(*static_cast<const {args}*>(args)); }});
    }}
  }}
}}
"""
        name = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        source, library = name.with_suffix(".cpp"), name.with_suffix(".so")
        source.write_text(text)
        options = ["-std=c++20", "-O1", "-w", "-fpermissive", "-shared", "-fPIC", f"-I{OURS}", f"-I{self.headers}"]
        options += ["-DFIRST_LAST"] if self.last_first else []
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True, capture_output=True)
        return ctypes.CDLL(str(library))

    def install(self, monkeypatch) -> None:
        """Runs walks on tensors of the CPU by generated kernels from now on; float64 is left to the interpreter."""
        monkeypatch.setattr(cuda_walks, "_launch", self.launch)
        monkeypatch.setattr(cuda_walks, "_processors", lambda index: PROCESSORS)
        monkeypatch.setattr(cuda_walks, "gpu_refusal", lambda device: None)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        interpret = blocks.Interpreter._interpret

        def walk(interpreter, step, values, graph, sizes, block, compiled):
            double = any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 for v in values.values())
            found = "float64" if double else interpreter.cuda_walk(step.walk, torch.device("cuda"))
            if isinstance(found, str):
                return interpret(interpreter, step, values, graph, sizes, block)
            arrays = [[None if t is None else t.int() for t in arrays] for arrays in (graph.csr, graph.csc)]
            given = Graph(*arrays, graph.max_degrees_at_hand)
            return found(values, given, sizes, interpreter.receiving)

        monkeypatch.setattr(blocks.Interpreter, "_walk", walk)
