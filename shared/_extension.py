"""Loads the compiled extension, which registers the ops in ``torch.ops.edgeless``, or raises how to build it."""

import importlib

import torch  # the extension links to its libraries


def _check_torch(built_for: str) -> None:
    """Raises if the extension was built for another minor version of torch: torch's C++ interface changes with each, so
    that the extension may load there and end the process later.

    Raises:
        ImportError: the running torch is another one.
    """
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        minor = ".".join(built_for.split(".")[:2])
        raise ImportError(
            f"edgeless._C, the compiled part of edgeless, was built for torch {minor} and is not loaded with torch "
            f"{torch.__version__}: install torch {minor}, or build edgeless against this torch with `pip install "
            "--no-build-isolation .` in a checkout of edgeless."
        )


try:
    _built = importlib.import_module("edgeless._built")  # setup.py writes it beside the extension
except ModuleNotFoundError:  # the extension was copied here without it
    pass
else:
    _check_torch(_built.TORCH)

try:
    _C = importlib.import_module("edgeless._C")
except ImportError as error:
    raise ImportError(
        f"edgeless._C, the compiled part of edgeless, does not load with torch {torch.__version__} ({error}): build it "
        "against this torch with `pip install --no-build-isolation .` in a checkout of edgeless."
    ) from error


provided = 0  # loaded kernels, counted for captures (shared/capture/model_recording.py)


def _provide(header: str, expression: str, architecture: int) -> tuple[bytes, str]:
    """Returns the code of a CUDA kernel and its name there. The core calls it at the first launch on a device; a
    process that launches none never imports the compiler.
    """
    global provided
    from .kernels import provider

    provided += 1
    return provider.provide(header, expression, architecture)


def _prepare(kernels: list[tuple[str, str]], architecture: int) -> None:
    """Starts to compile kernels that will be needed soon, in the background."""
    from .kernels import provider

    provider.prepare(kernels, architecture)


_C.set_kernel_provider(provide=_provide, prepare=_prepare)
