"""CUDA kernels that NVRTC compiles at run time from the headers in the package.

A :class:`Kernel` is a header of ``core_cuda`` and a name expression with its template arguments. :func:`compiled`
returns its machine code for an architecture, from memory, from a pack, from the user's cache or from the compiler. It
needs neither a CUDA toolkit nor a C++ compiler nor a GPU. Ops get their kernels from it at their first launch.

Environment variables, read where a kernel is needed:

- ``EDGELESS_KERNEL_CACHE``: the folder of the cache; by default ``edgeless/kernels`` in the user's cache folder.
- ``EDGELESS_KERNEL_PACKS``: packs that are searched first, separated as in ``PATH``.
- ``EDGELESS_JIT=cached``: nothing is compiled; a kernel that is in no pack and not in the cache is an error.
- ``EDGELESS_KERNEL_LOG``: a file that gets a line for each kernel that a process needs, for ``edgeless compile``.

>>> from edgeless.kernels import Kernel
>>> kernel = Kernel("attention/cuda/merge.cuh", "edgeless::cuda::merge_softmax_kernel<float, int32_t>")
>>> kernel.header
'attention/cuda/merge.cuh'
"""

from .compiler import Kernel, compiled, compiled_together, identity_of
from .launching import launch
from .nvrtc import CompileError, Image, NvrtcError, installed_nvrtc
from .pack import Pack, default_packs, write_pack
from .provider import read_log
from .store import Store, default_store

__all__ = [
    "CompileError",
    "Image",
    "Kernel",
    "NvrtcError",
    "Pack",
    "Store",
    "compiled",
    "compiled_together",
    "default_packs",
    "default_store",
    "identity_of",
    "installed_nvrtc",
    "launch",
    "read_log",
    "write_pack",
]
