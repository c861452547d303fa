"""Finds a kernel's machine code in memory, in packs or on disk, or compiles it."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Optional

from . import headers
from .nvrtc import Image, NvrtcError, installed_nvrtc
from .pack import Pack, default_packs
from .store import Store, default_store

__all__ = ["Kernel", "compiled", "compiled_together", "identity_of"]

OPTIONS = ("--std=c++20", "-default-device")
SECONDS_TO_SAY = 2.0  # longer compilations are reported on stderr


@dataclass(frozen=True)
class Kernel:
    """A kernel in the sources that the package contains, or in a text that includes one of them.

    Attributes:
        header: the header that declares it, or that the text needs, relative to ``core_cuda``.
        expression: its name with template arguments: ``"edgeless::cuda::merge_softmax_kernel<float, int32_t>"``.
        text: CUDA C++ behind the header, written at run time.
    """

    header: str
    expression: str
    text: str = ""

    @property
    def source(self) -> str:
        """The translation unit that is compiled."""
        return f'#include <cmath>\n#include "{self.header}"\n{self.text}'


def identity_of(kernel: Kernel, architecture: int) -> str:
    """Returns the key of a kernel's code in memory and in packs. It does not depend on the compiler."""
    parts = (headers.digest_of_sources(), kernel.header, kernel.expression, str(architecture), *OPTIONS)
    parts = (*parts, kernel.text) if kernel.text else parts
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _key_of(identity: str) -> str:
    """Returns the key on disk, which also depends on the compiler's version and the contents of CUDA's headers."""
    version = "{}.{}".format(*installed_nvrtc().version)
    return hashlib.sha256("\0".join((identity, version, headers.digest_of_cuda())).encode()).hexdigest()


# Architecture -> the architecture of the same generation and a smaller minor version whose machine code it also runs,
# so that packs need not have the code twice; NVRTC compiles for the GPU's own architecture.
RUNS_CODE_OF = {89: 86, 103: 100, 121: 120}


def _packed(kernel: Kernel, architecture: int, packs: Sequence[Pack]) -> Optional[Image]:
    """Returns the image that packs have for an architecture, or else for one whose code it runs."""
    for other in (architecture, RUNS_CODE_OF.get(architecture)):
        for pack in packs if other else ():
            image = pack.get(identity_of(kernel, other))
            if image is not None and (other == architecture or image.kind == "cubin"):
                return image
    return None


_images: dict[str, Image] = {}  # identity -> image
_locks: dict[str, threading.Lock] = {}  # identity -> lock, so that one thread compiles a kernel that several need
if hasattr(os, "register_at_fork"):  # a forked child lacks the threads that hold the locks
    os.register_at_fork(after_in_child=lambda: _locks.clear())


def compiled(
    kernel: Kernel, architecture: int, *, store: Optional[Store] = None, packs: Optional[Sequence[Pack]] = None
) -> Image:
    """Returns the code of a kernel for an architecture.

    Threads and processes that need one kernel at the same time compile it once.

    Args:
        kernel: the kernel to find or compile.
        architecture: the compute capability, 90 for sm_90.
        store: the disk cache; by default the user's, :func:`edgeless.kernels.default_store`.
        packs: searched before the store; by default :func:`edgeless.kernels.default_packs`.
    Raises:
        NvrtcError: the kernel is in no pack and there is no compiler for it; or it is not on disk either, and
            ``EDGELESS_JIT=cached`` forbids compiling.
        CompileError: the sources do not compile.
        ValueError: EDGELESS_JIT has another value.
    """
    if os.environ.get("EDGELESS_JIT", "") not in ("", "cached"):
        raise ValueError(f"EDGELESS_JIT must be 'cached' or not be set, got {os.environ['EDGELESS_JIT']!r}")
    identity = identity_of(kernel, architecture)
    image = _images.get(identity)
    if image is not None:
        return image
    with _locks.setdefault(identity, threading.Lock()):
        if identity not in _images:
            image = _packed(kernel, architecture, default_packs() if packs is None else packs)
            if image is None:
                image = _stored_or_made(kernel, architecture, identity, default_store() if store is None else store)
            _images[identity] = image
    return _images[identity]


def _stored_or_made(kernel: Kernel, architecture: int, identity: str, store: Store) -> Image:
    target, key = installed_nvrtc().target(architecture), _key_of(identity)
    image = store.get(key)
    if image is not None:
        return image
    if os.environ.get("EDGELESS_JIT") == "cached":
        raise NvrtcError(
            f"{kernel.expression} is not compiled for {target} yet, and EDGELESS_JIT=cached forbids compiling it here."
        )
    with store.writing(key):
        image = store.get(key)  # another process may have compiled it meanwhile
        if image is None:
            options = [*OPTIONS, *(f"-I{folder}" for folder in headers.include_folders())]
            image = installed_nvrtc().compile(kernel.source, kernel.expression, target, options)
            store.put(key, image)
    return image


def compiled_together(
    kernels: Iterable[Kernel],
    architecture: int,
    *,
    store: Optional[Store] = None,
    packs: Optional[Sequence[Pack]] = None,
    threads: Optional[int] = None,
) -> list[Image]:
    """Returns the code of several kernels, compiled in parallel; reports on stderr if that takes over two seconds.

    Args:
        kernels, architecture, store, packs: as in :func:`compiled`.
        threads: the number of threads; by default the number of the machine's cores.
    Returns:
        The images in the order of ``kernels``.
    """
    kernels = list(kernels)
    begin = time.monotonic()
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        images = list(pool.map(lambda kernel: compiled(kernel, architecture, store=store, packs=packs), kernels))
    seconds = time.monotonic() - begin
    if seconds > SECONDS_TO_SAY:
        print(
            f"edgeless: compiled CUDA kernels for sm_{architecture} in {seconds:.1f} s; they are kept in "
            f"{(default_store() if store is None else store).folder}",
            file=sys.stderr,
        )
    return images
