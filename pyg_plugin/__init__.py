"""Drop-in layers for PyTorch Geometric: change ``torch_geometric.nn`` to ``edgeless.pyg.nn`` in an import.

``edgeless.pyg.loader`` is ``torch_geometric.loader`` with a loader whose batches have few sizes, and
``edgeless.pyg.transforms`` is ``torch_geometric.transforms`` with a transform that reorders nodes.
"""

import importlib
from typing import TYPE_CHECKING

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ImportError("edgeless.pyg needs PyTorch Geometric: pip install torch_geometric") from error

__all__ = ["loader", "nn", "transforms"]

if TYPE_CHECKING:
    from . import loader, nn, transforms
else:

    def __getattr__(
        name,
    ):  # lazy: threads that import a package and one of its modules at a time can deadlock
        if name in __all__:
            return importlib.import_module(f"edgeless.pyg.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
