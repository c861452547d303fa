"""CUDA kernels that NVRTC compiles at run time from the sources in the package.

A :class:`Kernel` is a header of ``core_cuda`` and a name expression with its template arguments. :func:`compiled`
returns its machine code for an architecture, from memory, from a pack, from the user's cache or from the compiler. It
needs neither ``nvcc`` nor a C++ compiler nor a GPU.

>>> from edgeless.kernels import Kernel
>>> kernel = Kernel("attention/cuda/merge.cuh", "edgeless::cuda::merge_softmax_kernel<float, int32_t>")
>>> kernel.header
'attention/cuda/merge.cuh'
"""

from .compiler import Kernel, compiled, compiled_together, identity_of
from .launching import launch
from .nvrtc import CompileError, Image, NvrtcError, installed_nvrtc
from .pack import Pack, default_packs, write_pack
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
    "write_pack",
]
