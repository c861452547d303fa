"""Graph neural network layers that never write an edge tensor."""

if __name__ != "edgeless":  # a checkout's folder name must not become a second copy of the package
    raise ImportError(f"this package is imported as 'edgeless', not as {__name__!r}")

__version__ = "0.1.0"

from . import cache
from .graph import Graph

from .accelerate import accelerate  # noqa: E402
from .adapter import FusedLayer  # noqa: E402
from .backends import NotFusedError, backend, explain  # noqa: E402

__all__ = ["FusedLayer", "NotFusedError", "accelerate", "backend", "explain"]
