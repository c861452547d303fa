"""Runs generated CUDA kernels on the host, where there is no GPU: g++ compiles their text with on_host.h before it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from edgeless.kernels import provider
from edgeless.programs.program import Program
from edgeless.programs.run import compiled, cuda_walks, interpreter
from edgeless.programs.scheduling import own_factors

PROCESSORS = 2  # of the GPU that walks are divided for
_FLAGS = ("-std=gnu++17", "-O1", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
# What g++ does not know in a header, and what is there in its place.
REPLACED = {
    "common/vec.cuh": [('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = exp2f(x);")],
    "common/tf32.cuh": [("#if __CUDA_ARCH__ >= 800", "multiply_tf32(c, a, b, fresh);\n#if 0")],
    "common/half_mma.cuh": [("#if __CUDA_ARCH__ >= 800", "multiply_halves<S>(c, a, b0, b1);\n#if 0")],
    "programs/walk.cuh": [("extern __shared__ uint4 dynamic[];", "uint4* const dynamic = on_host::dynamic;")],
}
_CORE = Path(__file__).resolve().parents[2] / "core_cuda"


@functools.cache
def missing() -> str | None:
    """Why nothing can be run, or None."""
    if shutil.which("g++") is None:
        return "there is no g++"
    header = str(Path(__file__).with_name("on_host.h"))
    done = subprocess.run(["g++", *_FLAGS, "-fsyntax-only", "-x", "c++", header], capture_output=True)
    return None if done.returncode == 0 else "g++ does not know the types of on_host.h"


def headers(replaced: dict[str, list[tuple[str, str]]]) -> tempfile.TemporaryDirectory:
    """A folder ``core`` with the headers of the core, in which texts are replaced, by file."""
    made = tempfile.TemporaryDirectory(prefix="edgeless-")
    root = Path(made.name) / "core"
    shutil.copytree(_CORE, root, ignore=lambda folder, names: [n for n in names if n.endswith(".cpp")])
    for name, pairs in replaced.items():
        text = (root / name).read_text()
        for old, new in pairs:
            assert old in text, (name, old)
            text = text.replace(old, new)
        (root / name).write_text(text)
    for name in ("cuda_fp16.h", "cuda_bf16.h"):
        (root / name).write_text("")
    return made


def library_of(source: str, folder: tempfile.TemporaryDirectory, *flags: str) -> ctypes.CDLL:
    """A source as a library, with the headers in a folder and on_host.h."""
    with tempfile.TemporaryDirectory(dir=folder.name) as inner:
        file = Path(inner) / "kernels.cpp"
        file.write_text(source)
        made = file.with_suffix(".so")
        includes = [f"-I{Path(__file__).parent}", f"-I{folder.name}/core"]
        command = ["g++", *_FLAGS, *flags, *includes, str(file), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ fails: {done.stderr[:3000]}")
        return ctypes.CDLL(str(made))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return headers(REPLACED)


@functools.cache
def _library(header: str, expression: str) -> ctypes.CDLL:
    """The kernel of a text as a function of the words of its argument, the columns and rows of the grid, the threads
    and the bytes of dynamic shared memory.
    """
    header, text = provider._texts[header]
    call = f"on_host::launch(&{expression}, words, columns, rows, threads, bytes);"
    source = f"""#include "on_host.h"
#include "{header}"
{text}
extern "C" void launch(const char* words, int columns, int rows, int threads, int bytes) {{ {call} }}
"""
    return library_of(source, _folder())


def _launch(header, expression, grid, words, stream, shared=0):
    if grid[0]:
        _library(header, expression).launch(words, grid[0], grid[1], cuda_walks.THREADS, shared)


class _Torch:
    """torch as the runner of walks sees it: memory that nobody has written is full of noise."""

    _C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 0)

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(shape, **options):
        made = torch.empty(shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 0x7B)


def _all_on_host(program: Program, graph) -> bool:
    runs = [run for run in (program.forward, program.backward) if run is not None]
    return all(run.all_on_cuda(graph.device) for run in runs)


@contextlib.contextmanager
def on_host() -> Iterator[list[str]]:
    """Runs programs on the CPU by the kernels of a GPU inside the block; yields why walks had none, as they run."""
    interpreted: list[str] = []

    def walk(self, step, values, graph, sizes, block, by_code):
        found = None
        if by_code and not interpreter._examples.kept:
            found = self.run_on_cuda(step.walk, values, graph, sizes)
            if found is None:
                interpreted.append(step.walk.code.on_cuda)
        return self._interpret(step, values, graph, sizes, block) if found is None else found

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (cuda_walks, "_launch", _launch),
            (cuda_walks, "torch", _Torch()),
            (cuda_walks, "_processors", lambda index: PROCESSORS),
            (cuda_walks, "gpu_refusal", lambda device: None),
            (interpreter.Interpreter, "_walk", walk),
            (Program, "ready", _all_on_host),
            (own_factors, "DEVICES", ()),  # programs are those of CUDA
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield interpreted


MODES = ["off", "now", pytest.param("host", marks=pytest.mark.skipif(missing() is not None, reason=f"{missing()}"))]


@contextlib.contextmanager
def running(mode: str) -> Iterator[None]:
    """Runs walks by the interpreter (``"off"``), as C (``"now"``), or as CUDA that the host runs (``"host"``)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled.compiling("off" if mode == "host" else mode))
        if mode == "host":
            stack.enter_context(on_host())
        yield
