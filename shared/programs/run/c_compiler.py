"""Compiles C by the machine's compiler, and keeps the libraries in memory and on disk.

They are in the folder of compiled kernels (:mod:`edgeless.kernels.store`), to which only the user may write. Its files
are complete, and altered ones are compiled again. The library that is loaded is a copy of bytes whose checksum is
right.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Optional

from ... import _extension
from ...kernels.nvrtc import Image
from ...kernels.store import default_store

FLAGS = (
    *("-x", "c", "-std=gnu11", "-O2", "-ftree-vectorize", "-shared", "-fPIC", "-w"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-pthread"),
)
_NATIVE = ("-march=native", "-mcpu=native", "")  # the compiler's first supported option is used
_SECONDS = 120
_loaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


class NoCompiler(Exception):
    """Raised if nothing can be compiled; the text is a clause with the reason."""


@cache
def compiler() -> tuple[tuple[str, ...], str]:
    """The command of the machine's C compiler with its flags, and a text that identifies the compiler and the CPU.

    Raises:
        NoCompiler: there is no compiler.
    """
    given = shlex.split(os.environ.get("CC", ""))
    commands = [given] if given else [[name] for name in ("cc", "gcc", "clang")]
    for command in commands:
        if not shutil.which(command[0]):
            continue
        for native in _NATIVE:
            flags = [*command, *FLAGS, *([native] if native else [])]
            found = _run([*flags, "-fsyntax-only", "-"], b"int walk(void) { return 0; }\n")
            if found is not None:
                version = _run([*command, "--version"], b"") or b""
                return tuple(flags), f"{flags}\n{version.decode(errors='replace')}\n{_cpu()}"
    raise NoCompiler(f"there is no C compiler ({' or '.join(command[0] for command in commands)})")


@cache
def vector_bytes() -> int:
    """The bytes of the widest vectors that the compiler makes for this CPU.

    Raises:
        NoCompiler: there is none.
    """
    command, _ = compiler()
    defined = _run([*command, "-dM", "-E", "-"], b"") or b""
    names = {line.split()[1] for line in defined.splitlines() if line.startswith(b"#define ")}
    return 64 if b"__AVX512F__" in names else 32 if b"__AVX__" in names else 16


def _run(command: list[str], text: bytes) -> Optional[bytes]:
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu() -> str:
    """A text that identifies the CPU's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *dict.fromkeys(line for line in lines if line.startswith(wanted))])


def load(text: str) -> ctypes.CDLL:
    """The library that a text in C compiles to.

    Raises:
        NoCompiler: there is no compiler, it fails, or its result cannot be loaded.
    """
    command, kind = compiler()
    key = hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()
    with _lock:
        if key in _loaded:
            return _loaded[key]
    store = default_store()
    image = store.get(key)
    if image is None:
        with store.writing(key):
            image = store.get(key)
            if image is None:
                image = Image("so", "walk", _compile(command, text))
                store.put(key, image)
    library = _open(image.code)
    _extension.provided += 1
    with _lock:
        return _loaded.setdefault(key, library)


def _compile(command: tuple[str, ...], text: str) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="edgeless-") as folder:
            out = Path(folder) / "walk.so"
            done = subprocess.run(
                [*command, "-", "-o", str(out), "-lm"], input=text.encode(), capture_output=True, timeout=_SECONDS
            )
            if done.returncode:
                lines = done.stderr.decode(errors="replace").splitlines()
                error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise NoCompiler(f"{command[0]} fails: {error[:160]}")
            return out.read_bytes()
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"{command[0]} cannot be run: {error}") from error


def _open(code: bytes) -> ctypes.CDLL:
    """Loads a library from a private file with a new name, and removes the file."""
    try:
        with tempfile.TemporaryDirectory(prefix="edgeless-") as folder:
            file = Path(folder) / "walk.so"
            file.write_bytes(code)
            return ctypes.CDLL(str(file))
    except OSError as error:
        raise NoCompiler(f"the compiled code cannot be loaded: {error}") from error
