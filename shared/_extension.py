"""Loads the compiled part, whose import registers the ops in ``torch.ops.edgeless``, or says how to get it."""

import importlib

import torch  # the extension links to its libraries

try:
    _C = importlib.import_module("edgeless._C")
except ImportError as error:
    raise ImportError(
        f"edgeless._C, the compiled part of edgeless, does not load with torch {torch.__version__} ({error}): build it "
        "against this torch with `pip install --no-build-isolation .` in a checkout of edgeless."
    ) from error


def _provide(header: str, expression: str, architecture: int) -> tuple[bytes, str]:
    """Returns the code of a CUDA kernel and its name there. The core calls it at the first launch on a device; a
    process that launches none never imports the compiler.
    """
    from .kernels import provider

    return provider.provide(header, expression, architecture)


def _prepare(kernels: list[tuple[str, str]], architecture: int) -> None:
    """Begins to compile kernels that will be needed soon, in the background."""
    from .kernels import provider

    provider.prepare(kernels, architecture)


_C.set_kernel_provider(provide=_provide, prepare=_prepare)
