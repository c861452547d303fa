"""Gives the core the code of the kernels that it launches, and records their names.

The environment variable ``EDGELESS_KERNEL_LOG`` names a file. Each kernel that a process needs adds one line to it,
``header<TAB>expression<TAB>sm_90``, whether its code was compiled, cached or in a pack. Several processes may write to
one file. ``python -m edgeless compile --kernels FILE`` puts these kernels into a pack.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Union

from .compiler import Kernel, compiled
from .store import default_store

__all__ = ["kernel_named", "named_text", "prepare", "provide", "read_log"]

SECONDS_TO_SAY = 2.0  # longer waits are reported on stderr, once

_logged: dict[tuple[str, str, int], object] = {}  # kernels that this process or its parent has logged


def provide(header: str, expression: str, architecture: int) -> tuple[bytes, str]:
    """Returns a kernel's code for an architecture and its mangled name there.

    Raises:
        CompileError, NvrtcError, ValueError: as :func:`edgeless.kernels.compiled`.
    """
    kernel = kernel_named(header, expression)
    if not kernel.text:  # a pack is made of headers alone
        _log(header, expression, architecture)
    begin = time.monotonic()
    image = compiled(kernel, architecture)
    _report(time.monotonic() - begin, architecture)
    return image.code, image.name


def prepare(kernels: Sequence[tuple[str, str]], architecture: int) -> None:
    """Starts to compile kernels in threads of their own, and returns at once.

    Errors are left to :func:`provide`, which the launches of the same kernels call.

    Args:
        kernels: their headers and expressions.
        architecture: as in :func:`provide`.
    """

    def compile_one(kernel: Kernel) -> None:
        with contextlib.suppress(Exception):
            compiled(kernel, architecture)

    for name in kernels:
        threading.Thread(target=compile_one, args=(kernel_named(*name),), daemon=True).start()


_texts: dict[str, tuple[str, str]] = {}  # (header, text) by the name that the core knows instead


def named_text(header: str, text: str) -> str:
    """Registers a text that includes a header under a name, by which its kernels are launched like those of headers."""
    digest = hashlib.sha256("\0".join((header, text)).encode()).hexdigest()
    name = f"generated/{digest}"
    _texts[name] = (header, text)
    return name


def kernel_named(header: str, expression: str) -> Kernel:
    """The kernel of a header, or of a text that :func:`named_text` gave a name."""
    header, text = _texts.get(header, (header, ""))
    return Kernel(header, expression, text)


_waited = 0.0  # seconds


def _report(seconds: float, architecture: int) -> None:
    global _waited
    before, _waited = _waited, _waited + seconds
    if before <= SECONDS_TO_SAY < _waited:
        folder = default_store().folder
        kept = "not kept, since there is no home directory" if folder is None else f"kept in {folder}"
        print(
            f"edgeless: CUDA kernels are compiled for sm_{architecture} at their first use and {kept}; "
            "`python -m edgeless compile` makes a pack of them beforehand",
            file=sys.stderr,
        )


def _log(header: str, expression: str, architecture: int) -> None:
    file = os.environ.get("EDGELESS_KERNEL_LOG")
    if not file:
        return
    mine = object()
    if _logged.setdefault((header, expression, architecture), mine) is not mine:  # atomic, as a search first is not
        return
    try:
        # One write to a file opened for appending: lines of several processes do not mix.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{header}\t{expression}\tsm_{architecture}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        warnings.warn(f"edgeless: EDGELESS_KERNEL_LOG={file} cannot be written: {error.strerror}", stacklevel=2)


def read_log(file: Union[str, Path]) -> dict[Kernel, set[int]]:
    """Returns the kernels that a log names, each with the architectures that it was needed for.

    Raises:
        ValueError: a line of the file has another form.
        OSError: the file cannot be read.
    """
    found: dict[Kernel, set[int]] = {}
    for number, line in enumerate(_lines(Path(file)), 1):
        parts = re.fullmatch(r"([^\t]+)\t([^\t]+)\tsm_(\d{2,3})", line, re.ASCII)
        if parts is None:
            raise ValueError(f"line {number} is not of the form header<TAB>expression<TAB>sm_90: {line[:200]!r}")
        found.setdefault(Kernel(parts[1], parts[2]), set()).add(int(parts[3]))
    return found


def _lines(file: Path) -> Iterable[str]:
    return file.read_bytes().decode(errors="backslashreplace").splitlines()
