"""Drop-in layers for PyTorch Geometric: change ``torch_geometric.nn`` to ``edgeless.pyg.nn`` in an import.

``edgeless.pyg.transforms`` has a transform that reorders nodes.
"""

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ImportError("edgeless.pyg needs PyTorch Geometric: pip install torch_geometric") from error

from . import nn, transforms

__all__ = ["nn", "transforms"]
