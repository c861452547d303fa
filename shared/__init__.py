"""Graph neural network layers that never write an edge tensor."""

if __name__ != "edgeless":  # a checkout's folder name must not become a second copy of the package
    raise ImportError(f"this package is imported as 'edgeless', not as {__name__!r}")

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING

from . import (
    _extension,  # noqa: F401  first: without the compiled part nothing else is worth importing
    blocks,
    cache,
    functional,
    reference,
    reordering,
)
from .cache import cache_info, clear_cache, set_cache_limit
from .capture.model import Capture, capture
from .capture.step import CapturedStep, capture_step
from .choices.backends import NotFusedError, backend, explain
from .choices.engines import engine
from .graph.handle import Graph
from .graph.typed import TypedGraph
from .layers import stand_in  # noqa: F401  inner modules of adapters can be found from now on
from .layers.accelerate import accelerate
from .layers.adapter import FusedLayer
from .layers.calls import Report, report
from .layers.explanation import Explanation, ModelExplanation
from .prefetch import prefetch

__all__ = [
    "Capture",
    "CapturedStep",
    "Explanation",
    "FusedLayer",
    "Graph",
    "ModelExplanation",
    "NotFusedError",
    "Report",
    "TypedGraph",
    "accelerate",
    "backend",
    "blocks",
    "cache",
    "cache_info",
    "capture",
    "capture_step",
    "clear_cache",
    "engine",
    "explain",
    "functional",
    "prefetch",
    "reference",
    "reordering",
    "report",
    "set_cache_limit",
]


if TYPE_CHECKING:
    from . import dgl, distributed, pyg  # noqa: F401
else:

    def __getattr__(name):
        if name in ("dgl", "distributed", "pyg"):  # at first use: frameworks take seconds to import
            return importlib.import_module(f"edgeless.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
