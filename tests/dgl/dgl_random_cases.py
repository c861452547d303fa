"""The common part of the random calls of DGL's layers."""

from __future__ import annotations

import dgl
import torch
from drawn import DrawnCall, assert_as_exact

import edgeless
from edgeless.dgl.convert import to_graph


class DGLCall(DrawnCall):
    """One layer and one call, on the CPU. DGL has no float16 there, and not every kernel for bfloat16.

    Attributes:
        kind: ``"handle"`` where ours is called with an :class:`edgeless.Graph` in place of the graph.
    """

    kind = ""

    def as_given(self, package, graph, is_pair=False):
        """The graph argument of a layer. A handle with one tensor of features is a graph of one node type upstream."""
        if self.kind != "handle":
            return graph
        if package == "fused":
            return to_graph(graph)
        return graph if is_pair else dgl.graph(graph.edges(order="eid"), num_nodes=graph.num_src_nodes())

    def check(self):
        want = self.outcome("stock")
        narrow = torch.bfloat16 in (self.dtype, self.autocast, *self.others.values())
        if not (narrow and isinstance(want, Exception)):
            super().check()
            return
        # Our layer may support a call that DGL's does not; then its result must be right.
        truth = self.outcome("stock", exact=True)
        with edgeless.backend(self.backend):
            have = self.outcome("fused")
        if isinstance(have, Exception):
            return
        assert not isinstance(truth, Exception), f"{self}: a result instead of {truth!r}"
        rounded = {name: t if t is None or have[name] is None else t.to(have[name].dtype) for name, t in truth.items()}
        assert_as_exact(have, rounded, truth, self.limit)
