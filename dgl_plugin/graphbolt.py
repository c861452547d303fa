"""Makes a DGL importable whose graphbolt library was not built for the installed torch.

DGL 2.x ships graphbolt, its data loading library, compiled for a handful of torch versions, and refuses to be
imported under any other. Nothing else in DGL needs it: with an empty module in its place graphs, layers, samplers and
``dgl.dataloading`` work. Call :func:`stub` before the first ``import dgl``::

    from edgeless.dgl import graphbolt

    graphbolt.stub()
    import dgl
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch


def stub() -> bool:
    """Replaces ``dgl.graphbolt`` by an empty module if it cannot be loaded with this torch.

    Returns:
        bool: True if it was replaced; False if DGL is imported already, has no graphbolt, or has one for this torch.

    Example:
        >>> import dgl
        >>> from edgeless.dgl import graphbolt
        >>> graphbolt.stub()  # too late: DGL is imported already
        False
    """
    if "dgl" in sys.modules or _loads():
        return False
    sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt")
    return True


def _loads() -> bool:
    """True if DGL has no graphbolt, or a graphbolt library for this torch."""
    folder = Path(importlib.util.find_spec("dgl").origin).parent / "graphbolt"
    version = torch.__version__.split("+")[0]
    return not folder.is_dir() or any(folder.glob(f"*graphbolt_pytorch_{version}.*"))
