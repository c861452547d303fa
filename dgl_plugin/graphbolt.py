"""For a DGL whose graphbolt library was not built for the installed torch.

DGL 2.x ships graphbolt, its data loading library, compiled for a handful of torch versions, and refuses to be
imported under any other. Nothing else in DGL needs it: with an empty module in its place graphs, layers, samplers and
``dgl.dataloading`` work. Call :func:`stub` before the first ``import dgl``::

    from edgeless.dgl import graphbolt

    graphbolt.stub()
    import dgl
"""

import sys
import types


def stub() -> None:
    """Puts an empty module in the place of ``dgl.graphbolt``. ``dgl.graphbolt`` cannot be used in this process then.

    Raises:
        RuntimeError: if dgl has been imported already: it is too late then, and not needed.
    """
    if "dgl" in sys.modules:
        raise RuntimeError("edgeless.dgl.graphbolt.stub must be called before dgl is imported, but dgl is imported already")
    sys.modules.setdefault("dgl.graphbolt", types.ModuleType("dgl.graphbolt"))
