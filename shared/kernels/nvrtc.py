"""NVIDIA's runtime compiler for CUDA C++ (NVRTC), through its C interface; opened when the first kernel is compiled.

Every PyTorch with CUDA brings the library along. Calls go through :mod:`ctypes`, so edgeless links to no CUDA library,
and release the GIL, so threads compile in parallel.
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

VERSIONS = (13, 12)  # supported major versions, the preferred one first


class NvrtcError(RuntimeError):
    """Raised where no NVRTC can compile for a device."""


class CompileError(RuntimeError):
    """Raised where a kernel does not compile; the message has the kernel, the target and the compiler's log."""


@dataclass(frozen=True)
class Image:
    """The code of one kernel.

    Attributes:
        kind: ``"cubin"``, machine code for one architecture, or ``"ptx"``, which the driver compiles.
        name: the kernel's mangled name in the code.
        code: the bytes that the driver loads.
    """

    kind: str
    name: str
    code: bytes


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = [("file", ctypes.c_char_p), ("others", ctypes.c_void_p * 3)]


class Nvrtc:
    """One NVRTC library.

    Args:
        path: a file, or a library name that the dynamic loader searches for.
    Raises:
        OSError: the library cannot be opened.
    """

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.path = path
        self.version = (major.value, minor.value)

    @property
    def file(self) -> str:
        """The file that the loader found for ``path``, or ``path`` if the loader does not report it."""
        try:
            found = _Symbol()
            function = ctypes.cast(self._library.nvrtcVersion, ctypes.c_void_p)
            known = ctypes.CDLL(None).dladdr(function, ctypes.byref(found))
        except (AttributeError, TypeError, OSError):  # not POSIX
            return self.path
        return os.fsdecode(found.file) if known and found.file else self.path

    @cache  # noqa: B019  one object in a process
    def architectures(self) -> tuple[int, ...]:
        """Returns the architectures that it compiles for, ascending: 80 for sm_80."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", found)
        return tuple(sorted(found))

    def target(self, architecture: int) -> str:
        """Returns the compilation target for an architecture.

        It is ``"sm_90"``, or ``"compute_90"`` (PTX of the newest known one) if the device is newer than the compiler.

        Raises:
            NvrtcError: the compiler supports newer architectures only.
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
        """Compiles one kernel.

        Args:
            source: the CUDA C++ translation unit that contains it.
            expression: its name with template arguments, in C++ syntax.
            target: a result of :meth:`target`.
            options: further compiler options.
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
    """Returns the NVRTC of PyTorch's CUDA version or, if PyTorch has no CUDA, the newest that is installed.

    Raises:
        NvrtcError: none is installed.
    """
    tried = []
    for path in _candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError):  # the library is missing or lacks a function
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
        yield soname  # the one that PyTorch has loaded, or one on the loader's path
        for folder in sys.path:
            for inner in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib"):
                yield from sorted(glob.glob(os.path.join(glob.escape(folder), inner, soname)))
        for home in toolkits():
            yield from sorted(map(str, home.glob(f"lib64/{soname}")))


def toolkits() -> list[Path]:
    """Returns folders where a CUDA toolkit may be installed."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    return [Path(home) for home in (*named, "/usr/local/cuda") if home]
