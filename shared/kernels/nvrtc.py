"""NVIDIA's runtime compiler for CUDA C++, by its C interface, opened when the first kernel is compiled.

Every PyTorch with CUDA brings the library along. It is called by :mod:`ctypes`, so nothing of CUDA is linked to, and
threads compile side by side while a call runs.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

__all__ = ["CompileError", "Image", "Nvrtc", "NvrtcError", "installed_nvrtc"]

VERSIONS = (13, 12)  # major versions whose interface this is


class NvrtcError(RuntimeError):
    """There is no NVRTC that can compile for a device."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message has the kernel, the architecture and the compiler's log."""


@dataclass(frozen=True)
class Image:
    """The code of one kernel.

    Attributes:
        kind: ``"cubin"``, machine code of one architecture, or ``"ptx"``, which the driver translates.
        name: the kernel's mangled name in it.
        code: the bytes that the driver loads.
    """

    kind: str
    name: str
    code: bytes


class Nvrtc:
    """One NVRTC library.

    Args:
        path: a file, or a name for the system's search.
    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.path = path
        self.version = (major.value, minor.value)

    @cache  # noqa: B019  one object in a process
    def architectures(self) -> tuple[int, ...]:
        """The architectures that it compiles for, rising: 80 for sm_80."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", found)
        return tuple(sorted(found))

    def target(self, architecture: int) -> str:
        """What a device of an architecture runs: ``"sm_90"``, or ``"compute_90"`` where it is newer than the compiler.

        Raises:
            NvrtcError: the architecture is older than all that the compiler knows.
        """
        known = self.architectures()
        if architecture in known:
            return f"sm_{architecture}"
        older = [other for other in known if other <= architecture]
        if not older:
            raise NvrtcError(
                f"NVRTC {self.version[0]}.{self.version[1]} compiles for sm_{known[0]} and later, not for "
                f"sm_{architecture}: install a PyTorch whose CUDA version supports this GPU."
            )
        return f"compute_{older[-1]}"

    def compile(self, source: str, expression: str, target: str, options: Sequence[str]) -> Image:
        """The code of one kernel.

        Args:
            source: CUDA C++ that declares it.
            expression: its name with template arguments, as C++ writes it.
            target: from :meth:`target`.
        Raises:
            CompileError: the source does not compile.
        """
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        try:
            self._check("nvrtcAddNameExpression", program, expression.encode())
            given = [f"--gpu-architecture={target}".encode(), *(option.encode() for option in options)]
            array = (ctypes.c_char_p * len(given))(*given)
            status = self._library.nvrtcCompileProgram(program, len(given), array)
            if status:
                log = self._bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise CompileError(f"{expression} does not compile for {target} ({self._said(status)}):\n{log}")
            lowered = ctypes.c_char_p()
            self._check("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(lowered))
            kind = "cubin" if target.startswith("sm_") else "ptx"
            code = self._bytes(program, "nvrtcGetCUBIN" if kind == "cubin" else "nvrtcGetPTX")
            return Image(kind, lowered.value.decode(), code)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"{getter}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._check(getter, program, found)
        return found.raw

    def _said(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return describe(status).decode()

    def _check(self, function: str, *args) -> None:
        status = getattr(self._library, function)(*args)
        if status:
            raise NvrtcError(f"{function} of {self.path} failed: {self._said(status)}")


@cache
def installed_nvrtc() -> Nvrtc:
    """The NVRTC of this process: that of PyTorch's CUDA version or, where PyTorch has no CUDA, the newest installed.

    Raises:
        NvrtcError: none is installed.
    """
    tried = []
    for path in _candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError):  # it is not there, or lacks a function
            tried.append(path)
    raise NvrtcError(
        "no NVRTC was found, which compiles the CUDA kernels: install nvidia-cuda-nvrtc, which comes along with "
        f"PyTorch for CUDA. Tried: {', '.join(tried)}"
    )


def _candidates() -> Iterator[str]:
    cuda = torch.version.cuda
    majors = [int(cuda.split(".")[0])] if cuda else VERSIONS
    for major in majors:
        soname = f"libnvrtc.so.{major}"
        yield soname  # one that PyTorch has loaded, or one on the system's path
        for folder in sys.path:
            for inner in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib"):
                yield from sorted(glob.glob(os.path.join(glob.escape(folder), inner, soname)))
        for home in toolkits():
            yield from sorted(map(str, home.glob(f"lib64/{soname}")))


def toolkits() -> list[Path]:
    """Folders of CUDA toolkits that this machine may have."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    return [Path(home) for home in (*named, "/usr/local/cuda") if home]
