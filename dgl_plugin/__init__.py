"""Drop-in layers for DGL: replace ``from dgl.nn import GATv2Conv`` by ``from edgeless.dgl.nn import GATv2Conv``.

``edgeless.dgl.nn`` has the layers, ``edgeless.dgl.ops`` fused functions of ``dgl.ops``, ``edgeless.dgl.dataloading`` a
loader whose batches have few sizes, and ``edgeless.dgl.transforms`` a transform that reorders nodes; every other name
in these modules is DGL's own. :func:`to_graph` converts a DGLGraph to a cached :class:`edgeless.Graph` for
:mod:`edgeless.functional`. These five import DGL; ``edgeless.dgl.graphbolt`` does not: it makes a DGL importable whose
graphbolt was not built for the installed torch.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if sys.modules.get("dgl") is None:
    _spec = importlib.util.find_spec("dgl")
    if _spec is None or _spec.origin is None:  # no origin: a namespace package, such as a test folder named dgl
        raise ImportError("edgeless.dgl needs DGL, which is not installed: run `pip install 'edgeless[dgl]'`.")

__all__ = ["dataloading", "nn", "ops", "to_graph", "transforms"]


if TYPE_CHECKING:
    from . import dataloading, nn, ops, transforms
    from .convert import to_graph
else:

    def __getattr__(name):
        if name in ("dataloading", "nn", "ops", "transforms"):
            return importlib.import_module(f"edgeless.dgl.{name}")
        if name == "to_graph":
            return importlib.import_module("edgeless.dgl.convert").to_graph
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
