"""Drop-in layers for DGL: replace ``from dgl.nn import GATv2Conv`` by ``from edgeless.dgl.nn import GATv2Conv``.

``edgeless.dgl.nn`` has the layers, ``edgeless.dgl.ops`` functions of ``dgl.ops``, ``edgeless.dgl.transforms`` a
transform that reorders nodes, and all three have what else DGL has there. :func:`to_graph` is the cached handle of a
DGLGraph for :mod:`edgeless.functional`, ``edgeless.dgl.graphbolt`` a way to import a DGL whose graphbolt was not built
for the installed torch. DGL itself is imported by the first four only.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if sys.modules.get("dgl") is None:
    _spec = importlib.util.find_spec("dgl")
    if _spec is None or _spec.origin is None:  # no origin: just a folder of this name, say of someone's tests
        raise ImportError("edgeless.dgl needs DGL, which is not installed: run `pip install 'edgeless[dgl]'`.")

__all__ = ["nn", "ops", "to_graph", "transforms"]


if TYPE_CHECKING:
    from . import nn, ops, transforms
    from .convert import to_graph
else:

    def __getattr__(name):
        if name in ("nn", "ops", "transforms"):
            return importlib.import_module(f"edgeless.dgl.{name}")
        if name == "to_graph":
            return importlib.import_module("edgeless.dgl.convert").to_graph
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
