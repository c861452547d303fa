"""From a kernel to its code: memory, packs, the user's disk, the compiler."""

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
SECONDS_TO_SAY = 2.0  # compiling for longer is told on stderr


@dataclass(frozen=True)
class Kernel:
    """A kernel of the sources that the package carries.

    Attributes:
        header: which declares it, relative to ``core_cuda``.
        expression: its name with template arguments: ``"edgeless::cuda::merge_softmax_kernel<float, int32_t>"``.
    """

    header: str
    expression: str

    @property
    def source(self) -> str:
        """What is compiled."""
        return f'#include <cmath>\n#include "{self.header}"\n'


def identity_of(kernel: Kernel, architecture: int) -> str:
    """What the code of a kernel is known by in memory and in a pack, whichever compiler made it."""
    parts = (headers.digest_of_sources(), kernel.header, kernel.expression, str(architecture), *OPTIONS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _key_of(identity: str) -> str:
    """What it is known by on the disk: there, another compiler or other headers of CUDA make other code."""
    version = "{}.{}".format(*installed_nvrtc().version)
    return hashlib.sha256("\0".join((identity, version, headers.digest_of_cuda())).encode()).hexdigest()


_images: dict[str, Image] = {}  # by identity
_locks: dict[str, threading.Lock] = {}  # by identity, for threads that want the same kernel at once
if hasattr(os, "register_at_fork"):  # a child has none of the threads that hold them
    os.register_at_fork(after_in_child=lambda: _locks.clear())


def compiled(
    kernel: Kernel, architecture: int, *, store: Optional[Store] = None, packs: Optional[Sequence[Pack]] = None
) -> Image:
    """The code of a kernel for an architecture.

    Threads and processes that ask for one kernel at the same time compile it once.

    Args:
        architecture: 90 for sm_90.
        store: the user's by default.
        packs: looked at before the store; :func:`edgeless.kernels.default_packs` by default.
    Raises:
        NvrtcError: the kernel is in no pack, and there is no compiler for it; or it is not on the disk either, and
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
            found = (pack.get(identity) for pack in (default_packs() if packs is None else packs))
            image = next((image for image in found if image is not None), None)
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
        image = store.get(key)  # which another process may have made meanwhile
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
    """The code of several kernels, compiled side by side; one line on stderr where that takes more than two seconds.

    Args:
        threads: the machine's cores by default.
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
