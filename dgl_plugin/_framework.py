"""Imports DGL, or raises an ImportError whose message says what to do."""

try:
    import dgl
    from dgl import ops as stock_ops  # noqa: F401
    from dgl import transforms  # noqa: F401
    from dgl.backend import replace_inf_with_zero as zero_for_infinite  # noqa: F401
    from dgl.backend.pytorch import sparse as backend_sparse  # noqa: F401
    from dgl.base import ALL, is_all  # noqa: F401
    from dgl.core import is_builtin  # noqa: F401
    from dgl.nn.pytorch import conv as stock  # noqa: F401
    from dgl.nn.pytorch import hetero as stock_hetero  # noqa: F401
    from dgl.nn.pytorch import linear as stock_linear  # noqa: F401
    from dgl.udf import EdgeBatch, NodeBatch  # noqa: F401
except (ImportError, OSError) as error:  # OSError: a compiled library of DGL is missing or does not load
    _cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    _remedy = (
        "call edgeless.dgl.graphbolt.stub() before the first import of dgl"
        if "graphbolt" in str(error)
        else "run `pip install 'edgeless[dgl]'`"
    )
    raise ImportError(f"edgeless.dgl needs DGL, whose import fails here ({_cause}): {_remedy}.") from error

DGLError, DGLGraph, heterograph = dgl.DGLError, dgl.DGLGraph, dgl.heterograph
