"""Drop-in layers for PyTorch Geometric: change ``torch_geometric.nn`` to ``edgeless.pyg.nn`` in an import.

``edgeless.pyg.transforms`` is ``torch_geometric.transforms`` with a transform that reorders nodes.
"""

import importlib
from typing import TYPE_CHECKING

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ImportError("edgeless.pyg needs PyTorch Geometric: pip install torch_geometric") from error

__all__ = ["nn", "transforms"]

if TYPE_CHECKING:
    from . import nn, transforms
else:

    def __getattr__(
        name,
    ):  # lazy: threads that import a package and one of its modules at a time can deadlock
        if name in __all__:
            return importlib.import_module(f"edgeless.pyg.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
